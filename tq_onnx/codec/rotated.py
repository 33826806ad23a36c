"""Kinds that rotate a vector and quantise its coordinates with a codebook.

x being a vector of D coordinates, R orthogonal, t the boundaries and c the centroids:

    lloyd_max, u8   gamma = ||x||,  y = (x / gamma) R,  code_j = #{i : y_j >= t_i},
                    scale = gamma / ||c[code]|| with norm correction, else gamma,
                    x' = scale c[code] R^T
                    (lloyd_max with gains or error feedback: ``tq_onnx.codec.search``)
    uniform_signed  the same with centroids (code - L / 2) step, code stored as two's complement;
                    scale = gamma / ||c[code]|| step, with the sign of <y, c[code]>
                    x' = scale (code - L / 2) R^T
    prod            the same with one bit less, then r = x - x', sign_j = ((S r)_j >= 0),
                    residual_norm = ||r||,  x'' = x' + sqrt(pi/2)/D ||r|| S^T (+-1)  (QJL)

A row whose squared norm is not finite in float32 is stored as the zero vector. The scale of
``prod`` is rounded for storing before the residual is taken, as a reader will see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.kind import (
    CHOICE,
    COORDINATE,
    SIGN,
    CodecKind,
    Codes,
    FieldForm,
    Fields,
    Float32,
    Float64,
    Judged,
    Tables,
    Written,
    half,
)
from tq_onnx.codec.search import Search, gain_table

LLOYD_MAX: Final = "lloyd_max"
"""Codec kind: rotated, Lloyd-Max quantised coordinates and one scale per row."""

PROD: Final = "prod"
"""Codec kind: ``lloyd_max`` of one bit less, and the signs of a random projection of what it left
over (QJL), which make the estimate of an inner product unbiased."""

U8: Final = "u8"
"""Codec kind: a four-bit index of ``lloyd_max`` in a byte of its own, and the norm in float32."""


UNIFORM_SIGNED: Final = "uniform_signed"
"""Codec kind: rotated coordinates as integers of two's complement, and one signed scale in float32,
which is the step: rows that kernels of any vendor for signed integers can read."""


def rotate(
    vectors: npt.NDArray[np.generic], rotation: npt.NDArray[np.floating]
) -> tuple[Float64, Float64]:
    """Split vectors into norms and rotated directions.

    Args:
        vectors: floats ``[..., D]``.
        rotation: ``[D, C]``.

    Returns:
        norms float64 ``[...]`` and coordinates float64 ``[..., C]``; both 0 for a row whose squared
        norm is 0 or not finite in float32, which is what the backends accumulate in.
    """
    x = np.asarray(vectors, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        energy = np.sum(x * x, axis=-1)
        usable = np.isfinite(energy.astype(np.float32)) & (energy.astype(np.float32) > 0)
    norms = np.sqrt(np.where(usable, energy, 0))
    directions = np.where(usable[..., None], x, 0) / np.where(usable, norms, 1)[..., None]
    return norms, directions @ np.asarray(rotation, np.float64)


@dataclass(frozen=True, eq=False)
class Verdict:
    """Codes of a backend next to those of the reference."""

    own: Codes  #: the codes of the backend, none behind the last one that there is, ``[..., D]``
    wanted: Codes  #: the codes of the reference, ``[..., D]``
    distances: Float64  #: how far coordinates lie outside the intervals of the backend's codes
    lost: Float64  #: by what share these codes are worse than the best, in the first coordinate
    clearance: Float64  #: how far coordinates are from where the codes of the reference end
    lead: Float64  #: by what share those are better than any others, ``[..., 1]``


class Directions:
    """What codes unit vectors: the tables but for the rotation, in float64."""

    def __init__(self, tables: Tables, *, is_signed: bool = False) -> None:
        assert tables.centroids is not None  # only other kinds do without
        assert tables.boundaries is not None
        self.centroids = tables.centroids.astype(np.float64)
        self.boundaries = tables.boundaries.astype(np.float64)
        self.norm_correction = tables.norm_correction
        gains = gain_table(1) if tables.gains is None else tables.gains
        self.search = Search(
            self.centroids, self.boundaries, gains, tables.feedback, is_signed=is_signed
        )

    def indices(self, y: Float64) -> Codes:
        """Return the code of each coordinate; on a boundary the upper one."""
        return np.searchsorted(self.boundaries, y, side="right").astype(np.uint8)

    def scales(self, norms: Float64, y: Float64, indices: Codes) -> Float64:
        """Return the factor on the centroids of each row."""
        return norms * self.search.scale(y, indices, self.norm_correction)

    def inside(self, y: Float64, indices: Codes) -> Float64:
        """Return how far coordinates lie within the intervals of indices; negative outside."""
        above = y - np.concatenate([[-np.inf], self.boundaries])[indices]
        below = np.concatenate([self.boundaries, [np.inf]])[indices] - y
        inside: Float64 = np.minimum(above, below)
        return inside

    def outside(self, y: Float64, indices: Codes) -> Float64:
        """Return how far coordinates lie outside the intervals of these indices; 0 within."""
        outside: Float64 = np.maximum(-self.inside(y, indices), 0)
        return outside

    def judge(self, y: Float64, codes: Codes, tie: Float64) -> Verdict:
        """Judge codes of an encoder that may search.

        Codes are right if one gain explains all of them, given the errors that were fed back, and
        no other gain has better ones. A gain with a tie binds nobody: a backend may have found
        other codes with it, and other errors to feed back.

        Args:
            y: rotated unit vectors ``[..., D]``.
            codes: the codes of a backend ``[..., D]``.
            tie: how far a coordinate may be from where the backend saw it, ``[..., 1]``.
        """
        search = self.search
        own = np.minimum(codes, len(self.boundaries))
        attempts = search.attempts(y)
        # In units of y itself, whatever the gain, and as errors of y would move it.
        factors = search.gains.reshape(-1, *(1,) * y.ndim)
        unit = np.abs(factors) * search.growth()
        all_own = np.broadcast_to(own, (len(search.gains), *own.shape))
        outside = self.outside(factors * search.numbers_behind(y, own), all_own) / unit
        distances = _unexplained(outside, tie)
        distances = np.where(own == codes, distances, np.inf)
        inside = self.inside(factors * attempts.numbers, attempts.codes) / unit
        # A row that is not the best counts as one wrong code, if none of its codes is wrong.
        lost = np.zeros_like(y)
        if len(search.gains) > 1:
            explained = (distances <= tie).all(axis=-1)
            clear = np.asarray((inside > tie).all(axis=-1))
            lost[..., 0] = np.where(explained, _lag(search.worth(y, own), attempts.worth, clear), 0)
        wanted = attempts.best
        lead = _lead(attempts.worth, attempts.codes, wanted)
        return Verdict(own, wanted, distances, lost, inside.min(axis=0), lead)


class _WithSketch(Directions):
    """The same with the rotation, and the projection apart from it."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        matrix = _matrix(tables)
        size = len(matrix)
        self.rotation = matrix[:, :size].astype(np.float64)
        self.sketch = matrix[:, size:].astype(np.float64)

    def residual(self, x: Float64, norms: Float64, indices: Codes, scales: Float64) -> Float64:
        """Return what stored scales ``[..., 1]`` and indices leave over."""
        decoded = scales * self.centroids[indices] @ self.rotation.T
        left: Float64 = np.where(norms[..., None] > 0, x, 0) - decoded
        return left


