"""Rows of the kinds that neither rotate nor have a codebook: ``uniform``, ``q8_0``, ``fp8_e4m3``.

Formulas: ``tq_onnx/codec/unrotated.py`` and ``tq_onnx/codec/fp8.py``. A row with an element that is
not finite is encoded as the zero vector. Reductions to a maximum are written as TopK, which has
meant one thing since opset 11.

Attention reads these rows as the vectors that they stand for, fields and all.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import numpy_helper
from onnxscript import BOOL, FLOAT, INT32, INT64, UINT8, script

from tq_onnx.codec.fp8 import FP8_MAX, VALUES
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK, UNIFORM
from tq_onnx.ops.bodies import F32, I32, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.elements import is_negative, magnitude_bits
from tq_onnx.ops.bodies.half import finite_or_zero, half_bytes, half_field, half_values
from tq_onnx.ops.bodies.pieces import Pieces, Reader, Writer
from tq_onnx.ops.bodies.planes import (
    pack_codes,
    unpack_codes_2,
    unpack_codes_3,
    unpack_codes_4,
    unpack_codes_8,
)

_LARGEST: Final = 3.4028234663852886e38
_FP8_VALUES: Final = [float(value) for value in VALUES]
_FP8_MAX: Final = FP8_MAX
_BLOCK: Final = Q8_0_BLOCK
_BLOCKS: Final = [0, 0, 0, -1, Q8_0_BLOCK]

# As a tensor: shape inference up to onnxruntime 1.24 takes value_ints for a TopK of no size.
_ONE: Final = numpy_helper.from_array(np.ones(1, np.int64))


@script(TURBOQUANT, default_opset=op)
def row_is_finite(vectors: FLOAT[...]) -> BOOL[...]:
    """Whether all elements of vectors [B, N, T, D] are finite: [B, N, T, 1]."""
    # Comparisons with NaN are false.
    good = op.LessOrEqual(op.Abs(vectors), op.Constant(value_float=_LARGEST))
    bad = op.Cast(op.Not(good), to=F32)
    count = op.ReduceSum(bad, op.Constant(value_ints=[-1]), keepdims=1)
    finite = op.Equal(count, op.Constant(value_float=0.0))
    return finite


@script(TURBOQUANT, default_opset=op)
def finite_rows(vectors: FLOAT[...]) -> FLOAT[...]:
    """Vectors, with zeros for those that are not finite."""
    clean = op.Where(row_is_finite(vectors), vectors, op.Constant(value_float=0.0))
    return clean


@script(TURBOQUANT, default_opset=op)
def uniform_rows(vectors: FLOAT[...], bits: int) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: planes of the codes, step, smallest coordinate."""
    one = op.Constant(value=_ONE)
    two = op.Constant(value_float=2.0)
    # Half of everything: the largest less the smallest coordinate may be more than float32 has.
    halves = op.Mul(finite_rows(vectors), op.Constant(value_float=0.5))
    high, _ = op.TopK(halves, one, axis=-1, largest=1)
    low, _ = op.TopK(halves, one, axis=-1, largest=0)
    levels = op.Pow(two, op.Cast(op.Constant(value_int=bits), to=F32))
    top = op.Sub(levels, op.Constant(value_float=1.0))
    scale = op.Div(op.Sub(high, low), top)
    positive = op.Greater(scale, op.Constant(value_float=0.0))
    divisor = op.Where(positive, scale, op.Constant(value_float=1.0))
    codes = op.Min(op.Round(op.Div(op.Sub(halves, low), divisor)), top)
    fields = op.Mul(op.Concat(scale, low, axis=-1), two)
    rows = op.Concat(pack_codes(codes, bits), half_bytes(fields), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def uniform_values(
    codes: INT32[...], rows: UINT8[...], head_size: INT64[...], bits: int
) -> FLOAT[...]:
    """Vectors [B, N, S, D] of codes and the fields of their rows: scale * code + zero."""
    last = op.Constant(value_ints=[-1])
    scales = finite_or_zero(half_field(rows, head_size, bits, 0))
    zeros = finite_or_zero(half_field(rows, head_size, bits, 2))
    steps = op.Mul(op.Cast(codes, to=F32), op.Unsqueeze(scales, last))
    values = op.Add(steps, op.Unsqueeze(zeros, last))
    return values


@script(TURBOQUANT, default_opset=op)
def uniform_of_2_bits(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, S, D] of rows [B, N, S, W] of two-bit codes."""
    coordinates = uniform_values(unpack_codes_2(rows, head_size), rows, head_size, 2)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def uniform_of_3_bits(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, S, D] of rows [B, N, S, W] of three-bit codes."""
    coordinates = uniform_values(unpack_codes_3(rows, head_size), rows, head_size, 3)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def uniform_of_4_bits(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, S, D] of rows [B, N, S, W] of four-bit codes."""
    coordinates = uniform_values(unpack_codes_4(rows, head_size), rows, head_size, 4)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def number_of_blocks(head_size: INT64[...]) -> INT64[...]:
    """Blocks of 32 coordinates that a vector has, the last one perhaps not full."""
    block = op.Constant(value_int=_BLOCK)
    rounded_up = op.Sub(op.Add(head_size, block), op.Constant(value_int=1))
    count = op.Div(rounded_up, block)
    return count


@script(TURBOQUANT, default_opset=op)
def blocks_of(vectors: FLOAT[...]) -> FLOAT[...]:
    """Vectors [B, N, T, D] as blocks [B, N, T, n, 32], the last one filled up with zeros."""
    size = op.Shape(vectors, start=3)
    full = op.Mul(number_of_blocks(size), op.Constant(value_int=_BLOCK))
    room_shape = op.Concat(op.Shape(vectors, start=0, end=3), op.Sub(full, size), axis=0)
    room = op.Expand(op.Constant(value_float=0.0), room_shape)
    blocks = op.Reshape(op.Concat(vectors, room, axis=-1), op.Constant(value_ints=_BLOCKS))
    return blocks


@script(TURBOQUANT, default_opset=op)
def q8_0_rows(vectors: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: a signed byte each, then a scale per block."""
    first = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    zero = op.Constant(value_float=0.0)
    flat = op.Constant(value_ints=[0, 0, 0, -1])
    blocks = blocks_of(finite_rows(vectors))
    largest, _ = op.TopK(op.Abs(blocks), op.Constant(value=_ONE), axis=-1, largest=1)
    scale = op.Div(largest, op.Constant(value_float=127.0))
    divisor = op.Where(op.Greater(scale, zero), scale, op.Constant(value_float=1.0))
    steps = op.Round(op.Div(blocks, divisor))
    negative = op.Cast(op.Less(steps, zero), to=F32)
    codes = op.Add(steps, op.Mul(negative, op.Constant(value_float=256.0)))
    stored = op.Reshape(op.Cast(codes, to=U8), flat)
    rows = op.Concat(
        op.Slice(stored, first, op.Shape(vectors, start=3), last),
        half_bytes(op.Reshape(scale, flat)),
        axis=-1,
    )
    return rows


@script(TURBOQUANT, default_opset=op)
def q8_0_values(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, S, D] of rows [B, N, S, W]."""
    first = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    codes = op.Cast(unpack_codes_8(rows, head_size), to=F32)
    negative = op.Cast(op.GreaterOrEqual(codes, op.Constant(value_float=128.0)), to=F32)
    steps = op.Sub(codes, op.Mul(negative, op.Constant(value_float=256.0)))
    scale_bytes = op.Mul(number_of_blocks(head_size), op.Constant(value_int=2))
    stored = op.Slice(rows, head_size, op.Add(head_size, scale_bytes), last)
    scales = half_values(op.Reshape(stored, op.Constant(value_ints=[0, 0, 0, -1, 2])))
    blocks = op.Mul(blocks_of(steps), op.Unsqueeze(finite_or_zero(scales), last))
    filled = op.Reshape(blocks, op.Constant(value_ints=[0, 0, 0, -1]))
    coordinates = op.Slice(filled, first, head_size, last)
    return coordinates


@script(TURBOQUANT, default_opset=op)
def fp8_rows(vectors: FLOAT[...]) -> UINT8[...]:
    """Rows [B, N, T, D] of vectors [B, N, T, D], rounded to E4M3FN, saturating."""
    magnitude = magnitude_bits(finite_rows(vectors), -6.0, 8.0, _FP8_MAX, 8)
    negative = op.And(is_negative(vectors), row_is_finite(vectors))
    sign = op.Mul(op.Cast(negative, to=I32), op.Cast(op.Constant(value_int=128), to=I32))
    rows = op.Cast(op.Add(magnitude, sign), to=U8)
    return rows


@script(TURBOQUANT, default_opset=op)
def fp8_values(rows: UINT8[...], head_size: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, S, D] of rows [B, N, S, W]; the codes of NaN are 0."""
    coordinates = op.Gather(op.Constant(value_floats=_FP8_VALUES), unpack_codes_8(rows, head_size))
    return coordinates


_UNIFORM: Final = {2: uniform_of_2_bits, 3: uniform_of_3_bits, 4: uniform_of_4_bits}


def _uniform(codec: Codec, element: str) -> tuple[Writer, Reader]:
    return Writer(uniform_rows, (), {"bits": codec.bits}), Reader(_UNIFORM[codec.bits])


def _q8_0(codec: Codec, element: str) -> tuple[Writer, Reader]:
    return Writer(q8_0_rows), Reader(q8_0_values)


def _fp8(codec: Codec, element: str) -> tuple[Writer, Reader]:
    return Writer(fp8_rows), Reader(fp8_values)


PIECES: Final[Mapping[str, Pieces]] = {UNIFORM: _uniform, Q8_0: _q8_0, FP8: _fp8}
"""The pieces of each kind of this module."""
