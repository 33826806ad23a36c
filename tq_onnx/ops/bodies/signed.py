"""Rows of ``uniform_signed``, written and read.

Formulas: ``tq_onnx/codec/rotated.py``. The codes of an encoder count the levels of its codebook from
the lowest one; those of a row are integers in two's complement, and its scale is in steps.
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
from tq_onnx.ops.bodies.search import best_codes, fed_codes, fed_scales
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
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = plain_scales(norms, rotated, quantised, norm_correction, -1.0)
    rows = packed_integers(codes, scales, centroids, bits)
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
    """The same with the best of several gains."""
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    codes = best_codes(rotated, centroids, boundaries, gains, -1.0)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = plain_scales(norms, rotated, quantised, norm_correction, -1.0)
    rows = packed_integers(codes, scales, centroids, bits)
    return rows


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
    codes = fed_codes(unit, centroids, boundaries, gains, feedback, -1.0)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = fed_scales(norms, unit, quantised, feedback, norm_correction, -1.0)
    rows = packed_integers(codes, scales, centroids, bits)
    return rows


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
def integers_of_3_bits(rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W], without their scale."""
    coordinates = integers_of(unpack_codes_3(rows, head_size), 3)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def integers_of_4_bits(rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...]) -> FLOAT[...]:
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
        Reader(_INTEGERS[codec.bits], float_field, bits),
    )


PIECES: Final[Mapping[str, Pieces]] = {UNIFORM_SIGNED: _signed}
"""The pieces of the kind of this module."""
