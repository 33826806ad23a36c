"""Rows of ``lloyd_max`` by an encoder that searches (formulas: ``tq_onnx/codec/search.py``).

Without error feedback the gains are tried one after the other, so that no more is kept than the
best codes so far. With it all gains go through the coordinates together, one coordinate after the
other, as a batch that is so many times larger.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from onnxscript import FLOAT, UINT8, script

from tq_onnx.ops.bodies import I32, TURBOQUANT, op
from tq_onnx.ops.bodies.half import half_bytes
from tq_onnx.ops.bodies.planes import pack_codes
from tq_onnx.ops.bodies.unit import codes_of, directions, plain_scales, row_norms, row_scales


@script(TURBOQUANT, default_opset=op)
def best_codes(
    rotated: FLOAT[...], centroids: FLOAT[...], boundaries: FLOAT[...], gains: FLOAT[...]
) -> FLOAT[...]:
    """Codes [B, N, T, D] of the gain whose centroids c have the largest <u, c>^2 / <c, c>, of
    rotated unit vectors u [B, N, T, D] and gains [G]; the first of several.
    """
    last = op.Constant(value_ints=[-1])
    zero = op.Constant(value_float=0.0)
    size = op.Shape(rotated, start=3)
    end = op.Add(size, op.Constant(value_ints=[1]))
    nothing = op.Mul(rotated, zero)
    below_all = op.Sub(op.ReduceSum(nothing, last, keepdims=1), op.Constant(value_float=1.0))
    # One value is carried: onnxscript has no order of several.
    found = op.Concat(nothing, below_all, axis=-1)
    for i in range(op.Size(gains)):
        tried = codes_of(op.Mul(rotated, op.Gather(gains, i)), boundaries)
        quantised = op.Gather(centroids, op.Cast(tried, to=I32))
        along = op.Max(op.ReduceSum(op.Mul(rotated, quantised), last, keepdims=1), zero)
        square = op.ReduceSum(op.Mul(quantised, quantised), last, keepdims=1)
        worth = op.Div(op.Mul(along, along), square)
        better = op.Greater(worth, op.Slice(found, size, end, last))
        found = op.Where(better, op.Concat(tried, worth, axis=-1), found)
    best = op.Slice(found, op.Constant(value_ints=[0]), size, last)
    return best


@script(TURBOQUANT, default_opset=op)
def searched_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: the planes of the best codes, then the scale."""
    norms = row_norms(vectors)
    rotated = op.MatMul(directions(vectors, norms), rotation)
    codes = best_codes(rotated, centroids, boundaries, gains)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = plain_scales(norms, rotated, quantised, norm_correction)
    rows = op.Concat(pack_codes(codes, bits), half_bytes(scales), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def whole_steps(below: FLOAT[...]) -> FLOAT[...]:
    """Matrices [N, D, D] with each column in 127ths of its largest number, as
    ``tq_onnx/codec/feedback.py`` says.
    """
    # The largest of a column: ReduceMax got its axes in another way with opset 18.
    largest, _ = op.TopK(op.Abs(below), op.Constant(value_ints=[1]), axis=1)
    steps = op.Div(largest, op.Constant(value_float=127.0))
    is_any = op.Greater(steps, op.Constant(value_float=0.0))
    divisors = op.Where(is_any, steps, op.Constant(value_float=1.0))
    rounded = op.Mul(op.Round(op.Div(below, divisors)), steps)
    return rounded


@script(TURBOQUANT, default_opset=op)
def fed_numbers(
    rotated: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    lower: FLOAT[...],
) -> FLOAT[...]:
    """What is coded, over the gain, of rotated unit vectors u [K, N, T, D] with gains [K, 1, 1, 1]:
    a_j = u_j - sum of L_ij (c_i / g - u_i) over i > j. lower [N, D, D] is L below the diagonal.
    """
    last = op.Constant(value_ints=[-1])
    size = op.Squeeze(op.Shape(rotated, start=3))
    numbers = op.Identity(rotated)
    for i in range(size):
        # The coordinate whose turn it is, as a list of one.
        at = op.Reshape(op.Sub(op.Sub(size, op.Constant(value_int=1)), i), last)
        found = codes_of(op.Mul(op.Gather(numbers, at, axis=3), gains), boundaries)
        quantised = op.Gather(centroids, op.Cast(found, to=I32))
        error = op.Sub(op.Div(quantised, gains), op.Gather(rotated, at, axis=3))
        numbers = op.Sub(numbers, op.Mul(error, op.Gather(lower, at, axis=1)))
    return numbers


@script(TURBOQUANT, default_opset=op)
def fed_weights(feedback: FLOAT[...]) -> FLOAT[...]:
    """h [N, 1, D] of matrices L diag(h) L^T [N, D, D], which have it on the diagonal."""
    below = op.Trilu(feedback, op.Constant(value_int=-1), upper=0)
    diagonal = op.Sub(op.Trilu(feedback, op.Constant(value_int=0), upper=0), below)
    weights = op.ReduceSum(diagonal, op.Constant(value_ints=[1]), keepdims=1)
    return weights


@script(TURBOQUANT, default_opset=op)
def fed_lower(feedback: FLOAT[...]) -> FLOAT[...]:
    """L below the diagonal, as the encoder takes it, of matrices [N, D, D]."""
    lower = whole_steps(op.Trilu(feedback, op.Constant(value_int=-1), upper=0))
    return lower


@script(TURBOQUANT, default_opset=op)
def fed_codes(
    unit: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    feedback: FLOAT[...],
) -> FLOAT[...]:
    """Codes [B, N, T, D] of rotated unit vectors [B, N, T, D] with error feedback [N, D, D], of the
    best gain. Products are those of L diag(h) L^T.
    """
    last = op.Constant(value_ints=[-1])
    first = op.Constant(value_ints=[0])
    zero = op.Constant(value_float=0.0)
    weights = fed_weights(feedback)
    lower = fed_lower(feedback)
    count = op.Shape(gains)
    batch = op.Shape(unit, start=0, end=1)
    one_each = op.Concat(count, batch, axis=0)
    in_batch = op.Constant(value_ints=[-1, 1, 1, 1])
    all_gains = op.Reshape(op.Expand(op.Unsqueeze(gains, last), one_each), in_batch)
    by_gain = op.Concat(count, op.Shape(unit), axis=0)
    merged = op.Concat(op.Constant(value_ints=[-1]), op.Shape(unit, start=1), axis=0)
    units = op.Reshape(op.Expand(unit, by_gain), merged)
    numbers = fed_numbers(units, centroids, boundaries, all_gains, lower)
    all_codes = codes_of(op.Mul(numbers, all_gains), boundaries)
    quantised = op.Gather(centroids, op.Cast(all_codes, to=I32))
    turned = op.Add(unit, op.MatMul(unit, lower))
    quantised_turned = op.Reshape(op.Add(quantised, op.MatMul(quantised, lower)), by_gain)
    along = op.ReduceSum(op.Mul(quantised_turned, op.Mul(turned, weights)), last, keepdims=1)
    square = op.ReduceSum(
        op.Mul(op.Mul(quantised_turned, quantised_turned), weights), last, keepdims=1
    )
    positive = op.Max(along, zero)
    worth = op.Div(op.Mul(positive, positive), square)
    chosen = op.ArgMax(worth, axis=0, keepdims=1)
    of_all = op.Expand(chosen, op.Concat(op.Constant(value_ints=[1]), op.Shape(unit), axis=0))
    codes = op.Squeeze(op.GatherElements(op.Reshape(all_codes, by_gain), of_all, axis=0), first)
    return codes


@script(TURBOQUANT, default_opset=op)
def fed_scales(
    norms: FLOAT[...],
    unit: FLOAT[...],
    quantised: FLOAT[...],
    feedback: FLOAT[...],
    norm_correction: int,
) -> FLOAT[...]:
    """Scales [B, N, T, 1] of unit vectors and their centroids, both [B, N, T, D], with products of
    L diag(h) L^T [N, D, D].
    """
    last = op.Constant(value_ints=[-1])
    weights = fed_weights(feedback)
    lower = fed_lower(feedback)
    turned = op.Add(unit, op.MatMul(unit, lower))
    weighted = op.Mul(turned, weights)
    quantised_turned = op.Add(quantised, op.MatMul(quantised, lower))
    own = op.ReduceSum(op.Mul(weighted, turned), last, keepdims=1)
    along = op.ReduceSum(op.Mul(weighted, quantised_turned), last, keepdims=1)
    square = op.ReduceSum(
        op.Mul(op.Mul(quantised_turned, quantised_turned), weights), last, keepdims=1
    )
    scales = row_scales(norms, own, along, square, norm_correction)
    return scales


@script(TURBOQUANT, default_opset=op)
def fed_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    gains: FLOAT[...],
    feedback: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D] with error feedback [N, D, D]: the planes of the
    best codes, then the scale.
    """
    norms = row_norms(vectors)
    unit = op.MatMul(directions(vectors, norms), rotation)
    codes = fed_codes(unit, centroids, boundaries, gains, feedback)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    scales = fed_scales(norms, unit, quantised, feedback, norm_correction)
    rows = op.Concat(pack_codes(codes, bits), half_bytes(scales), axis=-1)
    return rows
