"""Unit vectors, their codes and the scales of their rows: what all rows that rotate begin with."""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import FLOAT, script

from tq_onnx.ops.bodies import F32, TURBOQUANT, op

_LARGEST: Final = 3.4028234663852886e38


@script(TURBOQUANT, default_opset=op)
def row_norms(vectors: FLOAT[...]) -> FLOAT[...]:
    """Norms [B, N, T, 1] of vectors [B, N, T, D]; 0 where they are not finite."""
    squares = op.ReduceSum(op.Mul(vectors, vectors), op.Constant(value_ints=[-1]), keepdims=1)
    # Comparisons with NaN are false: NaN, Inf and overflow all fail this one.
    usable = op.LessOrEqual(squares, op.Constant(value_float=_LARGEST))
    norms = op.Sqrt(op.Where(usable, squares, op.Constant(value_float=0.0)))
    return norms


@script(TURBOQUANT, default_opset=op)
def directions(vectors: FLOAT[...], norms: FLOAT[...]) -> FLOAT[...]:
    """Vectors of norm 1; zeros where the norm is 0."""
    zero = op.Constant(value_float=0.0)
    usable = op.Greater(norms, zero)
    divisors = op.Where(usable, norms, op.Constant(value_float=1.0))
    unit = op.Where(usable, op.Div(vectors, divisors), zero)
    return unit


@script(TURBOQUANT, default_opset=op)
def codes_of(numbers: FLOAT[...], boundaries: FLOAT[...]) -> FLOAT[...]:
    """Codes [B, N, T, D] of numbers [B, N, T, D]: how many boundaries each one reaches."""
    levels_first = op.Reshape(boundaries, op.Constant(value_ints=[-1, 1, 1, 1, 1]))
    reached = op.Cast(op.GreaterOrEqual(numbers, levels_first), to=F32)
    codes = op.ReduceSum(reached, op.Constant(value_ints=[0]), keepdims=0)
    return codes


@script(TURBOQUANT, default_opset=op)
def row_scales(
    norms: FLOAT[...],
    own: FLOAT[...],
    along: FLOAT[...],
    square: FLOAT[...],
    norm_correction: int,
) -> FLOAT[...]:
    """Scales [B, N, T, 1] of unit vectors u and centroids c, own = <u, u>, along = <u, c>,
    square = <c, c>. With norm correction 1 they keep the norm, with 2 the product with u, which is
    given up where it is not positive; with 0 they are the norms.
    """
    zero = op.Constant(value_float=0.0)
    one = op.Constant(value_float=1.0)
    kind = op.Constant(value_int=norm_correction)
    unbiased = op.Equal(kind, op.Constant(value_int=2))
    usable = op.And(op.Greater(norms, zero), op.Or(op.Not(unbiased), op.Greater(along, zero)))
    of_length = op.Sqrt(op.Div(square, op.Where(usable, own, one)))
    of_product = op.Div(along, op.Where(usable, own, one))
    corrected = op.Where(unbiased, of_product, of_length)
    plain = op.Equal(kind, op.Constant(value_int=0))
    divisors = op.Where(op.And(usable, op.Not(plain)), corrected, one)
    scales = op.Where(usable, op.Div(norms, divisors), zero)
    return scales


@script(TURBOQUANT, default_opset=op)
def plain_scales(
    norms: FLOAT[...], rotated: FLOAT[...], quantised: FLOAT[...], norm_correction: int
) -> FLOAT[...]:
    """Scales [B, N, T, 1] of rotated unit vectors and their centroids, both [B, N, T, D]."""
    last = op.Constant(value_ints=[-1])
    one = op.Constant(value_float=1.0)
    along = op.ReduceSum(op.Mul(rotated, quantised), last, keepdims=1)
    square = op.ReduceSum(op.Mul(quantised, quantised), last, keepdims=1)
    scales = row_scales(norms, one, along, square, norm_correction)
    return scales
