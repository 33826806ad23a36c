"""Rows of the kinds that rotate: ``lloyd_max``, ``u8`` and ``prod``, written and read.

Formulas: ``tq_onnx/codec/rotated.py``. A row whose norm is not finite is encoded as the zero
vector, so that one bad token cannot spoil a sequence.

Attention reads ``lloyd_max`` and ``u8`` as centroids and scales apart. A row of ``prod`` has two
scales, of its centroids and of its signs, so they are multiplied in.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from collections.abc import Mapping
from math import pi, sqrt
from typing import Final

from onnxscript import FLOAT, INT32, INT64, UINT8, script

from tq_onnx.codec import rotated as kinds
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, U8, op, search
from tq_onnx.ops.bodies.elements import float_rows, float_values
from tq_onnx.ops.bodies.half import finite_or_zero, half_bytes, half_field, half_values
from tq_onnx.ops.bodies.pieces import ALL_TABLES, Pieces, Reader, Writer
from tq_onnx.ops.bodies.planes import (
    pack_codes,
    pack_plane,
    plane_bytes,
    unpack_codes_1,
    unpack_codes_2,
    unpack_codes_3,
    unpack_codes_4,
    unpack_codes_5,
    unpack_codes_8,
    unpack_one_bit,
)
from tq_onnx.ops.bodies.unit import codes_of, directions, plain_scales, row_norms

_SIGN_SHARE: Final = sqrt(pi / 2)


@script(TURBOQUANT, default_opset=op)
def lloyd_max_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: the planes of the codes, then the scale."""
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    codes = codes_of(rotated, boundaries)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = plain_scales(norms, rotated, quantised, norm_correction)
    rows = op.Concat(pack_codes(codes, bits), half_bytes(scales), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def u8_rows(vectors: FLOAT[...], rotation: FLOAT[...], boundaries: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, D + 4] of vectors [B, N, T, D]: a byte per code, the norm as float32."""
    norms = row_norms(vectors)
    codes = codes_of(op.MatMul(directions(vectors, norms), rotation), boundaries)
    rows = op.Concat(op.Cast(codes, to=U8), float_rows(norms), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def prod_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    index_bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: planes of the index, signs of the residual's
    projection, scale, norm of the residual. The residual is that of the scale as it is stored.
    """
    last = op.Constant(value_ints=[-1])
    zero = op.Constant(value_float=0.0)
    one = op.Constant(value_ints=[1])
    size = op.Shape(vectors, start=3)
    turn = op.Slice(rotation, op.Constant(value_ints=[0]), size, one)
    projection = op.Slice(rotation, size, op.Add(size, size), one)
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), turn)
    codes = codes_of(rotated, boundaries)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    stored = half_bytes(plain_scales(norms, rotated, quantised, norm_correction))
    scales = op.Unsqueeze(half_values(stored), last)
    decoded = op.MatMul(op.Mul(quantised, scales), op.Transpose(turn, perm=[1, 0]))
    residual = op.Sub(op.Where(op.Greater(norms, zero), vectors, zero), decoded)
    signs = op.Cast(op.GreaterOrEqual(op.MatMul(residual, projection), zero), to=F32)
    length = op.Sqrt(op.ReduceSum(op.Mul(residual, residual), last, keepdims=1))
    rows = op.Concat(
        pack_codes(codes, index_bits),
        pack_plane(signs, op.Constant(value_float=1.0), op.Constant(value_float=8.0)),
        stored,
        half_bytes(length),
        axis=-1,
    )
    return rows


@script(TURBOQUANT, default_opset=op)
def centroids_of_1_bit(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of one-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_1(rows, head_size))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_2_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of two-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_2(rows, head_size))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_3_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of three-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_3(rows, head_size))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_4_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of four-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_4(rows, head_size))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_5_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of five-bit codes, without their scale."""
    coordinates = op.Gather(centroids, unpack_codes_5(rows, head_size))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def centroids_of_bytes(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] of u8, without their scale."""
    # A row that nobody wrote may hold any byte; the codebook has sixteen.
    codes = unpack_codes_8(rows, head_size)
    sixteen = op.Cast(op.Constant(value_int=16), to=I32)
    coordinates = op.Gather(centroids, op.Mod(codes, sixteen))
    return coordinates


