"""Check that attention takes as many queries as it caches new rows.

The operator takes the number of its queries as the number of new tokens: the last query is at the
position of the last key. Some graphs compute queries for the last tokens only, in their last layer
to save work; the operator would then see too few keys. Sizes rarely show this, as both are
symbolic. So the paths to the query and to the new rows are followed back to where they meet, and no
node on them may select tokens. Other operands on these paths, such as the angles of rotary
embeddings, carry no tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.liveness import nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import label, rank, static_dim

_CHOOSERS: Final = frozenset({"Slice", "Split", "Gather", "GatherND"})
"""They choose along an axis."""
_ANYWHERE: Final = frozenset(
    {"GatherElements", "Compress", "TopK", "NonZero", "Unique", "Pad", "Resize"}
)
_ALL: Final = 2**31 - 1
"""An end from here on is none."""


def check_tokens(query: ir.Value, rows: Iterable[ir.Value], reader: ir.Node) -> None:
    """Check that nothing chooses tokens for the query, or for new rows, alone."""
    ways = [query, *rows]
    graph = reader.graph
    order = {node: index for index, node in enumerate(graph or ())}
    everywhere = (1 << len(ways)) - 1
    marks: dict[ir.Node, int] = {}
    heap: list[tuple[int, ir.Node]] = []
    inputs: dict[ir.Value, int] = {}
    shared: set[ir.Value] = set()
    choosers: list[tuple[int, ir.Node]] = []

    def mark(value: ir.Value | None, ways: int) -> None:
        node = None if value is None else value.producer()
        if value is not None and value.is_graph_input() and not value.is_initializer():
            inputs[value] = inputs.get(value, 0) | ways
        if node is None or node not in order:
            return
        if node not in marks:
            marks[node] = 0
            heapq.heappush(heap, (-order[node], node))
        marks[node] |= ways

    for index, value in enumerate(ways):
        mark(value, 1 << index)
    while heap:
        _, node = heapq.heappop(heap)
        bits = marks.pop(node)
        if bits != everywhere and _may_choose_tokens(node):
            choosers.append((bits, node))
        if bits == everywhere:
            shared.update(node.outputs)
        if node.op_type in ("Shape", "Size") or bits == everywhere:
            continue
        for item in (node, *nested_nodes(node)):
            for read in item.inputs:
                mark(read, bits)
    shared.update(value for value, bits in inputs.items() if bits == everywhere)
    for bits, node in choosers:
        if _comes_from(node.inputs[0], shared):
            who = "query" if bits & 1 else "new rows"
            raise NoMatch(f"the {who} may be of some tokens only, by {label(node)}", node)


def _comes_from(value: ir.Value | None, shared: Collection[ir.Value]) -> bool:
    """Return True if numbers of some values flow into another one."""
    pending = [value]
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value is None or value in seen:
            continue
        if value in shared:
            return True
        seen.add(value)
        node = value.producer()
        if node is not None and node.op_type not in ("Shape", "Size"):
            pending.extend(read for item in (node, *nested_nodes(node)) for read in item.inputs)
    return False


def _may_choose_tokens(node: ir.Node) -> bool:
    if node.domain != "" or kind(node) in _ANYWHERE:
        return node.domain == ""
    if kind(node) not in _CHOOSERS:
        return False
    source = node.inputs[0]
    return source is None or any(_may_be_tokens(source, axis) for axis in _axes(node))


def _may_be_tokens(source: ir.Value, axis: int | None) -> bool:
    """Return True if an axis may be the tokens': neither the last one nor of a known size."""
    size = rank(source)
    if axis == -1 or (size is not None and axis == size - 1):
        return False
    return axis is None or static_dim(source, axis) is None


def _axes(node: ir.Node) -> tuple[int | None, ...]:
    """Return the axes along which a node chooses; None where it is not known."""
    if node.op_type == "GatherND":
        return _gathered(node)
    if node.op_type != "Slice":
        return (attribute_int(node, "axis", 0),)
    starts, ends, axes, steps = (
        integers(node.inputs[index]) if index < len(node.inputs) else None for index in (1, 2, 3, 4)
    )
    if axes is None:
        return (None,)
    if len(node.inputs) < 5:
        steps = (1,) * len(axes)
    if starts is None or ends is None or steps is None:
        return axes
    if not len(axes) == len(starts) == len(ends) == len(steps):
        return (None,)
    chosen = zip(axes, starts, ends, steps, strict=True)
    return tuple(axis for axis, start, end, step in chosen if (start, step) != (0, 1) or end < _ALL)


def _gathered(node: ir.Node) -> tuple[int | None, ...]:
    """Return the axes that the indices of a GatherND are for: all behind them are taken whole.

    Not of indices that a call makes, which may choose for each token.
    """
    indices = node.inputs[1]
    depth = static_dim(indices, -1) if indices is not None and integers(indices) else None
    first = attribute_int(node, "batch_dims", 0)
    return (None,) if depth is None else tuple(range(first, first + depth))
