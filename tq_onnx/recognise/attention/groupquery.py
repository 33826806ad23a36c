"""Spell out GroupQueryAttention's inner steps as nodes of their own.

The slots of its inputs are described in ``tq_onnx.recognise.dialects.gqa``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import MICROSOFT, Builder
from tq_onnx.recognise.attention.heads import merged, split, turned
from tq_onnx.recognise.site import Operands, Site

SLOTS: Final = 16
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, SEQLENS_K = range(6)
COS, SIN, POSITION_IDS, BIAS, SINK, K_SCALE, V_SCALE, Q_NORM, K_NORM = range(7, 16)


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupQueryAttention(Site):
    """A layer of the dialect ``gqa``.

    Attributes:
        slots: the operator's inputs, None where left out.
        rotary_dim: coordinates that are rotated; 0 without rotation.
        interleaved: whether neighbours are rotated instead of halves.
        epsilon: of the RMS norm.
    """

    dialect: ClassVar[str] = "gqa"

    slots: tuple[ir.Value | None, ...]
    rotary_dim: int
    interleaved: int
    epsilon: float

    def inputs(self) -> Collection[ir.Value]:
        """Return all inputs but the caches."""
        skipped = (PAST_KEY, PAST_VALUE)
        slots = enumerate(self.slots)
        return [value for index, value in slots if value is not None and index not in skipped]

    def token_axes(self) -> Collection[tuple[ir.Value, int]]:
        """Return the projections; each is ``[B, T, any]``."""
        return [(value, 1) for value in self.slots[:PAST_KEY] if value is not None]

    def mask_sources(self) -> Collection[ir.Value]:
        """Return the tokens per sequence, and the bias."""
        return [value for value in (self._seqlens, self.slots[BIAS]) if value is not None]

    @property
    def counts_tokens(self) -> bool:
        """True: ``seqlens_k`` counts them."""
        return True

    def past_length(self, build: Builder) -> ir.Value:
        """Make ``max(seqlens_k + 1 - T, 0)``, once per model."""
        seqlens = self._seqlens

        def make() -> ir.Value:
            wide = build.op("Cast", [seqlens], "seqlens_k", dtype=ir.DataType.INT64, to=7)
            flat = build.op(
                "Reshape",
                [wide, build.integers(-1)],
                "seqlens_flat",
                dtype=ir.DataType.INT64,
                shape=[None],
            )
            total = build.op(
                "Add",
                [flat, build.integers(1)],
                "total_length",
                dtype=ir.DataType.INT64,
                shape=[None],
            )
            past = build.op(
                "Sub",
                [total, self._new_tokens(build)],
                "past_length_signed",
                dtype=ir.DataType.INT64,
                shape=[None],
            )
            return build.op(
                "Max",
                [past, build.integers(0)],
                "past_length",
                dtype=ir.DataType.INT64,
                shape=[None],
            )

        return build.once(("past_length", seqlens), make)

    def operands(self, build: Builder) -> Operands:
        """Split, normalise and rotate, as the operator does."""
        query, key, value = self._projections(build)
        query_BHTD = self._heads(build, query, "query", self.num_heads, self.slots[Q_NORM])
        key_BNTD = self._heads(build, key, "key", self.kv_num_heads, self.slots[K_NORM])
        value_BNTD = self._heads(build, value, "value", self.kv_num_heads, None)
        if self.rotary_dim:
            query_BHTD = self._rotate(build, query_BHTD, "query", self.num_heads)
            key_BNTD = self._rotate(build, key_BNTD, "key", self.kv_num_heads)
        return Operands(query_BHTD, key_BNTD, value_BNTD, self.slots[BIAS], self._sink(build))

    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        """Return the result as ``[B, T, H * D]``."""
        return merged(build, self, attention_BHTD)

    def _sink(self, build: Builder) -> ir.Value | None:
        """Return the sinks; zeros for a smooth softmax, whose sinks they are."""
        if not self.has_sink or self.slots[SINK] is not None:
            return self.slots[SINK]
        zeros = np.zeros(self.num_heads, self.dtype.numpy())
        return build.constant(f"tq.{self.dtype.name}.sinks_of_zero_{self.num_heads}", zeros)

    @property
    def _seqlens(self) -> ir.Value:
        seqlens = self.slots[SEQLENS_K]
        assert seqlens is not None  # checked when the site was made
        return seqlens

    def _new_tokens(self, build: Builder) -> ir.Value:
        """Return T, int64 ``[1]``."""
        query = self.slots[QUERY]
        assert query is not None
        return build.once(("new_tokens", self._seqlens), lambda: build.dim(query, 1, "new_tokens"))

    def _projections(self, build: Builder) -> tuple[ir.Value, ir.Value, ir.Value]:
        query, key, value = self.slots[:3]
        assert query is not None
        if key is not None and value is not None:
            return query, key, value
        widths = [heads * self.head_size for heads in (self.num_heads, *[self.kv_num_heads] * 2)]
        query, key, value = build.ops(
            "Split",
            [query, build.integers(*widths)],
            "split_qkv",
            dtype=self.dtype,
            shapes=[[None, None, width] for width in widths],
            attributes={"axis": -1},
        )
        return query, key, value

    def _heads(
        self, build: Builder, packed: ir.Value, role: str, heads: int, norm: ir.Value | None
    ) -> ir.Value:
        """Split ``[B, T, heads * D]`` to ``[B, heads, T, D]``; normalise if there is a weight."""
        if norm is None:
            return split(build, self, packed, role, heads)
        heads_BTHD = build.op(
            "Reshape",
            [packed, build.integers(0, 0, heads, self.head_size)],
            f"split_heads_{role}",
            dtype=self.dtype,
            shape=[None, None, heads, self.head_size],
        )
        normed_BTHD = build.op(
            "SimplifiedLayerNormalization",
            [heads_BTHD, norm],
            f"norm_{role}",
            dtype=self.dtype,
            shape=[None, None, heads, self.head_size],
            axis=-1,
            epsilon=self.epsilon,
            stash_type=1,
        )
        return turned(build, self, normed_BTHD, role, heads)

    def _rotate(self, build: Builder, heads_BHTD: ir.Value, role: str, heads: int) -> ir.Value:
        partial: dict[str, int] = {}
        if self.rotary_dim != self.head_size:
            partial = {"rotary_embedding_dim": self.rotary_dim, "num_heads": heads}
        return build.op(
            "RotaryEmbedding",
            [heads_BHTD, self._positions(build), self.slots[COS], self.slots[SIN]],
            f"rotary_{role}",
            dtype=self.dtype,
            shape=[None, heads, None, self.head_size],
            domain=MICROSOFT,
            interleaved=self.interleaved,
            **partial,
        )

    def _positions(self, build: Builder) -> ir.Value:
        given = self.slots[POSITION_IDS]
        if given is not None:
            return given

        def make() -> ir.Value:
            column = build.op(
                "Unsqueeze",
                [self.past_length(build), build.integers(1)],
                "past_length_column",
                dtype=ir.DataType.INT64,
                shape=[None, 1],
            )
            count = build.op(
                "Squeeze",
                [self._new_tokens(build), build.integers(0)],
                "new_tokens_scalar",
                dtype=ir.DataType.INT64,
                shape=[],
            )
            steps = build.op(
                "Range",
                [build.number(0), count, build.number(1)],
                "steps",
                dtype=ir.DataType.INT64,
                shape=[None],
            )
            return build.op(
                "Add", [column, steps], "positions", dtype=ir.DataType.INT64, shape=[None, None]
            )

        return build.once(("positions", self._seqlens), make)
