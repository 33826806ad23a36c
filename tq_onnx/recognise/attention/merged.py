"""Decomposed attention whose batch and heads are one dimension, as ``torch.bmm`` takes them.

::

    query  = Reshape([B, H, T, D], [B * H, T, D])
    scores = MatMul(query, keys [B * H, D, S])             [B * H, T, S]
    output = MatMul(probabilities, values [B * H, S, D])   [B * H, T, D]

Bloom; BART, Marian and OPT in older versions of transformers (4.44). The operator works with
batch and heads apart, so masks are split, and its result is merged.

A Reshape to three dimensions may merge others than batch and heads. The sizes of one call tell
(``Merged.sizes``): with the same tokens and as many rows in front of them, nothing else has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.recognise.attention.masks import Mask

_I64 = ir.DataType.INT64


@dataclass(frozen=True, eq=False)
class Merged:
    """Values of one attention whose batch and heads may be one dimension.

    Attributes:
        query: ``[B * H, T, D]``.
        operands: keys and values of the products, ``[B * H, D, S]`` or ``[B * H, S, D]``.
        scores: what Reshapes make of scores and probabilities: of rank 3 or 4.
    """

    query: ir.Value
    operands: tuple[ir.Value, ...]
    scores: tuple[ir.Value, ...]

    def token_axes(self) -> list[tuple[ir.Value, int]]:
        """Return values with the axis that has one entry for each new token."""
        found = [(self.query, 1)]
        return found + [(value, 2 if rank(value) == 4 else 1) for value in self.scores]

    def batch_axes(self, num_heads: int) -> list[tuple[ir.Value, int]]:
        """Return values with the number of rows in dimension 0 that belong to one sequence."""
        found = [(value, num_heads) for value in (self.query, *self.operands)]
        return found + [(value, 1 if rank(value) == 4 else num_heads) for value in self.scores]


def whole_query(query: ir.Value) -> ir.Value | None:
    """Return ``[B, H, T, D]`` of a query ``[B * H, T, D]``; None if the query is not one."""
    node = query.producer()
    source = node.inputs[0] if node is not None and kind(node) == "Reshape" else None
    if source is None or rank(query) != 3 or rank(source) != 4:
        return None
    sizes = static_dim(query, 2), static_dim(source, 3)
    return source if sizes[0] is not None and sizes[0] == sizes[1] else None


def by_heads(build: Builder, masks: Sequence[Mask], query: ir.Value, num_heads: int) -> list[Mask]:
    """Return masks of ``[B, H, T, S]``.

    Args:
        build: makes the nodes.
        masks: in any form.
        query: ``[B, H, T, D]``.
        num_heads: H.
    """

    def split(value: ir.Value) -> ir.Value:
        def op(what: str, inputs: list[ir.Value], label: str, shape: list[int | None]) -> ir.Value:
            return build.op(what, inputs, label, dtype=value.dtype, shape=shape)

        rows = build.op(
            "Mul",
            [build.dim(query, 0, "batch"), build.integers(num_heads)],
            "batch_of_heads",
            dtype=_I64,
            shape=[1],
        )
        # One row may stand for all of them.
        target = build.op(
            "Concat", [rows, build.integers(1, 1)], "all_heads", dtype=_I64, shape=[3], axis=0
        )
        wide = op("Expand", [value, target], "mask_of_each_head", [None] * 3)
        apart = op("Unsqueeze", [wide, build.integers(1)], "mask_rank_4", [None, 1, None, None])
        sizes = build.integers(-1, num_heads, 0, 0)
        return op("Reshape", [apart, sizes], "mask_by_heads", [None, num_heads, None, None])

    def four(mask: Mask) -> Mask:
        if not mask.merged:
            return mask
        value = build.once(("by heads", mask.value), lambda: split(mask.value))
        return replace(mask, value=value, merged=False)

    return [four(mask) for mask in masks]


def merged_result(
    build: Builder, attention_BHTD: ir.Value, head_size: int, dtype: ir.DataType | None
) -> ir.Value:
    """Return ``[B * H, T, D]``."""
    tokens = build.dim(attention_BHTD, 2, "merged_tokens")
    target = build.op(
        "Concat",
        [build.integers(-1), tokens, build.integers(head_size)],
        "merged_shape",
        dtype=_I64,
        shape=[3],
        axis=0,
    )
    shape = [None, None, head_size]
    return build.op("Reshape", [attention_BHTD, target], "merge_output", dtype=dtype, shape=shape)
