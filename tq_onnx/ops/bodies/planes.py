"""Codes to and from bit planes (layout: ``tq_onnx/codec/spec.py``).

A plane of ``w`` bits puts ``k = 8 / w`` coordinates into a byte: viewed as ``[k, n]``, ``n = D/k``,
the coordinates of one byte stand in one column. Packing is a weighted sum over the columns,
unpacking a shift and a mask per row of that view.

Packing serves every number of bits by one body, driven by the attribute. Unpacking runs over the
whole cache, so it is written out per number of bits, with nothing to skip at run time. Planes are
found by the head size: a cache may have wider rows than its codec needs.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from onnxscript import FLOAT, INT32, INT64, UINT8, script

from tq_onnx.ops.bodies import F32, I32, I64, TURBOQUANT, U8, op


@script(TURBOQUANT, default_opset=op)
def pack_plane(codes: FLOAT[...], width: FLOAT, per_byte: FLOAT) -> UINT8[...]:
    """One plane [B, N, T, D/k] of codes [B, N, T, D] below 2^width, k = per_byte = 8 / width.

    Coordinate i + j*n goes to byte i, shifted left by j*width: a sum with weights 2^(j*width).
    """
    keep = op.Constant(value_ints=[0, 0, 0])
    rest = op.Constant(value_ints=[-1])
    first = op.Constant(value_ints=[0])
    columns = op.Concat(keep, op.Unsqueeze(op.Cast(per_byte, to=I64), first), rest, axis=0)
    shifts = op.Mul(
        op.Range(op.Constant(value_float=0.0), per_byte, op.Constant(value_float=1.0)), width
    )
    weights = op.Pow(op.Constant(value_float=2.0), shifts)
    weighted = op.Mul(op.Reshape(codes, columns), op.Unsqueeze(weights, rest))
    plane = op.Cast(op.ReduceSum(weighted, op.Constant(value_ints=[-2]), keepdims=0), to=U8)
    return plane


@script(TURBOQUANT, default_opset=op)
def pack_codes(codes: FLOAT[...], bits: int) -> UINT8[...]:
    """Planes of codes [B, N, T, D], bits from 1 to 5: a plane of 1, 2 or 4 bits, then one of
    1 bit for 3 and 5.
    """
    number_of_bits = op.Cast(op.Constant(value_int=bits), to=F32)
    two = op.Constant(value_float=2.0)
    even = op.Mul(op.Floor(op.Div(number_of_bits, two)), two)
    low_width = op.Max(even, op.Constant(value_float=1.0))
    low_levels = op.Pow(two, low_width)
    high = op.Floor(op.Div(codes, low_levels))
    low = op.Sub(codes, op.Mul(high, low_levels))
    eight = op.Constant(value_float=8.0)
    low_plane = pack_plane(low, low_width, op.Div(eight, low_width))
    high_plane = pack_plane(high, op.Constant(value_float=1.0), eight)
    last = op.Constant(value_ints=[-1])
    odd = op.Cast(op.Sub(number_of_bits, low_width), to=I64)
    high_bytes = op.Mul(op.Shape(high_plane, start=-1), odd)
    stored_high = op.Slice(high_plane, op.Constant(value_ints=[0]), high_bytes, last)
    planes = op.Concat(low_plane, stored_high, axis=-1)
    return planes


@script(TURBOQUANT, default_opset=op)
def plane_bytes(rows: UINT8[...], head_size: INT64[...], first: int, end: int) -> UINT8[...]:
    """The plane of rows [B, N, S, W] that holds the bits from first to end of every code."""
    eight = op.Constant(value_int=8)
    start = op.Div(op.Mul(head_size, op.Constant(value_int=first)), eight)
    stop = op.Div(op.Mul(head_size, op.Constant(value_int=end)), eight)
    plane = op.Slice(rows, start, stop, op.Constant(value_ints=[-1]))
    return plane


@script(TURBOQUANT, default_opset=op)
def unpack_plane(plane: UINT8[...], to_top: UINT8[...], to_bottom: UINT8) -> UINT8[...]:
    """Fields of a plane [B, N, S, n] as [B, N, S, k*n].

    A field is cut out by shifting it to the top of its byte (to_top [k, 1], a shift per field),
    then to the bottom (to_bottom, 8 - width): no mask is needed, and so no BitwiseAnd.
    """
    columns = op.Unsqueeze(plane, op.Constant(value_ints=[-2]))
    at_top = op.BitShift(columns, to_top, direction="LEFT")
    fields = op.BitShift(at_top, to_bottom, direction="RIGHT")
    codes = op.Reshape(fields, op.Constant(value_ints=[0, 0, 0, -1]))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_one_bit(plane: UINT8[...]) -> INT32[...]:
    """A plane [B, N, S, D/8] of bits as [B, N, S, D]."""
    last = op.Constant(value_ints=[-1])
    shifts = op.Constant(value_ints=[7, 6, 5, 4, 3, 2, 1, 0])
    to_top = op.Cast(op.Unsqueeze(shifts, last), to=U8)
    to_bottom = op.Cast(op.Constant(value_int=7), to=U8)
    codes = op.Cast(unpack_plane(plane, to_top, to_bottom), to=I32)
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_two_bits(plane: UINT8[...]) -> INT32[...]:
    """A plane [B, N, S, D/4] of two-bit codes as [B, N, S, D]."""
    last = op.Constant(value_ints=[-1])
    to_top = op.Cast(op.Unsqueeze(op.Constant(value_ints=[6, 4, 2, 0]), last), to=U8)
    to_bottom = op.Cast(op.Constant(value_int=6), to=U8)
    codes = op.Cast(unpack_plane(plane, to_top, to_bottom), to=I32)
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_four_bits(plane: UINT8[...]) -> INT32[...]:
    """A plane [B, N, S, D/2] of four-bit codes as [B, N, S, D]."""
    last = op.Constant(value_ints=[-1])
    to_top = op.Cast(op.Unsqueeze(op.Constant(value_ints=[4, 0]), last), to=U8)
    to_bottom = op.Cast(op.Constant(value_int=4), to=U8)
    codes = op.Cast(unpack_plane(plane, to_top, to_bottom), to=I32)
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_1(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """One-bit codes [B, N, S, D] of rows [B, N, S, W]."""
    codes = unpack_one_bit(plane_bytes(rows, head_size, 0, 1))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_2(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """Two-bit codes [B, N, S, D] of rows [B, N, S, W]."""
    codes = unpack_two_bits(plane_bytes(rows, head_size, 0, 2))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_3(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """Three-bit codes [B, N, S, D] of rows [B, N, S, W]: a plane of two bits, one of one."""
    low = unpack_two_bits(plane_bytes(rows, head_size, 0, 2))
    high = unpack_one_bit(plane_bytes(rows, head_size, 2, 3))
    codes = op.Add(low, op.Mul(high, op.Cast(op.Constant(value_int=4), to=I32)))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_4(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """Four-bit codes [B, N, S, D] of rows [B, N, S, W]."""
    codes = unpack_four_bits(plane_bytes(rows, head_size, 0, 4))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_5(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """Five-bit codes [B, N, S, D] of rows [B, N, S, W]: a plane of four bits, one of one."""
    low = unpack_four_bits(plane_bytes(rows, head_size, 0, 4))
    high = unpack_one_bit(plane_bytes(rows, head_size, 4, 5))
    codes = op.Add(low, op.Mul(high, op.Cast(op.Constant(value_int=16), to=I32)))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_8(rows: UINT8[...], head_size: INT64[...]) -> INT32[...]:
    """Codes [B, N, S, D] of rows [B, N, S, W] that have a byte for each."""
    codes = op.Cast(plane_bytes(rows, head_size, 0, 8), to=I32)
    return codes
