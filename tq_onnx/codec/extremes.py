"""Count the vectors that rows cannot hold: too long or too short for their fields, or not finite.

Fields of float16 are clamped to its largest number and round to zero below its smallest, and a row
that is not finite is stored as the zero vector (``tq_onnx.codec.rotated``,
``tq_onnx.codec.unrotated``). None of this is an error when a model runs, so ``calibrate``,
``verify`` and ``report`` count and warn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.fp8 import FP8_MAX
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.quantise import coordinates
from tq_onnx.codec.reference import fields_of
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

_LEAST_HALF: Final = 2.0**-25
"""Numbers up to here are zero in float16."""

_MOST_NAMED: Final = 4


@dataclass(frozen=True)
class Extremes:
    """The vectors of one cache that rows cannot hold.

    Attributes:
        layer: index of the layer.
        cache: ``key`` or ``value``.
        vectors: vectors that were looked at.
        clamped: those whose scale, or whose coordinates, are cut to the largest that is stored.
        vanished: those that are not zero, and stored as the zero vector because they are too short.
        not_finite: those that are stored as the zero vector because they are not finite.
    """

    layer: int
    cache: str
    vectors: int
    clamped: int = 0
    vanished: int = 0
    not_finite: int = 0

    @property
    def lost(self) -> int:
        """All of them."""
        return self.clamped + self.vanished + self.not_finite

    def with_others(self, other: Extremes) -> Extremes:
        """Return the counts of these vectors and of others of the same cache."""
        return Extremes(
            self.layer,
            self.cache,
            self.vectors + other.vectors,
            self.clamped + other.clamped,
            self.vanished + other.vanished,
            self.not_finite + other.not_finite,
        )


def of_rows(
    rows: Array,
    vectors: Array,
    codec: Codec,
    centroids: npt.NDArray[np.float32] | None,
    *,
    layer: int,
    cache: str,
) -> Extremes:
    """Count by the rows that were written.

    Args:
        rows: uint8 ``[..., W]``.
        vectors: floats ``[..., D]``, what was encoded: with offsets, what they leave.
        centroids: float32 ``[L]``; None for a codec without.
    """
    if codec.is_raw:
        return Extremes(layer, cache, int(np.prod(vectors.shape[:-1])))
    layout = row_layout(codec, vectors.shape[-1])
    fields = fields_of(rows, layout)
    halves = [fields[form.name] for form in codec.record.fields if form.size == 2]
    clamped = np.zeros(vectors.shape[:-1], np.bool_)
    for field in halves:
        clamped |= (np.abs(field) >= MAX_HALF).any(axis=-1)
    if codec.kind == FP8:
        clamped |= (np.abs(vectors) > FP8_MAX).any(axis=-1)
    decoded = coordinates(unpack(rows, layout), fields, codec, centroids)
    zeros: Bools = np.logical_not(decoded.any(axis=-1))
    return _count(vectors, clamped, zeros, layer, cache)


def of_vectors(vectors: Array, *, layer: int, cache: str) -> Extremes:
    """Count by lengths, where no codec is chosen yet: what a scale in float16 cannot hold.

    Args:
        vectors: floats ``[..., D]``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(np.asarray(vectors, np.float64), axis=-1)
        clamped = np.isfinite(lengths) & (lengths > MAX_HALF)
        zeros: Bools = np.logical_not(lengths > _LEAST_HALF)
        return _count(vectors, clamped, zeros, layer, cache)


def _count(vectors: Array, clamped: Bools, zeros: Bools, layer: int, cache: str) -> Extremes:
    """Count by marks ``[...]``: clamped rows, and rows that mean the zero vector."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.asarray(vectors, np.float64)
        # Backends sum squares in float32.
        finite = np.isfinite((wide**2).sum(axis=-1).astype(np.float32))
    finite |= np.isfinite(wide).all(axis=-1) & ~zeros
    vanished = finite & zeros & wide.any(axis=-1)
    return Extremes(
        layer,
        cache,
        int(finite.size),
        clamped=int((clamped & finite).sum()),
        vanished=int(vanished.sum()),
        not_finite=int((~finite).sum()),
    )


def warnings_of(found: Iterable[Extremes]) -> tuple[str, ...]:
    """Return one sentence about the caches that lose vectors, by layer; nothing if none does."""
    lossy = [one for one in found if one.lost]
    if not lossy:
        return ()
    shown = ", ".join(_describe(one) for one in lossy[:_MOST_NAMED])
    more = len(lossy) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"compressed rows cannot hold all vectors of {shown}{rest}; leave these layers "
        "uncompressed with `layers` of convert",
    )


def _describe(one: Extremes) -> str:
    parts = [
        f"{count} {what}"
        for count, what in (
            (one.clamped, "too large and clamped"),
            (one.vanished, "too small and stored as zeros"),
            (one.not_finite, "not finite and stored as zeros"),
        )
        if count
    ]
    return f"layer {one.layer} {one.cache}s ({', '.join(parts)}, of {one.vectors:,})"
