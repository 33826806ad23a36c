"""Caches of a fixed size that ``ScatterND`` writes new rows into (transformers' static caches).

Per cache, with the tokens turned to the front::

    indices = Unsqueeze(start + [0, 1, ..., T - 1], -1)                       [T, 1]
    state   = ScatterND(Transpose(past), indices, Transpose(rows))            [Tmax, B, N, D]
    present = Transpose(state)                                                [B, N, Tmax, D]

``start``, one integer input (``cumulative_length``), is the number of tokens before the call. That
the slots follow each other from there is read off the graph: the indices are the sum of ``start``
and of a Range from 0 in steps of 1, or of the constant 0 .. T - 1; a single token needs neither.

A graph for a first prompt takes no caches and writes into zeros of Tmax slots: it gets an empty
cache of that capacity. A constant that is not zero is refused: such a cache has become a part of
the model. Refused as well: indices that are anything else, as the positions that a caller may
choose at will, and a reduction.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import scalar
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import passes_through, rank, static_dim
from tq_onnx.recognise.caches import ROWS, Anchor, Dims, PastLength, Update
from tq_onnx.recognise.site import GraphView
from tq_onnx.recognise.updates.continued import taken

SCATTER_ND: Final = "ScatterND"
_SHAPERS: Final = ("Unsqueeze", "Squeeze", "Reshape", "Cast")
"""Nodes between a number and the indices: none of them changes it."""
_MAX_STEPS: Final = 8


def written(anchor: Anchor, view: GraphView) -> Update:
    """Read the update that a ScatterND makes."""
    node, dims = anchor.node, anchor.dims
    if node.attributes.get_string("reduction", "none") != "none":
        raise NoMatch("the cache is written by a ScatterND that adds to what is there", node)
    if anchor.cut is not None:
        raise NoMatch("the cache is written in place and then shortened", node)
    data, indices, rows = node.inputs
    if data is None or indices is None or rows is None:
        raise NoMatch("the cache is made by a ScatterND with a missing input", node)
    if dims[0] != "S" or rank(indices) != 2 or static_dim(indices, 1) != 1:
        raise NoMatch("the cache is written by a ScatterND that does not index tokens alone", node)
    start = _start(indices, node)
    rows, rows_dims = _turned_back(_unexpanded(rows), _with(dims, "T"))
    if sorted(rows_dims) != sorted(ROWS):
        raise NoMatch(f"the new rows have the layout {', '.join(rows_dims)}", node)
    past_length = PastLength(start, "integer")
    past, past_dims = _turned_back(data, _with(dims, "P"))
    if view.takes_caches:
        graph_input, views = taken(anchor, past, past_dims)
        return Update(graph_input, rows, rows_dims, {**views, data: _with(dims, "P")}, past_length)
    if not _is_zero(past):
        raise NoMatch(
            f"cache {anchor.present.name} continues no input: the cache has become a constant",
            node,
        )
    slots = static_dim(anchor.present, 2) or static_dim(anchor.state, 0)
    if slots is None:
        raise NoMatch(
            f"the graph does not declare how many tokens {anchor.present.name} holds", node
        )
    return Update(None, rows, rows_dims, {}, past_length, slots)


def _with(dims: Dims, tokens: str) -> Dims:
    return tuple(tokens if dim == "S" else dim for dim in dims)


def _turned_back(value: ir.Value, dims: Dims) -> tuple[ir.Value, Dims]:
    """Return the value before a Transpose, and its dimensions; the value itself without one."""
    node = value.producer()
    if node is None or kind(node) != "Transpose" or node.inputs[0] is None:
        return value, dims
    perm = node.attributes.get_ints("perm", ())
    if sorted(perm) != list(range(len(dims))):
        return value, dims
    return node.inputs[0], tuple(dims[perm.index(axis)] for axis in range(len(dims)))


def _unexpanded(rows: ir.Value) -> ir.Value:
    """Return the rows before an Expand to the very shape that ScatterND asks of them.

    Where a dimension is 1 before and not after, it does repeat rows, and stays.
    """
    node = rows.producer()
    if node is None or kind(node) != "Expand" or node.inputs[0] is None:
        return rows
    source = node.inputs[0]
    if rank(source) != rank(rows) or rank(source) is None:
        return rows
    repeats = any(
        static_dim(source, axis) == 1 != static_dim(rows, axis) for axis in range(rank(source) or 0)
    )
    return rows if repeats else source


def _start(indices: ir.Value, node: ir.Node) -> ir.Value:
    """Return the graph input that says where the first row goes."""
    tokens = static_dim(indices, 0)
    steps = 0
    pending: list[ir.Value] = [indices]
    origins: list[ir.Value] = []
    for _ in range(_MAX_STEPS):
        if not pending:
            break
        value = pending.pop()
        maker = value.producer()
        if _counts_up(value, tokens):
            steps += 1
        elif maker is not None and kind(maker) == "Add":
            pending += [item for item in maker.inputs if item is not None]
        elif maker is not None and (kind(maker) in _SHAPERS or passes_through(maker)):
            pending += [item for item in maker.inputs[:1] if item is not None]
        else:
            origins.append(value)
    single = [value for value in origins if _is_one_integer(value)]
    if pending or len(origins) != 1 or not single or (steps != 1 and tokens != 1):
        names = ", ".join(value.name or "a constant" for value in origins) or "a constant"
        raise NoMatch(
            f"the slots that the new rows go to are computed from {names}, "
            "which does not prove that they follow each other",
            node,
        )
    return single[0]


def _counts_up(value: ir.Value, tokens: int | None) -> bool:
    """Return True if a value is always 0, 1, ..., T - 1."""
    node = value.producer()
    tensor = None if value.is_graph_input() else value.const_value
    if tensor is None and node is not None and kind(node) == "Constant":
        attribute = node.attributes.get("value")
        tensor = None if attribute is None else attribute.as_tensor()
    if tensor is not None:
        numbers = tensor.numpy() if tensor.size == tokens else None
        return numbers is not None and numbers.reshape(-1).tolist() == list(range(tensor.size))
    if node is None or kind(node) != "Range":
        return False
    first, _, step = node.inputs
    return scalar(first) == 0 and scalar(step) == 1


def _is_one_integer(value: ir.Value) -> bool:
    """Return True if a value is a graph input that holds one integer."""
    if not value.is_graph_input() or value.const_value is not None:
        return False
    whole = value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return whole and (rank(value) == 0 or (rank(value) == 1 and static_dim(value, 0) == 1))


def _is_zero(value: ir.Value) -> bool:
    """Return True if a value is nothing but zeros: a constant, or a number that is repeated."""
    node = value.producer()
    if node is None:
        tensor = None if value.is_graph_input() else value.const_value
        return tensor is not None and not tensor.numpy().any()
    if kind(node) in ("Expand", "Transpose", "Cast") or passes_through(node):
        return node.inputs[0] is not None and _is_zero(node.inputs[0])
    if kind(node) == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is None or not filled.as_tensor().numpy().any()
    if kind(node) == "Constant":
        return scalar(value) == 0
    return False
