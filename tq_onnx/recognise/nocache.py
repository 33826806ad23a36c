"""Attention without a cache: finds it, and tells why such a model cannot be converted."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.operators import FUSED
from tq_onnx.graph.values import FLOATS, rank
from tq_onnx.recognise.site import GraphView

_FUSED: Final = frozenset(name.rpartition(".")[2] for name in FUSED)
"""Names of fused operators, of whatever domain."""
_CAUSAL_ATTRIBUTES: Final = ("is_causal", "unidirectional", "causal")
_ORDERINGS: Final = {"Trilu", "LessOrEqual", "Less", "GreaterOrEqual", "Greater"}
_MAX_STEPS: Final = 8

_EXPORT: Final = "export it with past key/value inputs and outputs"


def why_no_caches(view: GraphView) -> str:
    """Return a reason to refuse a model that returns no caches, as a clause."""
    graph = view.graph
    caches = [value for value in graph.inputs if rank(value) in (4, 5) and value.dtype in FLOATS]
    attention = [node for node in graph if node in view.live and is_attention(node, view)]
    if not attention:
        return "the model has no attention: not a decoder"
    if caches:
        return (
            f"the model has inputs of rank {rank(caches[0])} ({caches[0].name}, ...) but returns "
            f"no caches of rank 4, keys and values apart: {_EXPORT}"
        )
    if any(_is_causal(node) for node in attention):
        return f"the model masks by position but has no cache: if it is a decoder, {_EXPORT}"
    return (
        "the model has attention but no cache and no causal mask: an encoder, which keeps no cache"
    )


def is_attention(node: ir.Node, view: GraphView) -> bool:
    """Return True if a node is attention: a fused operator, or a softmax between two products."""
    if node.op_type in _FUSED:
        return True
    if node.op_type != "Softmax" or node.domain != "" or not node.inputs:
        return False
    return _has_product_above(node.inputs[0]) and _has_product_below(node.outputs[0], view)


def _has_product_above(value: ir.Value | None) -> bool:
    for _ in range(_MAX_STEPS):
        node = None if value is None else value.producer()
        if node is None:
            return False
        if node.op_type in ("MatMul", "FusedMatMul", "Einsum"):
            return True
        # The scores are the first input, except of Where.
        at = 1 if node.op_type == "Where" else 0
        value = node.inputs[at] if at < len(node.inputs) else None
    return False


def _has_product_below(value: ir.Value, view: GraphView) -> bool:
    for _ in range(_MAX_STEPS):
        readers = [node for node, _ in view.consumers(value)]
        if any(node.op_type in ("MatMul", "FusedMatMul", "Einsum") for node in readers):
            return True
        following = [node for node in readers if node.op_type not in ("IsNaN", "Shape")]
        if not following:
            return False
        value = following[0].outputs[0]
    return False


def _is_causal(node: ir.Node) -> bool:
    if node.op_type in _FUSED:
        causal_by_default = node.op_type in ("GroupQueryAttention", "SparseAttention")
        flags = [attribute_int(node, name, 0) for name in _CAUSAL_ATTRIBUTES]
        if causal_by_default or any(flags):
            return True
        operands = [item for item in node.inputs[3:] if item is not None]
    else:
        operands = _mask_operands(node)
    above = live_nodes(operands)
    products = any(item.op_type == "MatMul" for item in above)
    return not products and any(item.op_type in _ORDERINGS for item in above)


def _mask_operands(softmax: ir.Node) -> list[ir.Value]:
    """Return the values that are combined with the scores before the softmax."""
    operands: list[ir.Value] = []
    value = softmax.inputs[0]
    for _ in range(_MAX_STEPS):
        node = None if value is None else value.producer()
        if node is None or node.op_type in ("MatMul", "FusedMatMul", "Einsum"):
            return operands
        at = 1 if node.op_type == "Where" else 0
        operands += [
            item for index, item in enumerate(node.inputs) if index != at and item is not None
        ]
        value = node.inputs[at]
    return operands
