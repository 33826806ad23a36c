"""Check a converted model, values included, before it is written.

``snapshot_interface(model)`` is taken before the conversion, ``check`` compares afterwards: inputs
and outputs keep name, order, type and shape (caches: the type of the plan, the last dimension W and
static); every layer has two encoders and one attention, wired to its caches, with the attributes of
the plan; rotations are orthogonal, codebooks sorted and antisymmetric to the bit, offsets finite
(all of that in ``tq_onnx.conversion.checknodes``); the function bodies are there; the plan is read
back from the metadata; and onnx's own checker, with the TurboQuant schemas registered, is content.
A target that leaves no TurboQuant operators (``tq_onnx.conversion.target``) is checked for that
instead.

A violation is a defect of the converter, never the user's fault: nothing is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import onnx
import onnx_ir as ir

from tq_onnx.conversion.cachenodes import rows_of_slots
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.ports import BLOCKS, Dims, InterfaceSnapshot, Port, packed
from tq_onnx.conversion.target import CPU, Target
from tq_onnx.errors import TqOnnxError
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE
from tq_onnx.ops.schema import register_schemas
from tq_onnx.plan import METADATA_DIGEST, METADATA_FIRST_PLAN, METADATA_PLAN, Plan

_SMALL_BYTES: Final = 1024
"""Tensors up to this size are given to the checker; larger ones it does not see."""

_FOREIGN: Final = "foreign"

_FLAT_RANK: Final = 3
"""Of a cache ``[B, S, ND]``."""


def snapshot_interface(model: ir.Model) -> InterfaceSnapshot:
    """Take down what the conversion of a model must not change."""
    graph = model.graph
    return InterfaceSnapshot(
        tuple(_port(value) for value in graph.inputs),
        tuple(_port(value) for value in graph.outputs),
        complaint(model),
    )


def check(
    original: InterfaceSnapshot, converted: ir.Model, plan: Plan, target: Target = CPU
) -> None:
    """Check a converted model."""
    _refuse(list(_violations(original, converted, plan, target)), original, converted)


def _refuse(problems: list[str], original: InterfaceSnapshot, converted: ir.Model) -> None:
    if not problems and not original.complaint:
        text = complaint(converted)
        problems = [f"onnx.checker: {text}"] if text else []
    if problems:
        raise TqOnnxError(
            f"the conversion went wrong and nothing was written ({'; '.join(problems[:10])})",
            fix="this is a defect, please report it with the name of the exporter",
        )


def check_merged(
    original: InterfaceSnapshot, converted: ir.Model, first: Plan, following: Plan
) -> None:
    """Check a merged model, whose branches were checked alone before they were put together."""
    problems = [*_cache_ports(original, converted, following)]
    for key, plan in ((METADATA_FIRST_PLAN, first), (METADATA_PLAN, following)):
        if Plan.from_json(converted.metadata_props.get(key, "{}")) != plan:
            problems.append(f"{key} in the metadata is another one")
    encoders = sum(
        (node.domain, node.op_type) == (DOMAIN, ENCODE) for node in converted.graph.all_nodes()
    )
    if encoders != 2 * (len(first.layers) + len(following.layers)):
        problems.append(f"{encoders} encoders are left in both branches")
    _refuse(problems, original, converted)


def _violations(
    original: InterfaceSnapshot, model: ir.Model, plan: Plan, target: Target
) -> Iterator[str]:
    yield from _cache_ports(original, model, plan)
    if target.has_operators:
        yield from layer_violations(model, plan)
        for name in () if plan.block_size else (ENCODE, ATTENTION):
            if (DOMAIN, name, "") not in model.functions:
                yield f"the body of {name} is missing"
        if model.opset_imports.get(DOMAIN) is None:
            yield f"the domain {DOMAIN} is not imported"
    else:
        yield from _own_operators(model)
    yield from _metadata(model, plan, target)


def _metadata(model: ir.Model, plan: Plan, target: Target) -> Iterator[str]:
    if plan.target != target.name:
        yield f"the plan is for the target {plan.target}, not {target.name}"
    if Plan.from_json(model.metadata_props.get(METADATA_PLAN, "{}")) != plan:
        yield "the plan in the metadata is another one"
    if model.metadata_props.get(METADATA_DIGEST) != plan.layout_digest:
        yield "the layout digest in the metadata is another one"


def _cache_ports(original: InterfaceSnapshot, model: ir.Model, plan: Plan) -> Iterator[str]:
    """Compare inputs and outputs with those of the original, and caches with the plan."""
    original = original if not plan.block_size else packed(original, plan)
    caches = [(cache, layer.kv_num_heads) for layer in plan.layers for cache in layer.caches]
    sizes = {
        cache.past: (heads, cache.row_bytes) for cache, heads in caches if cache.past is not None
    }
    types = {
        name: "UINT8"
        for cache, _ in caches
        for name in (cache.past, cache.present)
        if name is not None
    }
    overlay, size = plan.overlay_rows, plan.block_size
    before = _behind_overlay(original.inputs, sizes, overlay)
    yield from _ports("input", before, model.graph.inputs, sizes, types, block_size=size)
    sizes = {cache.present: (heads, cache.row_bytes) for cache, heads in caches}
    before = _behind_overlay(original.outputs, sizes, overlay)
    yield from _ports("output", before, model.graph.outputs, sizes, types, block_size=size)


def _behind_overlay(
    ports: tuple[Port, ...], caches: Container[str], overlay_rows: int
) -> tuple[Port, ...]:
    """Return the ports, caches with room for the overlay of a window."""

    def wider(port: Port) -> Port:
        if port.name not in caches or port.dims is None:
            return port
        axis = 1 if len(port.dims) == _FLAT_RANK else 2
        dims = list(port.dims)
        dims[axis] = rows_of_slots(dims[axis], overlay_rows)
        return replace(port, dims=tuple(dims))

    return tuple(map(wider, ports))


def _own_operators(model: ir.Model) -> Iterator[str]:
    """Yield TurboQuant nodes and functions, in a model that has standard operators instead."""
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            yield f"node {node.name} ({node.op_type}) is left"
    for domain, name, _ in model.functions:
        if domain == DOMAIN:
            yield f"the body of {name} is left"
    if DOMAIN in model.opset_imports:
        yield f"the domain {DOMAIN} is imported"


def _ports(
    kind: str,
    before: tuple[Port, ...],
    values: Any,
    sizes: dict[str, tuple[int, int]],
    types: dict[str, str],
    *,
    block_size: int,
) -> Iterator[str]:
    """Compare names, types and shapes; those of caches are heads and row bytes, and types."""
    after = tuple(_port(value) for value in values)
    if [port.name for port in after] != [port.name for port in before]:
        yield f"the {kind}s are not the same in the same order"
        return
    for old, new in zip(before, after, strict=True):
        if old.name not in sizes:
            # A shape, a size or a type that was not told may have been inferred.
            expected = [Port(old.name, old.dtype or new.dtype, _told(old.dims, new.dims))]
        elif block_size:
            expected = [Port(old.name, types[old.name], (BLOCKS, block_size, *sizes[old.name]))]
        elif old.dims is None:
            expected = [
                Port(old.name, types[old.name], (*(new.dims or ())[:-1], sizes[old.name][1]))
            ]
        else:
            expected = _caches(old, old.dims, types[old.name], *sizes[old.name])
        if new not in expected:
            first = expected[0]
            yield f"{kind} {old.name} is {new.dtype} {new.dims}, not {first.dtype} {first.dims}"


def _caches(old: Port, dims: Dims, dtype: str, heads: int, width: int) -> list[Port]:
    """Return True if a cache may have become this: only the number of heads may be new."""
    if len(dims) == _FLAT_RANK:
        return [Port(old.name, dtype, (dims[0], heads, dims[1], width))]
    return [Port(old.name, dtype, (dims[0], known, dims[2], width)) for known in (dims[1], heads)]


def _told(before: Dims | None, after: Dims | None) -> Dims | None:
    """Return the sizes that were told before, and those that are now of the others."""
    if before is None or after is None or len(before) != len(after):
        return after if before is None else before
    return tuple(new if old is None else old for old, new in zip(before, after, strict=True))


def _port(value: ir.Value) -> Port:
    dims: Dims | None = None
    if value.shape is not None:
        dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return Port(value.name or "", None if value.dtype is None else value.dtype.name, dims)


def complaint(model: ir.Model) -> str:
    """Return the complaint of ``onnx.checker`` with our schemas registered; empty if it has none.

    The checker sees the whole graph but no weights: large and external tensors are replaced by a
    number, so that nothing is read and no size limit applies. Operators that ONNX Runtime puts into
    the default domain without their being standard are shown to it under a foreign domain.
    """
    register_schemas()
    with _without_weights(model):
        proto = ir.to_proto(model)
    version = max((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), default=1)
    proto.opset_import.append(onnx.OperatorSetIdProto(domain=_FOREIGN, version=1))
    _rename_foreign(proto.graph.node, version)
    content = proto.SerializeToString()
    try:
        onnx.checker.check_model(content)
    except Exception as error:  # ValidationError, and RuntimeErrors of its C++ parts
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return ""


def _rename_foreign(nodes: Iterable[onnx.NodeProto], version: int) -> None:
    for node in nodes:
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, version):
            node.domain = _FOREIGN
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _rename_foreign(graph.node, version)


@contextmanager
def _without_weights(model: ir.Model) -> Iterator[None]:
    held: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and (
                isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > _SMALL_BYTES
            ):
                held.append((value, tensor))
                value.const_value = ir.tensor(0.0, name=value.name)
    try:
        yield
    finally:
        for value, tensor in held:
            value.const_value = tensor
