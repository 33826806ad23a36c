"""Heads side by side, as fused operators take them, and one behind the other."""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.recognise.site import Site


def split(build: Builder, site: Site, packed: ir.Value, role: str, heads: int) -> ir.Value:
    """Split ``[B, T, heads * D]`` to ``[B, heads, T, D]``."""
    rows_BTHD = build.op(
        "Reshape",
        [packed, build.integers(0, 0, heads, site.size_of(role))],
        f"split_heads_{role}",
        dtype=site.dtype,
        shape=[None, None, heads, site.size_of(role)],
    )
    return turned(build, site, rows_BTHD, role, heads)


def turned(build: Builder, site: Site, rows_BTHD: ir.Value, role: str, heads: int) -> ir.Value:
    """Transpose ``[B, T, heads, D]`` to ``[B, heads, T, D]``."""
    return build.op(
        "Transpose",
        [rows_BTHD],
        f"transpose_{role}",
        dtype=site.dtype,
        shape=[None, heads, None, site.size_of(role)],
        perm=[0, 2, 1, 3],
    )


def merged(build: Builder, site: Site, attention_BHTD: ir.Value) -> ir.Value:
    """Join ``[B, H, T, D]`` to ``[B, T, H * D]``."""
    attention_BTHD = build.op(
        "Transpose",
        [attention_BHTD],
        "transpose_output",
        dtype=site.dtype,
        shape=[None, None, site.num_heads, site.result_size],
        perm=[0, 2, 1, 3],
    )
    width = site.num_heads * site.result_size
    return build.op(
        "Reshape",
        [attention_BTHD, build.integers(0, 0, width)],
        "merge_heads",
        dtype=site.dtype,
        shape=[None, None, width],
    )
