"""Rows of ``uniform_signed``, written and read.

Formulas: ``tq_onnx/codec/rotated.py``. The codes of an encoder count the levels of its codebook
from the lowest one; those of a row are integers in two's complement, and its scale is in steps.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxscript import FLOAT, INT32, INT64, UINT8, script

from tq_onnx.codec.rotated import UNIFORM_SIGNED
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, op
from tq_onnx.ops.bodies.elements import float_rows
from tq_onnx.ops.bodies.pieces import ALL_TABLES, Pieces, Reader, Writer
from tq_onnx.ops.bodies.planes import pack_codes, unpack_codes_3, unpack_codes_4
from tq_onnx.ops.bodies.rotated import float_field
from tq_onnx.ops.bodies.search import (
    best_codes,
    fed_codes,
    fed_lower,
    fed_scales,
    fed_weights,
)
from tq_onnx.ops.bodies.unit import codes_of, directions, plain_scales, row_norms


@script(TURBOQUANT, default_opset=op)
def packed_integers(
    codes: FLOAT[...], scales: FLOAT[...], centroids: FLOAT[...], bits: int
) -> UINT8[...]:
    """Rows [B, N, T, W] of codes [B, N, T, D] and scales [B, N, T, 1] of the centroids."""
    two = op.Constant(value_float=2.0)
    levels = op.Pow(two, op.Cast(op.Constant(value_int=bits), to=F32))
    half = op.Div(levels, two)
    stored = op.Where(op.Less(codes, half), op.Add(codes, half), op.Sub(codes, half))
    step = op.Gather(centroids, op.Cast(op.Add(half, op.Constant(value_float=1.0)), to=I32))
    rows = op.Concat(pack_codes(stored, bits), float_rows(op.Mul(scales, step)), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def signs_of(along: FLOAT[...]) -> FLOAT[...]:
    """-1 where products <u, c> are negative, otherwise 1."""
    plus = op.Constant(value_float=1.0)
    signs = op.Where(op.Less(along, op.Constant(value_float=0.0)), op.Neg(plus), plus)
    return signs


@script(TURBOQUANT, default_opset=op)
def worth_of(along: FLOAT[...], square: FLOAT[...]) -> FLOAT[...]:
    """What codes are chosen by, <u, c>^2 / <c, c>; 0 for codes that are all 0."""
    worth = op.Div(op.Mul(along, along), op.Max(square, op.Constant(value_float=1e-30)))
    return worth


@script(TURBOQUANT, default_opset=op)
def gains_up(gains: FLOAT[...]) -> FLOAT[...]:
    """The gains above 0."""
    positive = op.Compress(gains, op.Greater(gains, op.Constant(value_float=0.0)), axis=0)
    return positive


@script(TURBOQUANT, default_opset=op)
def zeros_without_norm(codes: FLOAT[...], norms: FLOAT[...], bits: int) -> FLOAT[...]:
    """Codes of rotated vectors; of those without a norm the codes of 0."""
    two = op.Constant(value_float=2.0)
    levels = op.Pow(two, op.Cast(op.Constant(value_int=bits), to=F32))
    is_zero = op.LessOrEqual(norms, op.Constant(value_float=0.0))
    settled = op.Where(is_zero, op.Div(levels, two), codes)
    return settled


@script(TURBOQUANT, default_opset=op)
def packed_best(
    norms: FLOAT[...],
    rotated: FLOAT[...],
    codes: FLOAT[...],
    centroids: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows of codes [B, N, T, D] of rotated unit vectors, with scales of either sign."""
    last = op.Constant(value_ints=[-1])
    settled = zeros_without_norm(codes, norms, bits)
    quantised = op.Gather(centroids, op.Cast(settled, to=I32))
    signs = signs_of(op.ReduceSum(op.Mul(rotated, quantised), last, keepdims=1))
    scales = plain_scales(norms, rotated, op.Mul(quantised, signs), norm_correction)
    rows = packed_integers(settled, op.Mul(scales, signs), centroids, bits)
    return rows


