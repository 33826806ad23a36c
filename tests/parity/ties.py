"""What rows must hold, given that some of their codes may be ties that fell on the other side.

A code may differ from the oracle's only by one, and only where rounding in float32 can decide:
where a coordinate (in the units below) lies within a tolerance of the boundary between the two.
What follows from a code (norm correction, the residual of ``prod``) is then expected of the code
that the row has, so that one tie is not counted as several.

Units of a distance: ``lloyd_max``, ``u8`` and the index of ``prod``: a coordinate of the rotated
unit vector. Signs of ``prod``: the projection of the residual of a unit vector. ``uniform`` and
``q8_0``: steps. ``fp8_e4m3`` has no rounding before the one that counts, hence no ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.parity import tolerances
from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.quantise import quantise
from tq_onnx.codec.rotated import PROD, U8, rotate
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK, UNIFORM


@dataclass
class Expected:
    """What the oracle says of rows.

    Attributes:
        codes: uint8 ``[..., D]``.
        distances: of each coordinate from the boundary between its code and the row's, where they
            differ; infinite where the two are not neighbours.
        fields: by name, as they are before they are rounded for storing.
    """

    codes: np.ndarray
    distances: np.ndarray
    fields: dict[str, np.ndarray]


def half_steps(own: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many float16 lie between finite float16 numbers and what should be there."""
    clamped = np.clip(wanted, -MAX_HALF, MAX_HALF).astype(np.float32)
    places = []
    for values in (own, clamped):
        bits = values.astype("<f2").view("<i2").astype(int)
        places.append(np.where(bits < 0, -(bits & 0x7FFF), bits))
    return np.asarray(np.abs(places[0] - places[1]))


def expect(
    vectors: np.ndarray,
    rows: np.ndarray,
    codec: Codec,
    rotation: np.ndarray | None,
    norm_correction: bool,
) -> Expected:
    """What rows ``[..., W]`` of vectors ``[..., D]`` must hold."""
    x = vectors.astype(np.float64)
    if codec.is_rotated:
        assert rotation is not None
        return _rotated(x, rows, codec, rotation, norm_correction)
    x = np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0)
    own = unpack(rows, row_layout(codec, x.shape[-1]))
    codes, _ = quantise(x, codec)
    if codec.kind == FP8:
        return Expected(codes, np.where(codes == own, 0.0, np.inf), {})
    if codec.kind == UNIFORM:
        low = x.min(axis=-1, keepdims=True)
        scale = (x.max(axis=-1, keepdims=True) - low) / (2**codec.bits - 1)
        steps = (x - low) / np.where(scale > 0, scale, 1)
        distances = _from_half(steps, codes.astype(int), own.astype(int))
        return Expected(codes, distances, {"scale": scale, "zero": low})
    assert codec.kind == Q8_0
    # The oracle rounds its scales; those before rounding divide.
    scale = _block_scales(x)
    each = np.repeat(scale, Q8_0_BLOCK, axis=-1)[..., : x.shape[-1]]
    steps = x / np.where(each > 0, each, 1)
    signed = (codes.view(np.int8).astype(int), own.view(np.int8).astype(int))
    return Expected(codes, _from_half(steps, *signed), {"scale": scale})


def _block_scales(x: np.ndarray) -> np.ndarray:
    blocks = [x[..., at : at + Q8_0_BLOCK] for at in range(0, x.shape[-1], Q8_0_BLOCK)]
    return np.stack([np.abs(block).max(axis=-1) / 127 for block in blocks], axis=-1)


def _from_half(steps: np.ndarray, codes: np.ndarray, own: np.ndarray) -> np.ndarray:
    middle = (codes + own) / 2
    return np.where(np.abs(codes - own) <= 1, np.abs(steps - middle), np.inf)


def _rotated(
    x: np.ndarray, rows: np.ndarray, codec: Codec, rotation: np.ndarray, norm_correction: bool
) -> Expected:
    size = x.shape[-1]
    layout, book = row_layout(codec, size), codebook_of(codec, size)
    own = unpack(rows, layout)
    norms, y = rotate(x, rotation[:, :size])
    wanted = np.searchsorted(book.boundaries.astype(np.float64), y, side="right")
    indices = (own & (codec.levels - 1)).astype(int)
    between = book.boundaries.astype(np.float64)[
        np.minimum(np.minimum(wanted, indices), len(book.boundaries) - 1)
    ]
    distances = np.where(np.abs(wanted - indices) <= 1, np.abs(y - between), np.inf)
    centroids = book.centroids.astype(np.float64)[indices]
    corrected = norm_correction and codec.corrects_norm
    scales = norms / np.linalg.norm(centroids, axis=-1) if corrected else norms
    fields = {"scale": scales[..., None]}
    if codec.kind == U8:
        distances = np.where(own < codec.levels, distances, np.inf)
        return Expected(wanted.astype(np.uint8), distances, fields)
    if codec.kind != PROD:
        return Expected(wanted.astype(np.uint8), distances, fields)
    stored = reference.fields_of(rows, layout)["scale"]
    usable = np.where(norms[..., None] > 0, x, 0)
    residual = usable - stored * centroids @ rotation[:, :size].astype(np.float64).T
    seen = residual @ rotation[:, size:].astype(np.float64)
    signs = seen >= 0
    fields["residual_norm"] = np.linalg.norm(residual, axis=-1, keepdims=True)
    same_index = wanted == indices
    near = np.abs(seen) / np.where(norms > 0, norms, 1)[..., None]
    # A sign is judged on a scale of its own; see tolerances.toml.
    distances = np.where(same_index, near / tolerances.SIGN_DISTANCE_FACTOR, distances)
    codes = wanted.astype(np.uint8) | signs.astype(np.uint8) << codec.index_bits
    return Expected(codes, distances, fields)
