"""The interface of a conversion against its original's: inputs, outputs, caches, vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tq_onnx.conversion.ports import kept_names, packed_dims, packed_inputs
from tq_onnx.errors import (
    LibraryError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
    VerificationError,
)
from tq_onnx.files.load import LoadedModel
from tq_onnx.plan import LOGITS_INDICES, PACKING, Plan, plan_in
from tq_onnx.runtime.cache import CacheSpec
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.session import Port, ports, vocabulary_size
from tq_onnx.verification.checks import PropertyCheck

_CONVERTED_TYPE: Final = "tensor(uint8)"


def interface_kept(before: OpenModel, after: OpenModel) -> PropertyCheck:
    """Compare names and their order, and types and shapes of everything but the caches."""
    caches = {
        name: spec
        for spec in after.signature.caches
        for name in (spec.pair.past, spec.pair.present)
        if name is not None
    }
    problems: list[str] = []
    is_paged, interface = after.signature.is_paged, after.signature.interface
    packed = {*PACKING, LOGITS_INDICES, interface.tokens, interface.logits} if is_paged else set()
    olds = {port.name: port for side in ports(before.session) for port in side}
    for names, new_side in zip(_names(before, after.plan), ports(after.session), strict=True):
        if names != [port.name for port in new_side]:
            problems.append("names or their order changed")
            continue
        for new in (port for port in new_side if port.name not in packed):
            old = olds[new.name]
            if is_paged and after.plan is not None:
                shape = packed_dims(old.name, old.shape, after.plan) or ()
                old = replace(old, shape=shape)
            if old.name in caches:
                problems += _cache_problems(old, new, caches[old.name])
            elif not _same(old, new):
                problems.append(f"{old.name} was {old}, is {new}")
    kept = "only the caches' type and last dimension changed"
    kept = "tokens are packed, and caches lie in pages" if is_paged else kept
    return PropertyCheck(
        "inputs and outputs keep names, order and meaning",
        not problems,
        "; ".join(dict.fromkeys(problems)) or kept,
    )


def _names(before: OpenModel, plan: Plan | None) -> tuple[list[str], list[str]]:
    """Return the inputs and outputs that a conversion must have."""
    inputs, outputs = ([port.name for port in side] for side in ports(before.session))
    if plan is not None and plan.block_size:
        inputs, kept = packed_inputs(inputs, plan), kept_names(plan)
        outputs = [name for name in outputs if name in kept]
    return inputs, outputs


@contextmanager
def failing(path: Path, ep: ExecutionProvider = CPU) -> Iterator[None]:
    """Call it a check that does not hold if a converted model cannot do what its original did."""
    try:
        yield
    except LibraryError:
        raise
    except (UnsupportedModelError, ModelFileError, UsageError) as error:
        if ep.has_own_memory:
            raise
        refusal = VerificationError(error.what, where=error.where, fix="convert the original again")
        refusal.locate(path)
        raise refusal from error


def call_warnings(original: Path, plan: Plan) -> tuple[str, ...]:
    """Return a sentence if both models read in shorter calls than they would take."""
    most = plan.interface.call_tokens
    if most is None:
        return ()
    return (
        f"{original.name} fails or computes wrong logits for calls of more than {most} tokens, so "
        f"both models read the text in calls of {most}",
    )


def refuse_stranger(before: OpenModel, path: Path, loaded: LoadedModel) -> None:
    """Refuse a model that was not made from this original."""
    with failing(path):
        plan = plan_in(loaded.model.metadata_props)
    if plan is None:
        raise UnsupportedModelError(
            "this model was not converted by tq-onnx", where=str(path), fix="convert it first"
        )
    graph = loaded.model.graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    unlike = ""
    for side, values in zip(_names(before, plan), (inputs, graph.outputs), strict=True):
        if side != [value.name for value in values]:
            unlike = "the inputs or outputs have other names or another order"
    sizes = [(layer.kv_num_heads, cache.size) for layer in plan.layers for cache in layer.caches]
    if [(cache.kv_num_heads, cache.row) for cache in before.signature.caches] != sizes:
        unlike = unlike or "the caches have other heads"
    logits = next((v for v in graph.outputs if v.name == before.signature.interface.logits), None)
    width = None if logits is None or not logits.shape else logits.shape[-1]
    if not unlike and isinstance(width, int) and width != _width(before):
        unlike = f"the model has {width} logits, not {_width(before)}"
    if unlike:
        raise not_made_from(before.path, path, unlike)


def _width(before: OpenModel) -> int:
    return vocabulary_size(before.session, before.signature.interface.logits)


def not_made_from(original: Path, converted: Path, difference: str) -> VerificationError:
    """Return the error about a model that is no conversion of the original."""
    return VerificationError(
        f"the model was not made from {original}: {difference}",
        where=str(converted),
        fix="give the original that it was converted from",
    )


def _same(old: Port, new: Port) -> bool:
    """Compare two ports; dimensions that the file does not state as numbers may be inferred."""
    dims = zip(old.shape, new.shape, strict=False)
    return (old.type, len(old.shape)) == (new.type, len(new.shape)) and all(
        size == new_size or not (isinstance(size, int) and isinstance(new_size, int))
        for size, new_size in dims
    )


def _cache_problems(old: Port, new: Port, spec: CacheSpec) -> list[str]:
    heads = spec.kv_num_heads
    if spec.block_size:
        is_kept = new.type == _CONVERTED_TYPE and new.shape[1:] == spec.shape(1, 1)[1:]
        return [] if is_kept else [f"{old.name} was {old}, is {new}"]
    # The number of heads may have been unknown, or the heads may have lain side by side.
    keeps_heads = len(old.shape) == 3 or (
        len(old.shape) == 4
        and (old.shape[1] in (new.shape[1], heads) or not isinstance(old.shape[1], int))
    )
    is_converted = len(new.shape) == 4 and new.type == _CONVERTED_TYPE and new.shape[3] == spec.row
    if keeps_heads and is_converted:
        return []
    return [f"{old.name} was {old}, is {new}"]
