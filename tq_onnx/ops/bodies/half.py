"""Fields of a row: float32 to and from the two bytes of a little-endian float16, by arithmetic.

Standard ONNX has no way to look at the bits of a float before opset 26, so the bits are computed.
Every step is exact in float32 except the one rounding that float16 asks for, which is ``Round``
(half to even, as IEEE 754 wants). With ``e`` the number of powers ``2^-14 ... 2^15`` that are
``<= |v|`` (0 for a subnormal), neighbouring float16 values around ``|v|`` differ by
``unit(e) = 2^(max(e, 1) - 25)`` and::

    bits = round(|v| / unit(e)) + 1024 * max(e - 1, 0)

which is ``1024 * e + mantissa`` for a normal number, ``mantissa`` for a subnormal one, and carries
into the next exponent by itself when the mantissa rounds up to 2. The sign is one bit more.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import FLOAT, INT64, UINT8, script

from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, U8, op

_EXPONENTS: Final = 32
_POWERS: Final = [2.0**k for k in range(-14, 16)]
_UNITS_PER_ONE: Final = [2.0 ** (25 - max(e, 1)) for e in range(_EXPONENTS - 1)]

# Indexed by the upper six bits, sign and exponent. Nobody writes fields that are not finite; a row
# that holds one all the same is read as NaN.
_UNITS: Final = [
    sign * (2.0 ** (max(e, 1) - 25) if e < _EXPONENTS - 1 else float("nan"))
    for sign in (1.0, -1.0)
    for e in range(_EXPONENTS)
]
_LEADING: Final = [1024.0 if e else 0.0 for _ in range(2) for e in range(_EXPONENTS)]
_MAX_HALF: Final = MAX_HALF
_LARGEST: Final = 3.4028234663852886e38


@script(TURBOQUANT, default_opset=op)
def half_bytes(values: FLOAT[...]) -> UINT8[...]:
    """Bytes [B, N, T, 2*n] of the float16 nearest to values [B, N, T, n], ties to even, low first.

    What is too large becomes the largest finite one.
    """
    last = op.Constant(value_ints=[-1])
    one = op.Constant(value_float=1.0)
    column = op.Unsqueeze(values, last)
    clamped = op.Min(op.Abs(column), op.Constant(value_float=_MAX_HALF))
    reached = op.GreaterOrEqual(clamped, op.Constant(value_floats=_POWERS))
    exponent = op.ReduceSum(op.Cast(reached, to=F32), last, keepdims=1)
    units_per_one = op.Gather(op.Constant(value_floats=_UNITS_PER_ONE), op.Cast(exponent, to=I32))
    lower_binades = op.Sub(op.Max(exponent, one), one)
    bits = op.Add(
        op.Round(op.Mul(clamped, units_per_one)),
        op.Mul(lower_binades, op.Constant(value_float=1024.0)),
    )
    byte = op.Constant(value_float=256.0)
    high = op.Floor(op.Div(bits, byte))
    low = op.Sub(bits, op.Mul(high, byte))
    negative = op.Cast(op.Less(column, op.Constant(value_float=0.0)), to=F32)
    top = op.Add(high, op.Mul(negative, op.Constant(value_float=128.0)))
    pairs = op.Cast(op.Concat(low, top, axis=-1), to=U8)
    rows = op.Reshape(pairs, op.Constant(value_ints=[0, 0, 0, -1]))
    return rows


@script(TURBOQUANT, default_opset=op)
def half_values(pairs: UINT8[...]) -> FLOAT[...]:
    """Floats [...] of the two bytes [..., 2] of a float16, low byte first."""
    last = op.Constant(value_ints=[-1])
    place = op.Constant(value_floats=[1.0, 256.0])
    bits = op.ReduceSum(op.Mul(op.Cast(pairs, to=F32), place), last, keepdims=0)
    binade = op.Constant(value_float=1024.0)
    sign_exponent = op.Floor(op.Div(bits, binade))
    mantissa = op.Sub(bits, op.Mul(sign_exponent, binade))
    index = op.Cast(sign_exponent, to=I32)
    leading = op.Gather(op.Constant(value_floats=_LEADING), index)
    unit = op.Gather(op.Constant(value_floats=_UNITS), index)
    values = op.Mul(op.Add(mantissa, leading), unit)
    return values


@script(TURBOQUANT, default_opset=op)
def half_field(rows: UINT8[...], head_size: INT64[...], bits: int, skip: int) -> FLOAT[...]:
    """One float16 [B, N, S] of rows [B, N, S, W]: skip bytes behind codes of so many bits."""
    codes = op.Div(op.Mul(head_size, op.Constant(value_int=bits)), op.Constant(value_int=8))
    start = op.Add(codes, op.Constant(value_int=skip))
    stop = op.Add(start, op.Constant(value_int=2))
    values = half_values(op.Slice(rows, start, stop, op.Constant(value_ints=[-1])))
    return values


@script(TURBOQUANT, default_opset=op)
def finite_or_zero(values: FLOAT[...]) -> FLOAT[...]:
    """Values, with 0 for what is not finite: fields that only a row which nobody wrote can have."""
    # Comparisons with NaN are false.
    finite = op.LessOrEqual(op.Abs(values), op.Constant(value_float=_LARGEST))
    kept = op.Where(finite, values, op.Constant(value_float=0.0))
    return kept
