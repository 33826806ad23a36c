"""What must hold of a converted model before it is written; values included.

``facts(model)`` is taken before the conversion, ``check`` compares afterwards: inputs and outputs
keep name, order, type and shape (caches: uint8, the last dimension W and static); every layer has
two encoders and one attention, wired to its caches, with the attributes of the plan; rotations are
orthogonal, codebooks sorted and antisymmetric to the bit; the function bodies are there; the plan
is read back from the metadata; and onnx's own checker, with our schemas registered, is content.

A violation is a defect of the converter, never the user's fault: nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from tq_onnx.codec.spec import RAW, Codec
from tq_onnx.errors import TqOnnxError
from tq_onnx.graph.plan import METADATA_DIGEST, METADATA_PLAN, CachePair, LayerPlan, Plan
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE
from tq_onnx.ops.schema import register_schemas

ORTHOGONALITY: Final = 1e-5
"""Largest entry of ``R^T R - I``."""

_SMALL_BYTES: Final = 1024
"""Tensors up to this size are given to the checker; larger ones it does not see."""

_FOREIGN: Final = "foreign"

_Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Port:
    """One input or output of a graph: its name, element type and dimensions."""

    name: str
    dtype: str | None
    dims: _Dims | None


@dataclass(frozen=True)
class Facts:
    """What a conversion must not change.

    Attributes:
        inputs: the graph inputs in order.
        outputs: the graph outputs in order.
        complaint: what onnx's checker says of the model; empty if it is content. An original that
            it refuses (runtimes accept more than it does) is not held against the result.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    complaint: str


def facts(model: ir.Model) -> Facts:
    """Takes down what the conversion of a model must not change."""
    graph = model.graph
    return Facts(
        tuple(_port(value) for value in graph.inputs),
        tuple(_port(value) for value in graph.outputs),
        complaint(model),
    )


def check(original: Facts, converted: ir.Model, plan: Plan) -> None:
    """Checks a converted model.

    Args:
        original: ``facts`` of the model before its conversion.
        converted: the same model after it.
        plan: what was to be done.

    Raises:
        TqOnnxError: something does not hold; the message lists everything that was found.
    """
    found = list(_violations(original, converted, plan))
    if not found and not original.complaint:
        text = complaint(converted)
        found = [f"onnx.checker: {text}"] if text else []
    if found:
        raise TqOnnxError(
            f"the conversion went wrong and nothing was written ({'; '.join(found[:10])})",
            fix="this is a defect, please report it with the name of the exporter",
        )


def _violations(original: Facts, model: ir.Model, plan: Plan) -> Iterator[str]:
    pairs = [
        (pair, layer.kv_num_heads, width)
        for layer in plan.layers
        for pair, width in (
            (layer.key, layer.key_row_bytes),
            (layer.value, layer.value_row_bytes),
        )
    ]
    sizes = {pair.past: (heads, width) for pair, heads, width in pairs if pair.past is not None}
    yield from _ports("input", original.inputs, model.graph.inputs, sizes)
    sizes = {pair.present: (heads, width) for pair, heads, width in pairs}
    yield from _ports("output", original.outputs, model.graph.outputs, sizes)
    yield from _layers(model, plan)
    for name in (ENCODE, ATTENTION):
        if (DOMAIN, name, "") not in model.functions:
            yield f"the body of {name} is missing"
    if model.opset_imports.get(DOMAIN) is None:
        yield f"the domain {DOMAIN} is not imported"
    if Plan.from_json(model.metadata_props.get(METADATA_PLAN, "{}")) != plan:
        yield "the plan in the metadata is another one"
    if model.metadata_props.get(METADATA_DIGEST) != plan.layout_digest:
        yield "the layout digest in the metadata is another one"


def _ports(
    kind: str, before: tuple[Port, ...], values: Any, sizes: dict[str, tuple[int, int]]
) -> Iterator[str]:
    """Compares names, types and shapes; ``sizes`` tells heads and row bytes of the caches."""
    after = tuple(_port(value) for value in values)
    if [port.name for port in after] != [port.name for port in before]:
        yield f"the {kind}s are not the same in the same order"
        return
    for old, new in zip(before, after, strict=True):
        if old.name not in sizes:
            # A shape that was not told may have been inferred.
            wanted = [old if old.dims is not None else Port(old.name, old.dtype, new.dims)]
        elif old.dims is None:
            wanted = [Port(old.name, "UINT8", (*(new.dims or ())[:-1], sizes[old.name][1]))]
        else:
            wanted = _caches(old, old.dims, *sizes[old.name])
        if new not in wanted:
            first = wanted[0]
            yield f"{kind} {old.name} is {new.dtype} {new.dims}, not {first.dtype} {first.dims}"


def _caches(old: Port, dims: _Dims, heads: int, width: int) -> list[Port]:
    """What may have become of a cache: the number of heads may be told where it was not."""
    if len(dims) == 3:  # [B, S, ND]
        return [Port(old.name, "UINT8", (dims[0], heads, dims[1], width))]
    return [Port(old.name, "UINT8", (dims[0], known, dims[2], width)) for known in (dims[1], heads)]


