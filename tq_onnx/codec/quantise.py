"""What each codec kind makes of a vector: codes and fields, and back; in float64.

The formulas, x being a vector of D coordinates, R orthogonal:

    lloyd_max, u8   gamma = ||x||,  y = (x / gamma) R,  code_j = #{i : y_j >= t_i},
                    scale = gamma / ||c[code]|| with norm correction, else gamma,
                    x' = scale c[code] R^T
    prod            the same with one bit less, then r = x - x', sign_j = ((S r)_j >= 0),
                    residual_norm = ||r||,  x'' = x' + sqrt(pi/2)/D ||r|| S^T (+-1)  (QJL)
    uniform         scale = (max - min) / (L - 1),  code = round((x - min) / scale),  zero = min,
                    x' = scale code + zero
    q8_0            per block: scale = max |x| / 127,  code = round(x / scale),  x' = scale code
    fp8_e4m3        see ``tq_onnx.codec.fp8``

A row with an element that is not finite (for rotated kinds: whose squared norm is not finite in
float32) is stored as the zero vector, so that it spoils nothing but itself. Rounding is to nearest,
ties to even; the fields take part in the codes as they are before they are rounded for storing,
but for the scale of ``prod``, whose residual is that of what a reader will see.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import fp8
from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.spec import FP8, MAX_HALF, PROD, Q8_0, Q8_0_BLOCK, U8, UNIFORM, Codec

Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
Fields = dict[str, Float64]
"""Name of a field to its floats ``[..., count]``."""


def quantise(
    vectors: npt.NDArray[np.generic],
    codec: Codec,
    rotation: npt.NDArray[np.float32] | None = None,
    codebook: Codebook | None = None,
    norm_correction: bool = True,
) -> tuple[Codes, Fields]:
    """Codes and fields of vectors.

    Args:
        vectors: floats ``[..., D]``.
        codec: any but ``raw``.
        rotation: float32 ``[D, D]``, for ``prod`` ``[D, 2 D]``; None for a kind without.
        codebook: likewise.
        norm_correction: whether the scale makes up for the norm that quantisation loses, for kinds
            that can (``Codec.corrects_norm``).

    Returns:
        codes uint8 ``[..., D]``, and the fields as float64 values of their stored type.
    """
    x = np.asarray(vectors, np.float64)
    if not codec.is_rotated:
        x = np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0)
        if codec.kind == FP8:
            return fp8.encode(x), {}
        return _blocks(x) if codec.kind == Q8_0 else _uniform(x, codec)
    assert rotation is not None  # only other kinds do without
    assert codebook is not None
    size = x.shape[-1]
    norms, y = rotate(x, rotation[:, :size])
    codes = np.searchsorted(codebook.boundaries.astype(np.float64), y, side="right")
    indices = codes.astype(np.uint8)
    centroids = codebook.centroids.astype(np.float64)[codes]
    if codec.kind == U8:
        return indices, {"scale": norms.astype(np.float32).astype(np.float64)[..., None]}
    corrected = norm_correction and codec.corrects_norm
    scales = _half(norms / np.linalg.norm(centroids, axis=-1) if corrected else norms)
    if codec.kind != PROD:
        return indices, {"scale": scales[..., None]}
    decoded = scales[..., None] * centroids @ rotation[:, :size].astype(np.float64).T
    residual = np.where(norms[..., None] > 0, x, 0) - decoded
    signs = residual @ rotation[:, size:].astype(np.float64) >= 0
    lengths = _half(np.linalg.norm(residual, axis=-1))
    return (
        indices | signs.astype(np.uint8) << codec.index_bits,
        {"scale": scales[..., None], "residual_norm": lengths[..., None]},
    )


def coordinates(
    codes: Codes, fields: Fields, codec: Codec, centroids: npt.NDArray[np.float32] | None
) -> Float64:
    """What codes ``[..., D]`` and fields mean, in the space that the rotation leads to.

    Returns:
        float64 ``[..., C]``, C = ``codec.coordinates(D)``; for a kind without rotation the vectors.
    """
    # Rows that were never written may hold any bytes, hence any scale; whether one is read at all
    # is up to the caller.
    with np.errstate(invalid="ignore"):
        if codec.kind == FP8:
            return fp8.VALUES[codes].astype(np.float64)
        if codec.kind == UNIFORM:
            decoded: Float64 = fields["scale"] * codes + fields["zero"]
            return decoded
        if codec.kind == Q8_0:
            scales = np.repeat(fields["scale"], Q8_0_BLOCK, axis=-1)[..., : codes.shape[-1]]
            return scales * codes.view(np.int8)
        assert centroids is not None  # only other kinds do without
        indices = codes & (codec.levels - 1)
        values: Float64 = fields["scale"] * centroids.astype(np.float64)[indices]
        if codec.kind != PROD:
            return values
        signs = 2.0 * (codes >> codec.index_bits) - 1
        share = sqrt(pi / 2) / codes.shape[-1]
        return np.concatenate([values, share * fields["residual_norm"] * signs], axis=-1)


def rotate(
    vectors: npt.NDArray[np.generic], rotation: npt.NDArray[np.float32]
) -> tuple[Float64, Float64]:
    """Splits vectors into norms and rotated directions.

    Args:
        vectors: floats ``[..., D]``.
        rotation: float32 ``[D, D]``.

    Returns:
        norms float64 ``[...]`` and coordinates float64 ``[..., D]``; both 0 for a row whose squared
        norm is 0 or not finite in float32, which is what the backends accumulate in.
    """
    x = np.asarray(vectors, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        energy = np.sum(x * x, axis=-1)
        usable = np.isfinite(energy.astype(np.float32)) & (energy.astype(np.float32) > 0)
    norms = np.sqrt(np.where(usable, energy, 0))
    directions = np.where(usable[..., None], x, 0) / np.where(usable, norms, 1)[..., None]
    return norms, directions @ np.asarray(rotation, np.float64)


def _uniform(x: Float64, codec: Codec) -> tuple[Codes, Fields]:
    top = (1 << codec.bits) - 1
    low = x.min(axis=-1, keepdims=True)
    scale = (x.max(axis=-1, keepdims=True) - low) / top
    steps = np.rint((x - low) / np.where(scale > 0, scale, 1))
    return np.clip(steps, 0, top).astype(np.uint8), {"scale": _half(scale), "zero": _half(low)}


def _blocks(x: Float64) -> tuple[Codes, Fields]:
    size = x.shape[-1]
    count = -(-size // Q8_0_BLOCK)
    room = [(0, 0)] * (x.ndim - 1) + [(0, count * Q8_0_BLOCK - size)]
    blocks = np.pad(x, room).reshape(*x.shape[:-1], count, Q8_0_BLOCK)
    scale = np.abs(blocks).max(axis=-1) / 127
    steps = np.rint(blocks / np.where(scale > 0, scale, 1)[..., None]).astype(np.int8)
    whole = steps.reshape(*x.shape[:-1], count * Q8_0_BLOCK)
    return whole[..., :size].view(np.uint8), {"scale": _half(scale)}


def _half(values: Float64) -> Float64:
    """Rounded to float16 through float32, as the backends round; clamped to the finite ones."""
    clamped = np.clip(values, -MAX_HALF, MAX_HALF).astype(np.float32)
    return clamped.astype(np.float16).astype(np.float64)
