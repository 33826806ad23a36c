"""Kinds without rotation and codebook: equal steps, blocks, small floats, and floats as they are.

x being a vector, L the number of codes:

    uniform         scale = (max - min) / (L - 1),  code = round((x - min) / scale),  zero = min,
                    x' = scale code + zero
    q8_0            per block: scale = max |x| / 127,  code = round(x / scale),  x' = scale code
    fp8_e4m3        see ``tq_onnx.codec.fp8``
    raw             the elements, see ``tq_onnx.codec.elements``

A row with an element that is not finite is stored as the zero vector, but by ``raw``. Rounding is
to nearest, ties to even; the fields divide as they are before they are rounded for storing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tq_onnx.codec import fp8
from tq_onnx.codec.kind import (
    STEP,
    CodecKind,
    Codes,
    FieldForm,
    Fields,
    Float32,
    Float64,
    Judged,
    Tables,
    Written,
    finite_rows,
    half,
)

UNIFORM: Final = "uniform"
"""Codec kind: equal steps between the smallest and the largest coordinate of a row; not rotated."""

FP8: Final = "fp8_e4m3"
"""Codec kind: every coordinate as a float of 8 bits, E4M3FN, saturating; no metadata."""

Q8_0: Final = "q8_0"
"""Codec kind: signed bytes, one scale per block of coordinates; not rotated."""

RAW: Final = "raw"
"""Codec kind: the coordinates as they are, not rotated, without metadata."""

Q8_0_BLOCK: Final = 32
"""Coordinates that share a scale; the last block of a row may have fewer."""

_LARGEST_BYTE: Final = 127
_HALF: Final = 2.0**-11
_SMALLEST_HALF: Final = 2.0**-25
"""Half a step of float16, of normal numbers relatively, and below."""


def _range(x: Float64, bits: int) -> tuple[Float64, Float64, int]:
    """Return zero and scale of each row ``[..., 1]``, and the largest code."""
    top = (1 << bits) - 1
    low = x.min(axis=-1, keepdims=True)
    return low, (x.max(axis=-1, keepdims=True) - low) / top, top


def _uniform(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    x = finite_rows(x)
    low, scale, top = _range(x, bits)
    steps = np.rint((x - low) / np.where(scale > 0, scale, 1))
    return np.clip(steps, 0, top).astype(np.uint8), {"scale": half(scale), "zero": half(low)}


def _steps(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
    decoded: Float64 = fields["scale"] * codes + fields["zero"]
    return decoded


def _judge_uniform(written: Written, tables: Tables) -> Judged:
    low, scale, top = _range(written.vectors, written.bits)
    steps = np.where(scale > 0, scale, np.inf)
    distances, clearance = _from_halves(
        written.codes, (written.vectors - low) / steps, written.moved / steps
    )
    wanted, _ = _uniform(written.vectors, written.bits, tables)
    fields = {"scale": scale, "zero": low}
    return Judged(wanted, {STEP: distances / top}, {STEP: clearance / top}, fields)


def _from_halves(
    found: Codes | Float64, numbers: Float64, moved: Float64
) -> tuple[Float64, Float64]:
    """Return how far numbers lie outside the intervals of the codes found, and from a half.

    Two of them may have moved: the coordinate, and what the scale is made of.
    """
    slack = 2 * moved.max(axis=-1, keepdims=True)
    outside = np.maximum(np.abs(found - numbers) - 0.5 - slack, 0)
    return outside, np.abs(numbers - np.floor(numbers) - 0.5)


def _uniform_error(x: Float64, bits: int) -> Float64:
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    steps = (1 << bits) - 1
    stored = (high - low + np.abs(low)) * _HALF + (steps + 1) * _SMALLEST_HALF
    return np.broadcast_to((high - low) / (2 * steps) + stored, x.shape)


def _block_scales(x: Float64) -> Float64:
    """Return the scale of each block ``[..., n]``."""
    starts = range(0, x.shape[-1], Q8_0_BLOCK)
    largest = [np.abs(x[..., at : at + Q8_0_BLOCK]).max(axis=-1) for at in starts]
    return np.stack(largest, axis=-1) / _LARGEST_BYTE


def _of_coordinates(blocks: Float64, head_size: int) -> Float64:
    """Return the numbers of blocks ``[..., n]``, for each coordinate ``[..., D]``."""
    return np.repeat(blocks, Q8_0_BLOCK, axis=-1)[..., :head_size]


def _q8_0(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    x = finite_rows(x)
    scale = _block_scales(x)
    each = _of_coordinates(scale, x.shape[-1])
    steps = np.rint(x / np.where(each > 0, each, 1)).astype(np.int8)
    return steps.view(np.uint8), {"scale": half(scale)}


def _signed_steps(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
    return _of_coordinates(fields["scale"], codes.shape[-1]) * codes.view(np.int8)


def _judge_q8_0(written: Written, tables: Tables) -> Judged:
    scale = _block_scales(written.vectors)
    each = _of_coordinates(scale, written.vectors.shape[-1])
    signed = np.ascontiguousarray(written.codes).view(np.int8).astype(np.float64)
    steps = np.where(each > 0, each, np.inf)
    distances, clearance = _from_halves(signed, written.vectors / steps, written.moved / steps)
    top = _LARGEST_BYTE
    wanted, _ = _q8_0(written.vectors, written.bits, tables)
    return Judged(wanted, {STEP: distances / top}, {STEP: clearance / top}, {"scale": scale})


def _q8_0_error(x: Float64, bits: int) -> Float64:
    top = _LARGEST_BYTE * _of_coordinates(_block_scales(x), x.shape[-1])
    errors: Float64 = top / (2 * _LARGEST_BYTE) + top * _HALF + _LARGEST_BYTE * _SMALLEST_HALF
    return errors


def _fp8(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
    return fp8.encode(finite_rows(x)), {}


def _fp8_values(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
    return fp8.VALUES[codes].astype(np.float64)


def _judge_fp8(written: Written, tables: Tables) -> Judged:
    # Nothing rounds before the rounding that counts, so only a coordinate that moved has a choice.
    low, high = (fp8.VALUES[fp8.encode(written.vectors + side * written.moved)] for side in (-1, 1))
    found, wanted = fp8.VALUES[written.codes], fp8.encode(written.vectors)
    good = np.where(low < high, (low <= found) & (found <= high), written.codes == wanted)
    return Judged(wanted, {STEP: np.where(good, 0.0, np.inf)}, {}, {})


def _fp8_error(x: Float64, bits: int) -> Float64:
    kept = np.minimum(np.abs(x), fp8.FP8_MAX)
    # Three bits of mantissa, and steps of 2^-9 below the smallest normal number.
    errors: Float64 = np.maximum(kept * 2.0**-4, 2.0**-10) + np.abs(x) - kept
    return errors


KINDS: Final = (
    CodecKind(
        UNIFORM,
        number=1,
        planes={2: (2,), 3: (2, 1), 4: (4,)},
        formula="scale * code + zero",
        fields=(FieldForm("scale", 2), FieldForm("zero", 2)),
        quantise=_uniform,
        coordinates=_steps,
        judge=_judge_uniform,
        step_error=_uniform_error,
    ),
    CodecKind(
        FP8,
        number=2,
        planes={8: (8,)},
        formula=["E4M3FN", fp8.FP8_MAX],
        quantise=_fp8,
        coordinates=_fp8_values,
        judge=_judge_fp8,
        step_error=_fp8_error,
    ),
    CodecKind(
        Q8_0,
        number=3,
        planes={8: (8,)},
        formula=["scale * signed code", Q8_0_BLOCK],
        fields=(FieldForm("scale", 2, block=Q8_0_BLOCK),),
        quantise=_q8_0,
        coordinates=_signed_steps,
        judge=_judge_q8_0,
        step_error=_q8_0_error,
    ),
    CodecKind(
        RAW,
        number=6,
        planes={16: (), 32: ()},
        formula=["elements of the model", "little", "coordinates in order"],
    ),
)
"""The records of this module."""
