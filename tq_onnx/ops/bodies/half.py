"""A row's scale: float32 to and from the two bytes of a little-endian float16, by arithmetic.

Standard ONNX has no way to look at the bits of a float before opset 26, so the bits are computed.
Every step is exact in float32 except the one rounding that float16 asks for, which is ``Round``
(half to even, as IEEE 754 wants). With ``e`` the number of powers ``2^-14 ... 2^15`` that are
``<= v`` (0 for a subnormal), neighbouring float16 values around ``v`` differ by
``unit(e) = 2^(max(e, 1) - 25)`` and::

    bits = round(v / unit(e)) + 1024 * max(e - 1, 0)

which is ``1024 * e + mantissa`` for a normal number, ``mantissa`` for a subnormal one, and carries
into the next exponent by itself when the mantissa rounds up to 2.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import FLOAT, UINT8, script

from tq_onnx.codec.spec import MAX_SCALE
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, U8, op

_EXPONENTS: Final = 32
_POWERS: Final = [2.0**k for k in range(-14, 16)]
_UNITS_PER_ONE: Final = [2.0 ** (25 - max(e, 1)) for e in range(_EXPONENTS - 1)]

# Indexed by the upper six bits, sign and exponent. Nobody writes negative or non-finite scales;
# a row that holds one all the same is read as what it says, as every other backend does.
_UNITS: Final = [
    sign * (2.0 ** (max(e, 1) - 25) if e < _EXPONENTS - 1 else float("nan"))
    for sign in (1.0, -1.0)
    for e in range(_EXPONENTS)
]
_LEADING: Final = [1024.0 if e else 0.0 for _ in range(2) for e in range(_EXPONENTS)]
_MAX_SCALE: Final = MAX_SCALE


@script(TURBOQUANT, default_opset=op)
def scale_to_bytes(scale: FLOAT[...]) -> UINT8[...]:
    """Bytes [..., 2] of the float16 nearest to scales [..., 1] >= 0, ties to even, low first."""
    clamped = op.Min(scale, op.Constant(value_float=_MAX_SCALE))
    reached = op.GreaterOrEqual(clamped, op.Constant(value_floats=_POWERS))
    last = op.Constant(value_ints=[-1])
    exponent = op.ReduceSum(op.Cast(reached, to=F32), last, keepdims=1)
    units_per_one = op.Gather(op.Constant(value_floats=_UNITS_PER_ONE), op.Cast(exponent, to=I32))
    one = op.Constant(value_float=1.0)
    lower_binades = op.Sub(op.Max(exponent, one), one)
    bits = op.Add(
        op.Round(op.Mul(clamped, units_per_one)),
        op.Mul(lower_binades, op.Constant(value_float=1024.0)),
    )
    byte = op.Constant(value_float=256.0)
    high = op.Floor(op.Div(bits, byte))
    low = op.Sub(bits, op.Mul(high, byte))
    pair = op.Cast(op.Concat(low, high, axis=-1), to=U8)
    return pair


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
def row_scales(rows: UINT8[...]) -> FLOAT[...]:
    """Scales [..., S] of rows [..., S, W]: the float16 in the last two bytes, low byte first."""
    last = op.Constant(value_ints=[-1])
    stored = op.Slice(
        rows,
        op.Constant(value_ints=[-2]),
        op.Constant(value_ints=[9223372036854775807]),
        last,
    )
    scales = half_values(stored)
    return scales
