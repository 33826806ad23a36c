"""Find the query of decomposed attention before its scale, and before heads were folded."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from tq_onnx.graph.constants import scalar
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.recognise.operands import Mask


def without_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the query before its constant factors, and their product."""
    factor = 1.0
    while True:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in ("Mul", "Div"):
            return value, factor
        left, right = node.inputs
        number, source = scalar(right), left
        if number is None and node.op_type == "Mul":
            number, source = scalar(left), right
        if not number or source is None or rank(source) not in (3, 4):
            return value, factor
        factor *= number if node.op_type == "Mul" else 1 / number
        value = source


def unfolded(query: ir.Value, kv_num_heads: int, head_size: int) -> ir.Value | None:
    """Return ``[B, H, 1, D]`` of a query ``[B, N, G, D]``; None if the query is not one.

    Traced with one token, torch multiplies all queries that share a key at once.
    """
    node = query.producer()
    if node is None or kind(node) != "Reshape" or node.inputs[0] is None:
        return None
    whole = node.inputs[0]
    group = static_dim(query, 2)
    if rank(whole) != 4 or rank(query) != 4 or group in (None, 1):
        return None
    heads, size = static_dim(whole, 1), static_dim(whole, 3)
    folds = static_dim(query, 1) in (kv_num_heads, None)
    folds = folds and static_dim(query, 3) == head_size == size
    return whole if folds and heads == kv_num_heads * (group or 0) else None


def check_folded(masks: Collection[Mask], node: ir.Node) -> None:
    """Check that a mask is the same for all queries that share a key."""
    for mask in masks:
        if any(static_dim(mask.value, axis) not in (1, None) for axis in (-3, -2)):
            raise NoMatch("the mask differs between the queries that share a key", node)
