"""Rows of the kinds with two classes of coordinates, written and read.

Formulas: ``tq_onnx/codec/split.py``. A class is coded as if it were all of the vector, and then
both are put together: codes in front, scales behind. Attention reads coordinates with their scales,
as a row has two of them.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Final

from onnxscript import FLOAT, INT64, UINT8, script

from tq_onnx.codec import split as kinds
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, I32, I64, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.pieces import ALL_TABLES, Pieces, Reader, Writer
from tq_onnx.ops.bodies.planes import (
    pack_codes,
    unpack_codes_2,
    unpack_codes_3,
    unpack_codes_4,
)
from tq_onnx.ops.bodies.search import best_codes, fed_codes, fed_scales
from tq_onnx.ops.bodies.unit import directions, plain_scales, row_norms

_STEP: Final = log(2) / kinds.STEPS_PER_OCTAVE
_USUAL: Final = float(kinds.USUAL_SCALE)
_LOWEST: Final = float(kinds.LOWEST_STEP)
_LARGEST: Final = float(kinds.LARGEST_SCALE)


@script(TURBOQUANT, default_opset=op)
def first_size(head_size: INT64[...], eighths: int) -> INT64[...]:
    """Coordinates [1] of the first class of head_size [1] ones."""
    eight = op.Constant(value_int=8)
    shares = op.Mul(op.Div(head_size, eight), op.Constant(value_int=eighths))
    size = op.Mul(op.Div(op.Add(shares, op.Constant(value_int=7)), eight), eight)
    return size


@script(TURBOQUANT, default_opset=op)
def before(numbers: FLOAT[...], end: INT64[...]) -> FLOAT[...]:
    """The numbers [..., end] of numbers [..., L]."""
    first = op.Slice(numbers, op.Constant(value_ints=[0]), end, op.Constant(value_ints=[-1]))
    return first


@script(TURBOQUANT, default_opset=op)
def behind(numbers: FLOAT[...], begin: INT64[...]) -> FLOAT[...]:
    """The numbers [..., L - begin] of numbers [..., L]."""
    far = op.Constant(value_ints=[9223372036854775807])
    last = op.Slice(numbers, begin, far, op.Constant(value_ints=[-1]))
    return last


@script(TURBOQUANT, default_opset=op)
def levels_of(bits: int) -> INT64[...]:
    """Centroids [1] of so many bits."""
    two = op.Constant(value_floats=[2.0])
    power = op.Pow(two, op.Cast(op.Constant(value_int=bits), to=F32))
    levels = op.Cast(power, to=I64)
    return levels


@script(TURBOQUANT, default_opset=op)
def step_bytes(scales: FLOAT[...]) -> UINT8[...]:
    """Scales [B, N, T, 1] as steps of a byte; 0 for what is nearer to 0."""
    zero = op.Constant(value_float=0.0)
    is_positive = op.Greater(scales, zero)
    logarithms = op.Log(op.Where(is_positive, scales, op.Constant(value_float=1.0)))
    steps = op.Round(op.Div(logarithms, op.Constant(value_float=_STEP)))
    places = op.Add(steps, op.Constant(value_float=_USUAL))
    large = op.GreaterOrEqual(places, op.Constant(value_float=_LOWEST))
    usable = op.And(is_positive, large)
    lowest = op.Max(places, op.Constant(value_float=1.0))
    kept = op.Min(lowest, op.Constant(value_float=_LARGEST))
    stored = op.Cast(op.Where(usable, kept, zero), to=U8)
    return stored


@script(TURBOQUANT, default_opset=op)
def step_scales(rows: UINT8[...], at: INT64[...]) -> FLOAT[...]:
    """Scales [B, N, S, 1] of the steps in byte ``at`` [1] of rows [B, N, S, W]."""
    end = op.Add(at, op.Constant(value_ints=[1]))
    steps = op.Cast(op.Slice(rows, at, end, op.Constant(value_ints=[-1])), to=F32)
    zero = op.Constant(value_float=0.0)
    exponents = op.Sub(steps, op.Constant(value_float=_USUAL))
    powers = op.Exp(op.Mul(exponents, op.Constant(value_float=_STEP)))
    scales = op.Where(op.Greater(steps, zero), powers, zero)
    return scales


@script(TURBOQUANT, default_opset=op)
def searched_class(
    norms: FLOAT[...],
    rotated: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows of a class: its coordinates [B, N, T, n] of unit vectors with these norms to the planes
    of the codes of the best gain, then a byte of scale.
    """
    lengths = row_norms(rotated)
    unit = directions(rotated, lengths)
    codes = best_codes(unit, centroids, boundaries, gains)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = plain_scales(op.Mul(norms, lengths), unit, quantised, norm_correction)
    rows = op.Concat(pack_codes(codes, bits), step_bytes(scales), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def fed_class(
    norms: FLOAT[...],
    rotated: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    feedback: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """The same with error feedback [N, n, n] inside the class."""
    lengths = row_norms(rotated)
    unit = directions(rotated, lengths)
    codes = fed_codes(unit, centroids, boundaries, gains, feedback)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = fed_scales(op.Mul(norms, lengths), unit, quantised, feedback, norm_correction)
    rows = op.Concat(pack_codes(codes, bits), step_bytes(scales), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def both_classes(first: UINT8[...], second: UINT8[...]) -> UINT8[...]:
    """Rows of both classes as one: codes of the first, codes of the second, both scales."""
    begin = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    far = op.Constant(value_ints=[9223372036854775807])
    rows = op.Concat(
        op.Slice(first, begin, last, last),
        op.Slice(second, begin, last, last),
        op.Slice(first, last, far, last),
        op.Slice(second, last, far, last),
        axis=-1,
    )
    return rows


@script(TURBOQUANT, default_opset=op)
def split_searched_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    bits: int,
    eighths: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D], which are multiplied with matrices [N, D, D], each
    class with the best of several gains.
    """
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    size = first_size(op.Shape(vectors, start=3), eighths)
    levels = levels_of(bits)
    below = op.Sub(levels, op.Constant(value_ints=[1]))
    first = searched_class(
        norms,
        before(rotated, size),
        before(centroids, levels),
        before(boundaries, below),
        gains,
        bits,
        norm_correction,
    )
    second = searched_class(
        norms,
        behind(rotated, size),
        behind(centroids, levels),
        behind(boundaries, below),
        gains,
        2,
        norm_correction,
    )
    rows = both_classes(first, second)
    return rows


@script(TURBOQUANT, default_opset=op)
def split_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    bits: int,
    eighths: int,
    norm_correction: int,
) -> UINT8[...]:
    """The same without a search."""
    one = op.Constant(value_floats=[1.0])
    rows = split_searched_rows(
        vectors, rotation, centroids, boundaries, one, bits, eighths, norm_correction
    )
    return rows


@script(TURBOQUANT, default_opset=op)
def split_fed_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    feedback: FLOAT[...],
    bits: int,
    eighths: int,
    norm_correction: int,
) -> UINT8[...]:
    """The same with a search and error feedback [N, D, D], of which each class takes its block."""
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    size = first_size(op.Shape(vectors, start=3), eighths)
    levels = levels_of(bits)
    below = op.Sub(levels, op.Constant(value_ints=[1]))
    rest = op.Constant(value_ints=[1])
    far = op.Constant(value_ints=[9223372036854775807])
    upper = op.Slice(feedback, op.Constant(value_ints=[0]), size, rest)
    lower = op.Slice(feedback, size, far, rest)
    first = fed_class(
        norms,
        before(rotated, size),
        before(centroids, levels),
        before(boundaries, below),
        gains,
        before(upper, size),
        bits,
        norm_correction,
    )
    second = fed_class(
        norms,
        behind(rotated, size),
        behind(centroids, levels),
        behind(boundaries, below),
        gains,
        behind(lower, size),
        2,
        norm_correction,
    )
    rows = both_classes(first, second)
    return rows


@script(TURBOQUANT, default_opset=op)
def class_bytes(size: INT64[...], bits: int) -> INT64[...]:
    """Bytes [1] of the codes of so many coordinates [1]."""
    count = op.Div(op.Mul(size, op.Constant(value_int=bits)), op.Constant(value_int=8))
    return count


@script(TURBOQUANT, default_opset=op)
def behind_codes(
    rows: UINT8[...],
    first: FLOAT[...],
    head_size: INT64[...],
    centroids: FLOAT[...],
    bits: int,
    eighths: int,
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W] whose first class is ``first``, without its
    scale.
    """
    size = first_size(head_size, eighths)
    others = op.Sub(head_size, size)
    begin = class_bytes(size, bits)
    scales_at = op.Add(begin, class_bytes(others, 2))
    planes = op.Slice(rows, begin, scales_at, op.Constant(value_ints=[-1]))
    second = op.Gather(behind(centroids, levels_of(bits)), unpack_codes_2(planes, others))
    coordinates = op.Concat(
        op.Mul(first, step_scales(rows, scales_at)),
        op.Mul(second, step_scales(rows, op.Add(scales_at, op.Constant(value_ints=[1])))),
        axis=-1,
    )
    return coordinates


@script(TURBOQUANT, default_opset=op)
def split_of_3_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...], eighths: int
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W]: three bits in the first class."""
    first = op.Gather(
        before(centroids, levels_of(3)), unpack_codes_3(rows, first_size(head_size, eighths))
    )
    coordinates = behind_codes(rows, first, head_size, centroids, 3, eighths)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def split_of_4_bits(
    rows: UINT8[...], head_size: INT64[...], centroids: FLOAT[...], eighths: int
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of rows [B, N, S, W]: four bits in the first class."""
    first = op.Gather(
        before(centroids, levels_of(4)), unpack_codes_4(rows, first_size(head_size, eighths))
    )
    coordinates = behind_codes(rows, first, head_size, centroids, 4, eighths)
    return coordinates


_SPLIT: Final = {3: split_of_3_bits, 4: split_of_4_bits}


def _split(codec: Codec, element: str) -> tuple[Writer, Reader]:
    eighths = {"eighths": codec.record.first_eighths}
    return (
        Writer(
            split_rows,
            ALL_TABLES,
            {"bits": codec.bits, **eighths},
            corrects_norm=True,
            searched=split_searched_rows,
            fed=split_fed_rows,
        ),
        Reader(_SPLIT[codec.bits], forms=eighths),
    )


PIECES: Final[Mapping[str, Pieces]] = {kind.name: _split for kind in kinds.KINDS}
"""The pieces of each kind of this module."""
