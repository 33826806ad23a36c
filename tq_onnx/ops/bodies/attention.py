"""Pieces of TurboQuantDequantAttention: attention that never un-rotates a key or a value.

With R orthogonal, ``q . (s c[idx] R^T) = s (q R) . c[idx]``: the query is rotated once and the keys
stay as centroids; likewise the weighted sum of value centroids is un-rotated once, at the end.
Scales multiply scores and weights, not vectors; offsets come back as scores and as sums of their
own (``tq_onnx.ops.bodies.offsets``). What a mask hides is replaced, never multiplied by
zero: a hidden key contributes nothing even where its bytes are garbage.

What a codec makes of a row comes in as its coordinates (in the rotated space, if there is one) and
its scale; ``tq_onnx.ops.bodies.codecs`` says which function reads which codec.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import BOOL, FLOAT, INT64, UINT8, script

from tq_onnx.ops.bodies import BOOLEAN, F32, TURBOQUANT, op

_LOWEST: Final = -3.4028234663852886e38

# Lowest finite values of float32, bfloat16 and float16.
_LOWEST_OF_TYPES: Final = [_LOWEST, -3.3895313892515355e38, -65504.0]


@script(TURBOQUANT, default_opset=op)
def total_length(query: FLOAT[...], past_length: INT64[...]) -> INT64[...]:
    """Cached tokens of the longest sequence, the new ones included, as a tensor of one element."""
    longest = op.ReduceMax(past_length, keepdims=1)
    total = op.Add(longest, op.Shape(query, start=2, end=3))
    return total


@script(TURBOQUANT, default_opset=op)
def live_rows(cache: UINT8[...], total: INT64[...]) -> UINT8[...]:
    """The first total rows of every sequence and head of a cache [B, N, S, W]."""
    rows = op.Slice(cache, op.Constant(value_ints=[0]), total, op.Constant(value_ints=[2]))
    return rows


@script(TURBOQUANT, default_opset=op)
def live_bias(bias: FLOAT[...], total: INT64[...]) -> FLOAT[...]:
    """The first total columns of a bias; the one column of a bias that has no more."""
    columns = op.Slice(bias, op.Constant(value_ints=[0]), total, op.Constant(value_ints=[3]))
    return columns


@script(TURBOQUANT, default_opset=op)
def visible_keys(
    query: FLOAT[...],
    past_length: INT64[...],
    total: INT64[...],
    causal: int,
    sliding_window: int,
) -> BOOL[...]:
    """Which keys each query sees by position: [B or 1, 1, T, total].

    Query t stands at p = past_length + t. Key s is visible iff it exists (s < past_length + T), is
    not in the future (s <= p, when causal) and is within the window (p - s < window, when set).
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    new = op.Squeeze(op.Shape(query, start=2, end=3))
    steps = op.Unsqueeze(op.Range(zero, new, one), op.Constant(value_ints=[1]))
    past = op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1, 1]))
    positions = op.Add(past, steps)
    newest_cached = op.Sub(op.Add(past, new), one)
    newest = op.Where(op.Cast(op.Constant(value_int=causal), to=BOOLEAN), positions, newest_cached)
    keys = op.Range(zero, op.Squeeze(total), one)
    window = op.Constant(value_int=sliding_window)
    unlimited = op.Constant(value_int=9223372036854775807)
    reach = op.Where(op.Greater(window, zero), window, unlimited)
    visible = op.And(
        op.LessOrEqual(keys, newest),
        op.Less(op.Sub(positions, keys), reach),
    )
    return visible


@script(TURBOQUANT, default_opset=op)
def behind_padding(left_padding: INT64[...], total: INT64[...]) -> BOOL[...]:
    """Which of total keys are no padding: [B or 1, 1, 1, total]."""
    keys = op.Range(op.Constant(value_int=0), op.Squeeze(total), op.Constant(value_int=1))
    first = op.Reshape(left_padding, op.Constant(value_ints=[-1, 1, 1, 1]))
    behind = op.GreaterOrEqual(keys, first)
    return behind


@script(TURBOQUANT, default_opset=op)
def hidden_by_bias(bias: FLOAT[...]) -> BOOL[...]:
    """Where a bias is at most half of the lowest finite value of its own type.

    The lowest value is found by casting those of all three types to the type of the bias and back:
    what does not fit becomes infinite, and the lowest that stays finite is the one.
    """
    candidates = op.Cast(op.CastLike(op.Constant(value_floats=_LOWEST_OF_TYPES), bias), to=F32)
    fits = op.GreaterOrEqual(candidates, op.Constant(value_float=_LOWEST))
    finite = op.Where(fits, candidates, op.Constant(value_float=0.0))
    lowest = op.ReduceMin(finite, keepdims=1)
    half = op.Mul(lowest, op.Constant(value_float=0.5))
    hidden = op.LessOrEqual(op.Cast(bias, to=F32), half)
    return hidden


@script(TURBOQUANT, default_opset=op)
def rotated(vectors: FLOAT[...], rotation: FLOAT[...]) -> FLOAT[...]:
    """Vectors [B, H, T, D] in the rotated space: [B, H, T, C]."""
    turned = op.MatMul(vectors, rotation)
    return turned


