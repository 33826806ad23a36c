"""Rows of ``raw``: floats to and from the bytes of their element type, by arithmetic.

Standard ONNX has no way to look at the bits of a float before opset 26, so the bits are computed.
With ``2^e`` the largest power of two that is ``<= |v|``, but never less than the smallest normal
number ``2^lowest``, and m bits of mantissa::

    bits = round(|v| * 2^(m - e)) + 2^m * (e - lowest)

which is ``2^m * biased exponent + mantissa`` for a normal number, ``mantissa`` for a subnormal one,
and carries into the exponent by itself, up to infinity. Rounding (half to even) does something only
where a runtime feeds a body of 16-bit elements with values that it has not rounded to them.

``e`` is estimated with a logarithm and then corrected: ``|v| * 2^(1 - e)`` must lie in [2, 4). All
factors are powers of two and all integers lie below 2^24, so that float32 is exact. Zeros keep
their sign; a NaN comes out as the quiet NaN without sign or payload.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onnxscript import BOOL, FLOAT, INT32, INT64, UINT8, script

from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.half import half_values
from tq_onnx.ops.bodies.pieces import Pieces, Reader, Writer
from tq_onnx.ops.bodies.planes import plane_bytes

_LARGEST: Final = 3.4028234663852886e38
_LOG2_E: Final = 1 / math.log(2)

# Of float32: 2^(1 - e) for e from 127 down to -126.
_INVERSE_POWERS: Final = [2.0**k for k in range(-126, 128)]
_HIGHEST: Final = 127.0

# Of float32, indexed by the upper nine bits, sign and exponent. Infinity reads as NaN.
_EXPONENTS: Final = 256
_UNITS: Final = [
    sign * (2.0 ** (max(e, 1) - 150) if e < _EXPONENTS - 1 else float("nan"))
    for sign in (1.0, -1.0)
    for e in range(_EXPONENTS)
]
_LEADING: Final = [2.0**23 if e else 0.0 for _ in range(2) for e in range(_EXPONENTS)]


@script(TURBOQUANT, default_opset=op)
def magnitude_bits(
    values: FLOAT[...], lowest: float, highest: float, limit: float, binade: int
) -> INT32[...]:
    """Bits of |values| as elements of m mantissa bits: binade = 2^m, normal exponents from lowest
    to highest. What is above limit must come out as infinity, and limit itself too.
    """
    one = op.Constant(value_float=1.0)
    two = op.Constant(value_float=2.0)
    half = op.Constant(value_float=0.5)
    low = op.Constant(value_float=lowest)
    high = op.Constant(value_float=highest)
    unbounded = op.Abs(values)
    # Comparisons with NaN are false.
    finite = op.LessOrEqual(unbounded, op.Constant(value_float=_LARGEST))
    bounded = op.Min(unbounded, op.Constant(value_float=limit))
    magnitude = op.Where(finite, bounded, op.Constant(value_float=0.0))
    normal = op.Max(magnitude, op.Pow(two, low))
    logarithm = op.Mul(op.Log(normal), op.Constant(value_float=_LOG2_E))
    estimate = op.Min(op.Max(op.Floor(logarithm), low), high)
    index = op.Sub(op.Constant(value_float=_HIGHEST), estimate)
    inverse = op.Gather(op.Constant(value_floats=_INVERSE_POWERS), op.Cast(index, to=I32))
    scaled = op.Mul(normal, inverse)
    below = op.Less(scaled, two)
    above = op.GreaterOrEqual(scaled, op.Constant(value_float=4.0))
    exponent = op.Add(estimate, op.Sub(op.Cast(above, to=F32), op.Cast(below, to=F32)))
    correction = op.Where(above, half, op.Where(below, two, one))
    levels = op.Constant(value_int=binade)
    half_levels = op.Mul(op.Cast(levels, to=F32), half)
    significand = op.Mul(op.Mul(op.Mul(magnitude, inverse), correction), half_levels)
    binades = op.Cast(op.Sub(exponent, low), to=I32)
    levels_i32 = op.Cast(levels, to=I32)
    number = op.Add(op.Cast(op.Round(significand), to=I32), op.Mul(binades, levels_i32))
    all_binades = op.Cast(op.Add(op.Sub(high, low), two), to=I32)
    infinity = op.Mul(all_binades, levels_i32)
    nan = op.Add(infinity, op.Cast(half_levels, to=I32))
    bits = op.Where(finite, number, op.Where(op.IsNaN(values), nan, infinity))
    return bits


@script(TURBOQUANT, default_opset=op)
def is_negative(values: FLOAT[...]) -> BOOL[...]:
    """Whether the sign is minus; that of a zero shows in its reciprocal."""
    zero = op.Constant(value_float=0.0)
    # No Where in between: that of onnxruntime gives a zero without its sign.
    reciprocal = op.Div(op.Constant(value_float=1.0), values)
    negative = op.Or(op.Less(values, zero), op.Less(reciprocal, zero))
    return negative


@script(TURBOQUANT, default_opset=op)
def element_bytes(bits: INT32[...], negative: BOOL[...], places: INT32[...]) -> UINT8[...]:
    """Rows [B, N, T, k*D] of elements [B, N, T, D]: their k bytes by places 256^i, low first; the
    sign is the top bit of the last byte.
    """
    last = op.Constant(value_ints=[-1])
    byte = op.Cast(op.Constant(value_int=256), to=I32)
    shifted = op.Div(op.Unsqueeze(bits, last), places)
    unsigned = op.Sub(shifted, op.Mul(op.Div(shifted, byte), byte))
    is_top = op.Equal(places, op.ReduceMax(places, keepdims=1))
    has_sign = op.And(op.Unsqueeze(negative, last), is_top)
    sign = op.Mul(op.Cast(has_sign, to=I32), op.Cast(op.Constant(value_int=128), to=I32))
    pairs = op.Cast(op.Add(unsigned, sign), to=U8)
    rows = op.Reshape(pairs, op.Constant(value_ints=[0, 0, 0, -1]))
    return rows


@script(TURBOQUANT, default_opset=op)
def float_rows(vectors: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, 4*D] of float32 vectors [B, N, T, D]."""
    bits = magnitude_bits(vectors, -126.0, 127.0, _LARGEST, 8388608)
    places = op.Cast(op.Constant(value_ints=[1, 256, 65536, 16777216]), to=I32)
    rows = element_bytes(bits, is_negative(vectors), places)
    return rows


