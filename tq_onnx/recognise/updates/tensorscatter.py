"""Caches of a fixed size that ``TensorScatter`` (opset 24) writes new rows into.

====  =============  =======================================================================
0     past_cache     ``[B, Tmax, N * D]`` or ``[B, N, Tmax, D]``: must be a graph input
1     update         new rows: the same with T in place of Tmax
2     write_indices  int64 ``[B]``: the slot of the first new row; 0 where left out
====  =============  =======================================================================

``write_indices`` are the tokens that a sequence has before a call. Refused: the mode ``circular``,
which overwrites the oldest rows, and a cache that is shortened before it is returned.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import keeps_numbers, rank
from tq_onnx.recognise.caches import Anchor, PastLength, Update
from tq_onnx.recognise.updates.continued import taken

TENSOR_SCATTER: Final = "TensorScatter"
_AXIS: Final = -2


def scattered(anchor: Anchor) -> Update:
    """Read the update that a TensorScatter makes."""
    node, dims = anchor.node, anchor.dims
    mode = node.attributes.get_string("mode", "linear")
    if mode != "linear":
        raise NoMatch(f"the cache is written in the mode {mode}, over the oldest rows", node)
    axis = attribute_int(node, "axis", _AXIS)
    if not -len(dims) <= axis < len(dims) or dims[axis] != "S":
        raise NoMatch(f"the cache is written along axis {axis}, not along the tokens", node)
    if anchor.cut is not None:
        raise NoMatch("the cache is written in place and then shortened", node)
    past, rows, *optional = node.inputs
    if past is None or rows is None:
        raise NoMatch("the cache is made by a TensorScatter with a missing input", node)
    graph_input, views = taken(anchor, past, tuple("P" if dim == "S" else dim for dim in dims))
    indices = optional[0] if optional else None
    if indices is not None and rank(indices) not in (1, None):
        raise NoMatch(f"the write_indices are of rank {rank(indices)}", node)
    return Update(
        graph_input,
        rows,
        tuple("T" if dim == "S" else dim for dim in dims),
        views,
        PastLength(indices),
    )


def is_flat_cache(value: ir.Value) -> bool:
    """Return True if a TensorScatter reads or makes a graph input or output of rank 3: a cache.

    Nothing else tells ``[B, Tmax, N * D]`` from logits or from embeddings.
    """
    if rank(value) != 3:
        return False
    return _scattered_into(value) if value.is_graph_input() else _made_by_scatter(value)


def _scattered_into(value: ir.Value) -> bool:
    for node, index in value.uses():
        if kind(node) == TENSOR_SCATTER and index == 0:
            return True
        if keeps_numbers(node) and _scattered_into(node.outputs[0]):
            return True
    return False


def _made_by_scatter(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and keeps_numbers(node) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and kind(node) == TENSOR_SCATTER
