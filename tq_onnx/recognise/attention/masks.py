"""Masks of decomposed attention, and the bias that they become."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.values import rank


@dataclass(frozen=True, eq=False)
class Mask:
    """Something that hides keys.

    Attributes:
        value: a float added to the scores, or a Boolean that selects.
        keeps: None for an additive mask; otherwise the truth value that keeps a key.
        factor: what an additive mask is multiplied by, where the scores are scaled behind it.
        fill: the score of a key that a Boolean mask hides.
        merged: True if it is of scores ``[B * H, T, S]``, and of rank 3 like them.
    """

    value: ir.Value
    keeps: bool | None
    factor: float = 1.0
    fill: float = float("-inf")
    merged: bool = False

    def scaled(self, factor: float) -> Mask:
        """Return the mask of scores that are scaled after it was applied."""
        return replace(self, factor=self.factor * factor, fill=self.fill * factor)

    def bias(self, build: Builder, dtype: ir.DataType) -> ir.Value:
        """Return the mask as a bias of rank 4 and of the query's type; made once per model."""
        value = self.value
        if self.keeps is not None:
            keeps = self.keeps
            value = build.once(("bias", value, keeps, dtype), lambda: self._select(build, dtype))
        elif value.dtype != dtype:
            source = value
            value = build.once(
                ("cast", source, dtype),
                lambda: build.op(
                    "Cast",
                    [source],
                    "bias_cast",
                    dtype=dtype,
                    shape=_dims(source),
                    to=int(dtype),
                ),
            )
        if self.factor != 1.0 and self.keeps is None:
            value = self._times(build, value, dtype)
        missing = 4 - (rank(self.value) or 4)
        if not missing:
            return value
        narrow = value
        return build.once(
            ("unsqueeze", narrow),
            lambda: build.op(
                "Unsqueeze",
                [narrow, build.integers(*range(missing))],
                "bias_rank_4",
                dtype=dtype,
                shape=[None] * 4,
            ),
        )

    def _times(self, build: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        factor = self.factor

        def make() -> ir.Value:
            number = build.constant(f"tq.{dtype.name}.{factor!r}", dtype.numpy().type(factor))
            return build.op(
                "Mul", [value, number], "bias_scaled", dtype=dtype, shape=_dims(self.value)
            )

        return build.once(("scaled", value, factor), make)

    def _select(self, build: Builder, dtype: ir.DataType) -> ir.Value:
        numpy = dtype.numpy()
        zero = build.constant(f"tq.{dtype.name}.zero", numpy.type(0))
        lowest = build.constant(f"tq.{dtype.name}.lowest", numpy.type(dtype.min))
        chosen = [zero, lowest] if self.keeps else [lowest, zero]
        return build.op(
            "Where", [self.value, *chosen], "bias", dtype=dtype, shape=_dims(self.value)
        )


def _dims(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]