@script(TURBOQUANT, default_opset=op)
def signed_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D] without a search."""
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    codes = codes_of(rotated, boundaries)
    rows = packed_best(norms, rotated, codes, centroids, bits, norm_correction)
    return rows


@script(TURBOQUANT, default_opset=op)
def signed_searched_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """The same with the best of several gains; one below 0 codes the negative of a vector."""
    last = op.Constant(value_ints=[-1])
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    plus = best_codes(rotated, centroids, boundaries, gains_up(gains))
    minus = best_codes(op.Neg(rotated), centroids, boundaries, gains_up(op.Neg(gains)))
    up = op.Gather(centroids, op.Cast(plus, to=I32))
    down = op.Gather(centroids, op.Cast(minus, to=I32))
    along_up = op.ReduceSum(op.Mul(rotated, up), last, keepdims=1)
    along_down = op.ReduceSum(op.Mul(rotated, down), last, keepdims=1)
    square_up = op.ReduceSum(op.Mul(up, up), last, keepdims=1)
    square_down = op.ReduceSum(op.Mul(down, down), last, keepdims=1)
    better = op.Greater(worth_of(along_down, square_down), worth_of(along_up, square_up))
    codes = op.Where(better, minus, plus)
    rows = packed_best(norms, rotated, codes, centroids, bits, norm_correction)
    return rows


@script(TURBOQUANT, default_opset=op)
def fed_products(left: FLOAT[...], right: FLOAT[...], feedback: FLOAT[...]) -> FLOAT[...]:
    """Products <a, b> [B, N, T, 1] of vectors [B, N, T, D], with L diag(h) L^T [N, D, D]."""
    lower = fed_lower(feedback)
    weighted = op.Mul(op.Add(left, op.MatMul(left, lower)), fed_weights(feedback))
    turned = op.Add(right, op.MatMul(right, lower))
    products = op.ReduceSum(op.Mul(weighted, turned), op.Constant(value_ints=[-1]), keepdims=1)
    return products


@script(TURBOQUANT, default_opset=op)
def signed_fed_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    feedback: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """The same with error feedback [N, D, D]."""
    norms = row_norms(vectors)
    unit = op.MatMul(directions(vectors, norms), rotation)
    plus = fed_codes(unit, centroids, boundaries, gains_up(gains), feedback)
    mirrored = op.Neg(unit)
    minus = fed_codes(mirrored, centroids, boundaries, gains_up(op.Neg(gains)), feedback)
    up = op.Gather(centroids, op.Cast(plus, to=I32))
    down = op.Gather(centroids, op.Cast(minus, to=I32))
    better = op.Greater(
        worth_of(fed_products(unit, down, feedback), fed_products(down, down, feedback)),
        worth_of(fed_products(unit, up, feedback), fed_products(up, up, feedback)),
    )
    codes = zeros_without_norm(op.Where(better, minus, plus), norms, bits)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    signs = signs_of(fed_products(unit, quantised, feedback))
    scales = fed_scales(norms, unit, op.Mul(quantised, signs), feedback, norm_correction)
    rows = packed_integers(codes, op.Mul(scales, signs), centroids, bits)
    return rows


@script(TURBOQUANT, default_opset=op)
def float_behind(rows: UINT8[...], head_size: INT64[...], bits: int) -> FLOAT[...]:
    """The float32 [B, N, S] behind codes of so many bits."""
    start = op.Div(op.Mul(head_size, op.Constant(value_int=bits)), op.Constant(value_int=8))
    values = float_field(rows, start)
    return values


@script(TURBOQUANT, default_opset=op)
def integers_of(codes: INT32[...], bits: int) -> FLOAT[...]:
    """Integers of codes in two's complement."""
    two = op.Constant(value_float=2.0)
    levels = op.Pow(two, op.Cast(op.Constant(value_int=bits), to=F32))
    numbers = op.Cast(codes, to=F32)
    is_negative = op.GreaterOrEqual(numbers, op.Div(levels, two))
    integers = op.Where(is_negative, op.Sub(numbers, levels), numbers)
    return integers


@script(TURBOQUANT, default_opset=op)
def integers_of_3_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W], without their scale."""
    coordinates = integers_of(unpack_codes_3(rows, head_size), 3)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def integers_of_4_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W], without their scale."""
    coordinates = integers_of(unpack_codes_4(rows, head_size), 4)
    return coordinates


_INTEGERS: Final = {3: integers_of_3_bits, 4: integers_of_4_bits}


def _signed(codec: Codec, element: str) -> tuple[Writer, Reader]:
    bits = {"bits": codec.bits}
    return (
        Writer(
            signed_rows,
            ALL_TABLES,
            bits,
            corrects_norm=True,
            searched=signed_searched_rows,
            fed=signed_fed_rows,
        ),
        Reader(_INTEGERS[codec.bits], float_behind, bits),
    )


PIECES: Final[Mapping[str, Pieces]] = {UNIFORM_SIGNED: _signed}
"""The pieces of the kind of this module."""
