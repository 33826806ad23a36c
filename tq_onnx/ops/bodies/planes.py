"""Codes to and from bit planes (layout: ``tq_onnx/codec/spec.py``).

A plane of ``w`` bits puts ``k = 8 / w`` coordinates into a byte: viewed as ``[k, n]``, ``n = D/k``,
the coordinates of one byte stand in one column. Packing is a weighted sum over the columns,
unpacking a shift and a mask per row of that view.

Packing serves every number of bits by one body, driven by the attribute, because a model may store
keys and values with different codecs and carries only one encoder. Unpacking runs over the whole
cache, so it is written out per number of bits, with nothing to skip at run time.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import FLOAT, INT32, UINT8, script

from tq_onnx.codec.spec import SCALE_BYTES
from tq_onnx.ops.bodies import F32, I32, I64, TURBOQUANT, U8, op

_SCALE_START: Final = -SCALE_BYTES


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
    """Planes of codes [B, N, T, D]: a plane of 2 or 4 bits, and one of 1 bit if bits is odd."""
    number_of_bits = op.Cast(op.Constant(value_int=bits), to=F32)
    two = op.Constant(value_float=2.0)
    low_width = op.Mul(op.Floor(op.Div(number_of_bits, two)), two)
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
def code_bytes(rows: UINT8[...]) -> UINT8[...]:
    """Rows [B, N, S, W] without their scale."""
    codes = op.Slice(
        rows,
        op.Constant(value_ints=[0]),
        op.Constant(value_ints=[_SCALE_START]),
        op.Constant(value_ints=[-1]),
    )
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_4(rows: UINT8[...]) -> INT32[...]:
    """Four-bit codes [B, N, S, D] of rows [B, N, S, W]."""
    last = op.Constant(value_ints=[-1])
    to_top = op.Cast(op.Unsqueeze(op.Constant(value_ints=[4, 0]), last), to=U8)
    to_bottom = op.Cast(op.Constant(value_int=4), to=U8)
    codes = op.Cast(unpack_plane(code_bytes(rows), to_top, to_bottom), to=I32)
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
def unpack_one_bit(plane: UINT8[...]) -> INT32[...]:
    """A plane [B, N, S, D/8] of bits as [B, N, S, D]."""
    last = op.Constant(value_ints=[-1])
    shifts = op.Constant(value_ints=[7, 6, 5, 4, 3, 2, 1, 0])
    to_top = op.Cast(op.Unsqueeze(shifts, last), to=U8)
    to_bottom = op.Cast(op.Constant(value_int=7), to=U8)
    codes = op.Cast(unpack_plane(plane, to_top, to_bottom), to=I32)
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_2(rows: UINT8[...]) -> INT32[...]:
    """Two-bit codes [B, N, S, D] of rows [B, N, S, W]."""
    codes = unpack_two_bits(code_bytes(rows))
    return codes


@script(TURBOQUANT, default_opset=op)
def unpack_codes_3(rows: UINT8[...]) -> INT32[...]:
    """Three-bit codes [B, N, S, D]: two thirds of the bytes are a plane of the two lower bits."""
    last = op.Constant(value_ints=[-1])
    planes = code_bytes(rows)
    size = op.Shape(planes, start=3)
    low_size = op.Sub(size, op.Div(size, op.Constant(value_ints=[3])))
    low = unpack_two_bits(op.Slice(planes, op.Constant(value_ints=[0]), low_size, last))
    high = unpack_one_bit(op.Slice(planes, low_size, size, last))
    four = op.Cast(op.Constant(value_int=4), to=I32)
    codes = op.Add(low, op.Mul(high, four))
    return codes


@script(TURBOQUANT, default_opset=op)
def centroids_of_4_bits(rows: UINT8[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of four-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_4(rows))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_3_bits(rows: UINT8[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of three-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_3(rows))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_2_bits(rows: UINT8[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of two-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_2(rows))
    return coordinates