@script(TURBOQUANT, default_opset=op)
def half_rows(vectors: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, 2*D] of vectors [B, N, T, D] as float16."""
    bits = magnitude_bits(vectors, -14.0, 15.0, 65536.0, 1024)
    places = op.Cast(op.Constant(value_ints=[1, 256]), to=I32)
    rows = element_bytes(bits, is_negative(vectors), places)
    return rows


@script(TURBOQUANT, default_opset=op)
def bfloat_rows(vectors: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, 2*D] of vectors [B, N, T, D] as bfloat16."""
    bits = magnitude_bits(vectors, -126.0, 127.0, _LARGEST, 128)
    places = op.Cast(op.Constant(value_ints=[1, 256]), to=I32)
    rows = element_bytes(bits, is_negative(vectors), places)
    return rows


@script(TURBOQUANT, default_opset=op)
def float_values(elements: UINT8[...], places: FLOAT[...]) -> FLOAT[...]:
    """Floats [...] of the bytes [..., k] of float32, low first, or of its upper bytes alone.

    places are those of the bytes in the lower 24 bits, 0 for the last byte.
    """
    last = op.Constant(value_ints=[-1])
    numbers = op.Cast(elements, to=F32)
    low = op.ReduceSum(op.Mul(numbers, places), last, keepdims=0)
    is_top = op.Cast(op.Equal(places, op.Constant(value_float=0.0)), to=F32)
    top = op.ReduceSum(op.Mul(numbers, is_top), last, keepdims=0)
    binade = op.Constant(value_float=8388608.0)
    odd = op.Floor(op.Div(low, binade))
    mantissa = op.Sub(low, op.Mul(odd, binade))
    sign_exponent = op.Add(op.Add(top, top), odd)
    index = op.Cast(sign_exponent, to=I32)
    leading = op.Gather(op.Constant(value_floats=_LEADING), index)
    unit = op.Gather(op.Constant(value_floats=_UNITS), index)
    values = op.Mul(op.Add(mantissa, leading), unit)
    return values


@script(TURBOQUANT, default_opset=op)
def floats_of_rows(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of float32."""
    stored = plane_bytes(rows, head_size, 0, 32)
    elements = op.Reshape(stored, op.Constant(value_ints=[0, 0, 0, -1, 4]))
    places = op.Constant(value_floats=[1.0, 256.0, 65536.0, 0.0])
    coordinates = float_values(elements, places)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def halves_of_rows(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of float16."""
    stored = plane_bytes(rows, head_size, 0, 16)
    elements = op.Reshape(stored, op.Constant(value_ints=[0, 0, 0, -1, 2]))
    coordinates = half_values(elements)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def bfloats_of_rows(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of bfloat16."""
    stored = plane_bytes(rows, head_size, 0, 16)
    elements = op.Reshape(stored, op.Constant(value_ints=[0, 0, 0, -1, 2]))
    coordinates = float_values(elements, op.Constant(value_floats=[65536.0, 0.0]))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def no_scales(rows: UINT8[...]) -> FLOAT[...]:
    """Scales [B, N, S] of rows [B, N, S, W] that have none: all 1."""
    scales = op.Expand(op.Constant(value_float=1.0), op.Shape(rows, start=0, end=3))
    return scales


@script(TURBOQUANT, default_opset=op)
def sum_of_floats(weights: FLOAT[...], values: FLOAT[...]) -> FLOAT[...]:
    """Weighted sums [B, N, R, D] of values [B, N, S, D], weights [B, N, R, S].

    0 * NaN is NaN, so values that are not finite are left out of the product; they spoil the sums
    in which they have a weight, and no others.
    """
    zero = op.Constant(value_float=0.0)
    finite = op.LessOrEqual(op.Abs(values), op.Constant(value_float=_LARGEST))
    clean = op.MatMul(weights, op.Where(finite, values, zero))
    counted = op.Cast(op.Greater(weights, zero), to=F32)
    spoilt = op.MatMul(counted, op.Cast(op.Not(finite), to=F32))
    sums = op.Where(op.Greater(spoilt, zero), op.Constant(value_float=float("nan")), clean)
    return sums


_RAW: Final = {
    "float32": (Writer(float_rows), Reader(floats_of_rows)),
    "float16": (Writer(half_rows), Reader(halves_of_rows)),
    "bfloat16": (Writer(bfloat_rows), Reader(bfloats_of_rows)),
}


def _raw(codec: Codec, element: str) -> tuple[Writer, Reader]:
    return _RAW[element]


PIECES: Final[Mapping[str, Pieces]] = {RAW: _raw}
"""The pieces of each kind of this module."""
