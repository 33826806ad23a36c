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

from dataclasses import dataclass

import onnx_ir as ir

from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank, static_dim


@dataclass(frozen=True, eq=False)
class Merged:
    """Values of one attention whose batch and heads may be one dimension."""

    query: ir.Value  #: ``[B * H, T, D]``
    #: keys and values of the products, ``[B * H, D, S]`` or ``[B * H, S, D]``
    operands: tuple[ir.Value, ...]
    scores: tuple[ir.Value, ...]  #: what Reshapes make of scores and probabilities: of rank 3 or 4

    @property
    def token_axes(self) -> tuple[tuple[ir.Value, int], ...]:
        """Values with the axis that has one entry for each new token."""
        scores = ((value, 2 if rank(value) == 4 else 1) for value in self.scores)
        return (self.query, 1), *scores

    def batch_axes(self, num_heads: int) -> tuple[tuple[ir.Value, int], ...]:
        """Return values with the number of rows in dimension 0 that belong to one sequence."""
        operands = ((value, num_heads) for value in (self.query, *self.operands))
        scores = ((value, 1 if rank(value) == 4 else num_heads) for value in self.scores)
        return *operands, *scores


def whole_query(query: ir.Value) -> ir.Value | None:
    """Return ``[B, H, T, D]`` of a query ``[B * H, T, D]``; None if the query is not one."""
    node = query.producer()
    source = node.inputs[0] if node is not None and kind(node) == "Reshape" else None
    if source is None or rank(query) != 3 or rank(source) != 4:
        return None
    sizes = static_dim(query, 2), static_dim(source, 3)
    return source if sizes[0] is not None and sizes[0] == sizes[1] else None