def _layers(model: ir.Model, plan: Plan) -> Iterator[str]:
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    encoders = [node for node in nodes if node.op_type == ENCODE]
    readers = [node for node in nodes if node.op_type == ATTENTION]
    count = len(plan.layers)
    if len(encoders) != 2 * count or len(readers) != count:
        yield f"{len(encoders)} encoders and {len(readers)} attentions for {count} layers"
        return
    outputs = {value.name: value for value in model.graph.outputs}
    rotations: set[ir.Value | None] = set()
    for layer in plan.layers:
        label = f"layer {layer.layer}"
        made = []
        for pair, codec in (
            (layer.key, Codec(layer.key_codec, layer.key_bits)),
            (layer.value, Codec(layer.value_codec, layer.value_bits)),
        ):
            node = _maker(outputs[pair.present])
            if node is None or node not in encoders:
                yield f"{label}: {pair.present} is not made by {ENCODE}"
                continue
            made.append(node)
            yield from (f"{label}: {text}" for text in _encoder(node, pair, codec, layer))
        if len(made) != 2:
            continue
        key, value = (node.outputs[0] for node in made)
        attention = [n for n in readers if n.inputs[1] is key and n.inputs[2] is value]
        if len(attention) != 1:
            yield f"{label}: {len(attention)} attentions read its caches"
            continue
        yield from (f"{label}: {text}" for text in _attention(attention[0], made, layer))
        for node, kind in zip(made, (layer.key_codec, layer.value_codec), strict=True):
            rotation = node.inputs[3]
            if kind != RAW and rotation not in rotations:
                rotations.add(rotation)
                yield from (f"{label}: {text}" for text in _rotation(rotation, layer))


def _maker(present: ir.Value) -> ir.Node | None:
    """The node that makes a cache, before it is shortened."""
    node = present.producer()
    if node is not None and node.op_type == "Slice" and node.inputs[0] is not None:
        return node.inputs[0].producer()
    return node


def _encoder(node: ir.Node, pair: CachePair, codec: Codec, layer: LayerPlan) -> Iterator[str]:
    past = node.inputs[1]
    if pair.past is not None and (past is None or past.name != pair.past):
        yield f"{pair.present} does not append to {pair.past}"
    yield from _attributes(node, {"codec": codec.kind, "bits": codec.bits, "norm_correction": 1})
    if codec.is_raw:
        return
    centroids, boundaries = _array(node.inputs[4]), _array(node.inputs[5])
    if centroids is None or boundaries is None:
        yield f"the codebook of {pair.present} is not an initializer"
        return
    for name, table, size in (
        ("centroids", centroids, codec.levels),
        ("boundaries", boundaries, codec.levels - 1),
    ):
        if table.shape != (size,) or table.dtype != np.float32:
            yield f"the {name} of {pair.present} are {table.dtype} {table.shape}"
        elif not (np.diff(table) > 0).all() or not np.array_equal(table, -table[::-1]):
            yield f"the {name} of {pair.present} are not sorted and antisymmetric"


def _attention(node: ir.Node, made: list[ir.Node], layer: LayerPlan) -> Iterator[str]:
    key, value = made
    wired = {
        3: key.inputs[2],
        4: key.inputs[3],
        5: key.inputs[4],
        6: value.inputs[3],
        7: value.inputs[4],
    }
    if any(node.inputs[slot] is not wanted for slot, wanted in wired.items()):
        yield "attention and encoders do not share past length, rotation and codebook"
    for slot, what, planned in ((8, "bias", layer.has_bias), (9, "sink", layer.has_sink)):
        if (len(node.inputs) > slot and node.inputs[slot] is not None) != planned:
            yield f"the {what} of attention is not as planned"
    yield from _attributes(
        node,
        {
            "causal": int(layer.causal),
            "sliding_window": layer.sliding_window,
            "key_codec": layer.key_codec,
            "key_bits": layer.key_bits,
            "value_codec": layer.value_codec,
            "value_bits": layer.value_bits,
            "scale": np.float32(layer.scale),
            "softcap": np.float32(layer.softcap),
        },
    )


def _attributes(node: ir.Node, wanted: dict[str, Any]) -> Iterator[str]:
    for name, value in wanted.items():
        attribute = node.attributes.get(name)
        found = None if attribute is None else attribute.value
        if found is None or type(value)(found) != value:
            yield f"{node.op_type} has {name} = {found!r} instead of {value!r}"


def _rotation(value: ir.Value | None, layer: LayerPlan) -> Iterator[str]:
    matrix = _array(value)
    size = layer.head_size
    if matrix is None or matrix.shape != (size, size) or matrix.dtype != np.float32:
        yield "the rotation is not a float32 initializer of the head's size"
        return
    wide = matrix.astype(np.float64)
    error = float(np.abs(wide.T @ wide - np.eye(size)).max())
    if not error <= ORTHOGONALITY:
        yield f"the rotation is not orthogonal (by {error:.1e})"


def _array(value: ir.Value | None) -> np.ndarray[Any, np.dtype[Any]] | None:
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()


def _port(value: ir.Value) -> Port:
    dims: _Dims | None = None
    if value.shape is not None:
        dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return Port(value.name or "", None if value.dtype is None else value.dtype.name, dims)


def complaint(model: ir.Model) -> str:
    """What ``onnx.checker`` says of a model, our schemas registered; empty if it is content.

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
    try:
        onnx.checker.check_model(proto)
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
