"""Tell the sizes of all values of a paged model in one call.

The call has a number of tokens that no weight has as a size, and of tokens that a mask selects, so
that a size tells where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.ports import TOKENS
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.dependence import dependents
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.liveness import nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.shapes import infer, without_weights
from tq_onnx.graph.sizerules import Sizes, sizes
from tq_onnx.graph.sizes import walk
from tq_onnx.ops.operators import PagedAttention
from tq_onnx.ops.schema import registered
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.states import STATE_SLOTS

_CANDIDATES: Final = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)
"""Numbers of tokens to try: primes."""


def shapes_behind(value: ir.Value) -> Iterable[ir.Node]:
    """Yield the nodes that tell the sizes that a value is computed from."""
    seen: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if kind(node) == "Shape":
            yield node
            continue
        pending += [source for source in node.inputs if source is not None]
        for inner in nested_nodes(node):
            pending += [source for source in inner.inputs if source is not None]


def numbers_of_call(model: ir.Model) -> tuple[int, int]:
    """Return numbers of tokens and of selected ones that no size of a weight is a multiple of."""
    told = {
        size
        for value in model.graph.initializers.values()
        for size in sizes(value) or ()
        if isinstance(size, int) and size
    }
    first, second, *_ = (one for one in _CANDIDATES if all(size % one for size in told))
    return first, second


def sizes_of_call(
    model: ir.Model, plan: Plan, sources: Iterable[ir.Value], tokens: int, entries: int
) -> dict[str, Sizes]:
    """Return the sizes of all values in a call with so many tokens of one request.

    Each mask selects so many ``entries``.
    """
    names = {value.name for value in dependents(model.graph, sources, by_size=False)}
    proto = without_weights(model)
    del proto.graph.value_info[:]
    for value in proto.graph.input:
        if value.name == plan.interface.tokens:
            value.type.tensor_type.shape.dim[0].dim_value = tokens
    # Ranges have no size for inference; what is made of the packed inputs does.
    attended = (node.outputs[0] for node in PagedAttention.nodes(model.graph))
    stateful = (node.outputs[0] for node in model.graph if kind(node) in STATE_SLOTS)
    for source in (*sources, *attended, *stateful):
        declared = ir.serde.serialize_value(source)
        for dim in declared.type.tensor_type.shape.dim:
            if dim.dim_param == TOKENS:
                dim.dim_value = tokens
        proto.graph.value_info.append(declared)
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    with suppress(Exception), registered():  # what it cannot work with is left to the rules
        proto = infer(proto)
    graph = ir.from_proto(proto).graph
    found = {value.name or "": shape for value in graph.inputs if (shape := sizes(value))}
    found |= {name: sizes(value) or () for name, value in graph.initializers.items()}
    for node, value, more in walk(graph):
        for output in node.outputs:
            told = _merged(sizes(output), more if output is value else None)
            if kind(node) == "NonZero":
                mask = node.inputs[0]
                is_of_tokens = mask is not None and mask.name in names
                told = (len(sizes(mask) or ()), entries) if is_of_tokens else None
            elif kind(node) == "GatherND":
                told = _sizes_of_parts(node, found) or told
            if told is not None:
                output.shape = ir.Shape(told)
                found[output.name or ""] = told
    return found


def _sizes_of_parts(node: ir.Node, known: Mapping[str, Sizes]) -> Sizes | None:
    """Return the shape of the parts that constant indices choose; None if it is not known."""
    table, indices = node.inputs[:2]
    shape = None if table is None else known.get(table.name or "")
    if shape is None or indices is None or attribute_int(node, "batch_dims", 0):
        return None
    arrays: dict[ir.Value, Array] = {}
    for source in shapes_behind(indices):
        answer = sizes_from(source, known)
        if answer is None:
            return None
        arrays[source.outputs[0]] = np.array(answer, np.int64)
    try:
        (numbers,) = evaluate([indices], arrays)
    except NoMatch:
        return None
    return (*numbers.shape[:-1], *shape[numbers.shape[-1] :])


def sizes_from(node: ir.Node, known: Mapping[str, Sizes]) -> list[int] | None:
    """Return what a Shape node tells; None if that is not known."""
    source = node.inputs[0]
    shape = None if source is None else known.get(source.name or "")
    if shape is None:
        return None
    start, end = (
        attribute_int(node, name, value) for name, value in (("start", 0), ("end", len(shape)))
    )
    answer = [size for size in shape[start:end] if isinstance(size, int)]
    return answer if len(answer) == len(shape[start:end]) else None


def _merged(one: Sizes | None, other: Sizes | None) -> Sizes | None:
    """Return the numbers that either knows."""
    if one is None or other is None or len(one) != len(other):
        return _numbers(other if one is None else one)
    pairs = zip(_numbers(one) or (), _numbers(other) or (), strict=True)
    return tuple(here if here is not None else there for here, there in pairs)


def _numbers(shape: Sizes | None) -> Sizes | None:
    return None if shape is None else tuple(n if isinstance(n, int) else None for n in shape)