@script(TURBOQUANT, default_opset=op)
def float_field(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """The float32 [B, N, S] behind D bytes of codes."""
    stop = op.Add(head_size, op.Constant(value_int=4))
    stored = op.Slice(rows, head_size, stop, op.Constant(value_ints=[-1]))
    values = float_values(stored, op.Constant(value_floats=[1.0, 256.0, 65536.0, 0.0]))
    return values


@script(TURBOQUANT, default_opset=op)
def prod_values(
    indices: INT32[...],
    rows: UINT8[...],
    head_size: INT64[...],
    centroids: FLOAT[...],
    index_bits: int,
    bits: int,
) -> FLOAT[...]:
    """Coordinates [B, N, S, 2*D] of rows of prod: scale times centroids, then the signs, each
    sqrt(pi/2) / D times the norm of the residual.
    """
    last = op.Constant(value_ints=[-1])
    signs = op.Cast(unpack_one_bit(plane_bytes(rows, head_size, index_bits, bits)), to=F32)
    plus_minus = op.Sub(op.Add(signs, signs), op.Constant(value_float=1.0))
    scales = finite_or_zero(half_field(rows, head_size, bits, 0))
    lengths = finite_or_zero(half_field(rows, head_size, bits, 2))
    share = op.Div(op.Constant(value_float=_SIGN_SHARE), op.Cast(head_size, to=F32))
    coordinates = op.Concat(
        op.Mul(op.Gather(centroids, indices), op.Unsqueeze(scales, last)),
        op.Mul(plus_minus, op.Unsqueeze(op.Mul(lengths, share), last)),
        axis=-1,
    )
    return coordinates


@script(TURBOQUANT, default_opset=op)
def prod_of_3_bits(rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, 2*D] of rows [B, N, S, W]: two bits of index, a sign."""
    indices = unpack_codes_2(rows, head_size)
    coordinates = prod_values(indices, rows, head_size, centroids, 2, 3)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def prod_of_4_bits(rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, 2*D] of rows [B, N, S, W]: three bits of index, a sign."""
    indices = unpack_codes_3(rows, head_size)
    coordinates = prod_values(indices, rows, head_size, centroids, 3, 4)
    return coordinates


_CENTROIDS: Final = {
    1: centroids_of_1_bit,
    2: centroids_of_2_bits,
    3: centroids_of_3_bits,
    4: centroids_of_4_bits,
    5: centroids_of_5_bits,
}
_PROD: Final = {3: prod_of_3_bits, 4: prod_of_4_bits}


def _lloyd_max(codec: Codec, element: str) -> tuple[Writer, Reader]:
    bits = {"bits": codec.bits}
    return (
        Writer(
            lloyd_max_rows,
            ALL_TABLES,
            bits,
            corrects_norm=True,
            searched=search.searched_rows,
            fed=search.fed_rows,
        ),
        Reader(_CENTROIDS[codec.bits], half_field, {**bits, "skip": 0}),
    )


def _prod(codec: Codec, element: str) -> tuple[Writer, Reader]:
    bits = {"index_bits": codec.index_bits}
    return (
        Writer(prod_rows, ALL_TABLES, bits, corrects_norm=True),
        Reader(_PROD[codec.bits]),
    )


def _u8(codec: Codec, element: str) -> tuple[Writer, Reader]:
    return Writer(u8_rows, ("rotation", "boundaries")), Reader(centroids_of_bytes, float_field)


PIECES: Final[Mapping[str, Pieces]] = {
    kinds.LLOYD_MAX: _lloyd_max,
    kinds.PROD: _prod,
    kinds.U8: _u8,
}
"""The pieces of each kind of this module."""
