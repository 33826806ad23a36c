"""Operators that compute with caches."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.ops.domain import MICROSOFT

PRODUCTS: Final = frozenset({"MatMul", f"{MICROSOFT}.FusedMatMul", "Einsum"})
"""Matrix products of decomposed attention."""

FUSED: Final = frozenset(
    {
        "Attention",
        f"{MICROSOFT}.MultiHeadAttention",
        f"{MICROSOFT}.GroupQueryAttention",
        f"{MICROSOFT}.SparseAttention",
        f"{MICROSOFT}.DecoderMaskedMultiHeadAttention",
    }
)
"""Attention in one node; ``Attention`` is that of the default domain, opset 23 and later."""


def kind(node: ir.Node) -> str:
    """Return the operator: its name, after its domain and a dot unless that is the default one."""
    return node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"