def _matrix(tables: Tables) -> Float32:
    assert tables.rotation is not None  # only other kinds do without
    return tables.rotation


def _lloyd_max(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    directions = Directions(tables)
    norms, y = rotate(x, _matrix(tables))
    indices = directions.search.attempts(y).best
    return indices, {"scale": half(directions.scales(norms, y, indices))[..., None]}


def _signed(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    directions = Directions(tables, is_signed=True)
    norms, y = rotate(x, _matrix(tables))
    indices = directions.search.attempts(y).best
    scales = directions.scales(norms, y, indices) * _step(directions.centroids)
    return indices, {"scale": scales.astype(np.float32).astype(np.float64)[..., None]}


def _step(centroids: Float64) -> float:
    """Return the centroid of the integer 1."""
    return float(centroids[len(centroids) // 2 + 1])


def _u8(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    norms, y = rotate(x, _matrix(tables))
    scale = norms.astype(np.float32).astype(np.float64)
    return Directions(tables).indices(y), {"scale": scale[..., None]}


def _prod(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    parts = _WithSketch(tables)
    norms, y = rotate(x, parts.rotation)
    indices = parts.indices(y)
    scales = half(parts.scales(norms, y, indices))[..., None]
    residual = parts.residual(x, norms, indices, scales)
    signs = residual @ parts.sketch >= 0
    lengths = half(np.linalg.norm(residual, axis=-1, keepdims=True))
    return (
        indices | (signs.astype(np.uint8) << (bits - 1)).astype(np.uint8),
        {"scale": scales, "residual_norm": lengths},
    )


def _scaled_centroids(
    codes: Codes, fields: Fields, bits: int, centroids: Float32 | None
) -> Float64:
    assert centroids is not None  # only other kinds do without
    values: Float64 = fields["scale"] * centroids.astype(np.float64)[codes & (len(centroids) - 1)]
    return values


def _scaled_integers(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
    values: Float64 = fields["scale"] * (codes.astype(np.float64) - (1 << (bits - 1)))
    return values


def _with_signs(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
    values = _scaled_centroids(codes, fields, bits, centroids)
    signs = 2.0 * (codes >> (bits - 1)) - 1
    share = sqrt(pi / 2) / codes.shape[-1]
    return np.concatenate([values, share * fields["residual_norm"] * signs], axis=-1)


def _judge(written: Written, tables: Tables, *, is_signed: bool = False) -> Judged:
    directions = Directions(tables, is_signed=is_signed)
    norms, y = rotate(written.vectors, _matrix(tables))
    found = directions.judge(y, written.codes, written.tie)
    return Judged(
        found.wanted,
        {COORDINATE: found.distances, CHOICE: found.lost},
        {COORDINATE: found.clearance, CHOICE: found.lead},
        {"scale": directions.scales(norms, y, found.own)[..., None]},
    )


def _unexplained(outside: Float64, tie: Float64) -> Float64:
    """Return how far codes are from what one gain makes: ``[..., D]``.

    That is the gain that leaves the fewest codes unexplained, and those the least.

    Args:
        outside: how far numbers are outside the intervals of the codes, by gain: ``[g, ..., D]``.
    """
    reach = outside.max(axis=-1)
    left = (outside > tie).sum(axis=-1) + reach / (1 + reach)
    explaining = left.argmin(axis=0)[None, ..., None]
    found: Float64 = np.take_along_axis(outside, explaining, axis=0)[0]
    return found


def _lag(own: Float64, worth: Float64, clear: npt.NDArray[np.bool_]) -> Float64:
    """Return by what share codes are worse than the best that a gain without ties has: ``[...]``.

    Args:
        own: worth of the codes ``[...]``.
        worth: that of each gain's codes ``[g, ...]``.
        clear: whether a gain's codes have no tie ``[g, ...]``; 0 is returned where none has.
    """
    binding = np.where(clear, worth, 0).max(axis=0)
    worse = 1 - own / np.where(binding > 0, binding, np.inf)
    lag: Float64 = np.where(binding > 0, np.maximum(worse, 0), 0)
    return lag


def _lead(worth: Float64, codes: Codes, best: Codes) -> Float64:
    """Return by what share the best codes are better than any others: ``[..., 1]``."""
    others = np.where((codes != best).any(axis=-1), worth, -np.inf).max(axis=0)
    top = worth.max(axis=0)
    lead: Float64 = 1 - others / np.where(top > 0, top, 1)
    return lead[..., None]


def _judge_norms(written: Written, tables: Tables) -> Judged:
    found = _judge(written, tables)
    norms, _ = rotate(written.vectors, _matrix(tables))
    return replace(found, fields={"scale": norms[..., None]})


def _judge_signed(written: Written, tables: Tables) -> Judged:
    found = _judge(written, tables, is_signed=True)
    assert tables.centroids is not None  # only other kinds do without
    step = _step(tables.centroids.astype(np.float64))
    return replace(found, fields={"scale": found.fields["scale"] * step})


def _judge_prod(written: Written, tables: Tables) -> Judged:
    parts = _WithSketch(tables)
    norms, y = rotate(written.vectors, parts.rotation)
    own = (written.codes & ((1 << (written.bits - 1)) - 1)).astype(np.uint8)
    scales = parts.scales(norms, y, own)[..., None]
    # A sign is that of what the indices and the stored scale of the row leave over.
    residual = parts.residual(written.vectors, norms, own, written.fields["scale"])
    projected = residual @ parts.sketch
    signs = projected >= 0
    reach = np.where(norms > 0, norms, 1)[..., None] * sqrt(written.vectors.shape[-1])
    from_turn = np.abs(projected) / reach
    wrong_signs = signs != (written.codes >> (written.bits - 1)).astype(bool)
    distances = {COORDINATE: parts.outside(y, own), SIGN: np.where(wrong_signs, from_turn, 0)}
    indices = parts.indices(y)
    clearance = {COORDINATE: parts.inside(y, indices), SIGN: from_turn}
    wanted = indices | (signs.astype(np.uint8) << (written.bits - 1)).astype(np.uint8)
    lengths = np.linalg.norm(residual, axis=-1, keepdims=True)
    fields = {"scale": scales, "residual_norm": lengths}
    return Judged(wanted, distances, clearance, fields)


KINDS: Final = (
    CodecKind(
        LLOYD_MAX,
        number=0,
        planes={1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1)},
        formula="norm / norm(centroids[codes])",
        fields=(FieldForm("scale", 2),),
        is_rotated=True,
        corrects_norm=True,
        searches=True,
        quantise=_lloyd_max,
        coordinates=_scaled_centroids,
        judge=_judge,
    ),
    CodecKind(
        PROD,
        number=4,
        planes={3: (2, 1), 4: (2, 1, 1)},
        formula="scale * centroids, sqrt(pi/2)/d * residual_norm * signs, sign in the top plane",
        fields=(FieldForm("scale", 2), FieldForm("residual_norm", 2)),
        is_rotated=True,
        has_sketch=True,
        corrects_norm=True,
        quantise=_prod,
        coordinates=_with_signs,
        judge=_judge_prod,
    ),
    CodecKind(
        U8,
        number=5,
        planes={4: (8,)},
        formula="norm",
        fields=(FieldForm("scale", 4),),
        is_rotated=True,
        quantise=_u8,
        coordinates=_scaled_centroids,
        judge=_judge_norms,
    ),
    CodecKind(
        UNIFORM_SIGNED,
        number=7,
        planes={3: (2, 1), 4: (4,)},
        formula="scale * code, code of two's complement",
        fields=(FieldForm("scale", 4),),
        is_rotated=True,
        is_signed=True,
        corrects_norm=True,
        searches=True,
        quantise=_signed,
        coordinates=_scaled_integers,
        judge=_judge_signed,
    ),
)
"""The records of this module."""