@script(TURBOQUANT, default_opset=op)
def rotated_back(vectors: FLOAT[...], rotation: FLOAT[...]) -> FLOAT[...]:
    """Vectors [B, H, T, C] of the rotated space as they were: [B, H, T, D]."""
    turned = op.MatMul(vectors, op.Transpose(rotation, perm=[1, 0]))
    return turned


@script(TURBOQUANT, default_opset=op)
def key_scores(query: FLOAT[...], keys: FLOAT[...], scales: FLOAT[...], scale: float) -> FLOAT[...]:
    """Scores [B, H, T, S] of queries [B, H, T, C] against keys [B, N, S, C] times their scales.

    The query heads that share a key/value head are folded into the rows of one matrix product.
    """
    scaled = op.Mul(query, op.Constant(value_float=scale))
    rest = op.Constant(value_ints=[-1])
    grouped_shape = op.Concat(
        op.Shape(keys, start=0, end=2), rest, op.Shape(query, start=3), axis=0
    )
    columns = op.Transpose(keys, perm=[0, 1, 3, 2])
    products = op.MatMul(op.Reshape(scaled, grouped_shape), columns)
    plain_grouped = op.Mul(products, op.Unsqueeze(scales, op.Constant(value_ints=[2])))
    heads_shape = op.Concat(op.Shape(query, start=0, end=3), rest, axis=0)
    scores = op.Reshape(plain_grouped, heads_shape)
    return scores


@script(TURBOQUANT, default_opset=op)
def softcapped(scores: FLOAT[...], softcap: float) -> FLOAT[...]:
    """Scores, or softcap * tanh(score / softcap) if softcap is more than 0."""
    cap = op.Constant(value_float=softcap)
    has_cap = op.Greater(cap, op.Constant(value_float=0.0))
    divisor = op.Where(has_cap, cap, op.Constant(value_float=1.0))
    capped = op.Where(has_cap, op.Mul(cap, op.Tanh(op.Div(scores, divisor))), scores)
    return capped


@script(TURBOQUANT, default_opset=op)
def masked_softmax(scores: FLOAT[...], visible: BOOL[...]) -> FLOAT[...]:
    """Softmax over the visible keys; exactly 0 elsewhere, and in rows that see no key."""
    shown = op.Where(visible, scores, op.Constant(value_float=_LOWEST))
    weights = op.Where(visible, op.Softmax(shown, axis=-1), op.Constant(value_float=0.0))
    return weights


@script(TURBOQUANT, default_opset=op)
def masked_softmax_with_sink(
    scores: FLOAT[...], visible: BOOL[...], sink: FLOAT[...]
) -> FLOAT[...]:
    """The same with one more score per head, sink [H], whose weight is left out of the result."""
    one = op.Constant(value_ints=[1])
    rows_shape = op.Concat(op.Shape(scores, start=0, end=3), one, axis=0)
    column = op.Expand(op.Unsqueeze(sink, op.Constant(value_ints=[0, 2, 3])), rows_shape)
    shown = op.Where(visible, scores, op.Constant(value_float=_LOWEST))
    all_weights = op.Softmax(op.Concat(shown, column, axis=-1), axis=-1)
    first = op.Constant(value_ints=[0])
    of_keys = op.Slice(all_weights, first, op.Shape(scores, start=3), op.Constant(value_ints=[3]))
    weights = op.Where(visible, of_keys, op.Constant(value_float=0.0))
    return weights


@script(TURBOQUANT, default_opset=op)
def value_weights(weights: FLOAT[...], visible: BOOL[...], scales: FLOAT[...]) -> FLOAT[...]:
    """Weights [B, H, T, S] times the values' scales [B, N, S]: [B, N, H/N*T, S]."""
    zero = op.Constant(value_float=0.0)
    heads_shape = op.Shape(weights)
    grouped_shape = op.Concat(
        op.Shape(scales, start=0, end=2),
        op.Constant(value_ints=[-1]),
        op.Shape(scales, start=2),
        axis=0,
    )
    per_row = op.Unsqueeze(scales, op.Constant(value_ints=[2]))
    scaled = op.Reshape(op.Mul(op.Reshape(weights, grouped_shape), per_row), heads_shape)
    # 0 * NaN is NaN: the scale of a hidden row must not reach the sum.
    grouped = op.Reshape(op.Where(visible, scaled, zero), grouped_shape)
    return grouped


@script(TURBOQUANT, default_opset=op)
def sum_of_finite(weights: FLOAT[...], values: FLOAT[...]) -> FLOAT[...]:
    """Weighted sums [B, N, R, D] of values [B, N, S, D], all finite, weights [B, N, R, S]."""
    sums = op.MatMul(weights, values)
    return sums


@script(TURBOQUANT, default_opset=op)
def of_all_heads(grouped: FLOAT[...], query: FLOAT[...]) -> FLOAT[...]:
    """Vectors [B, N, H/N*T, C] as [B, H, T, C], in the order of the query's heads."""
    rest = op.Constant(value_ints=[-1])
    heads_shape = op.Concat(op.Shape(query, start=0, end=3), rest, axis=0)
    vectors = op.Reshape(grouped, heads_shape)
    return vectors
