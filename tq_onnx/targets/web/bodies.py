"""The operators' bodies for runtimes that interpret: few nodes, tables in the place of arithmetic.

They write and read the same rows as ``tq_onnx.ops.bodies``. What differs is the work: coordinates
stand in the order of the bytes that hold them (the columns of the rotation are in that order), so
that one Gather turns a byte into the centroids of its codes; two bytes of a float16 are an index
into a table of all of them, where what is not finite is 0. Tables come in as inputs, because all
layers share them. What every layer asks alike (lengths, masks) is made once, outside of here.

Every node means the same in all opsets from 15, as in ``tq_onnx.ops.bodies``.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from typing import Final

from onnxscript import BOOL, FLOAT, INT32, INT64, UINT8, script
from onnxscript.values import Opset

from tq_onnx.ops.bodies import F32, I32, U8, op
from tq_onnx.ops.domain import DOMAIN, VERSION

WEB_DOMAIN: Final = f"{DOMAIN}.web"
"""Where the functions are until they are put in the places of their calls."""

_WEB: Final = Opset(WEB_DOMAIN, VERSION)
_LARGEST: Final = 3.4028234663852886e38
_SMALLEST: Final = 1.1754943508222875e-38
_LOWEST: Final = -3.4028234663852886e38
_MAX_HALF: Final = 65504.0


@script(_WEB, default_opset=op)
def norms_of(vectors: FLOAT[...]) -> FLOAT[...]:
    """Norms [B, N, T, 1] of vectors [B, N, T, D]; NaN where they are not finite."""
    squares = op.ReduceSum(op.Mul(vectors, vectors), op.Constant(value_ints=[-1]), keepdims=1)
    # Comparisons with NaN are false: NaN, Inf and overflow all fail this one.
    usable = op.LessOrEqual(squares, op.Constant(value_float=_LARGEST))
    norms = op.Sqrt(op.Where(usable, squares, op.Constant(value_float=0.0)))
    return norms


@script(_WEB, default_opset=op)
def turned_units(vectors: FLOAT[...], norms: FLOAT[...], rotation: FLOAT[...]) -> FLOAT[...]:
    """Vectors over their norms, rotated; zeros where the norm is 0."""
    zero = op.Constant(value_float=0.0)
    # No norm of float32 numbers that is not 0 is as small as that.
    divisors = op.Max(norms, op.Constant(value_float=_SMALLEST))
    units = op.Where(op.Greater(norms, zero), op.Div(vectors, divisors), zero)
    turned = op.MatMul(units, rotation)
    return turned


@script(_WEB, default_opset=op)
def codes_of(turned: FLOAT[...], boundaries: FLOAT[...]) -> FLOAT[...]:
    """Codes of numbers [B, N, T, D]: how many of the boundaries [L - 1, 1, 1, 1, 1] are reached."""
    reached = op.Cast(op.GreaterOrEqual(turned, boundaries), to=F32)
    codes = op.ReduceSum(reached, op.Constant(value_ints=[0]), keepdims=0)
    return codes


@script(_WEB, default_opset=op)
def scales_of_norm(norms: FLOAT[...], turned: FLOAT[...], quantised: FLOAT[...]) -> FLOAT[...]:
    """Scales [B, N, T, 1] that make up for nothing."""
    scales = op.Identity(norms)
    return scales


@script(_WEB, default_opset=op)
def scales_of_length(norms: FLOAT[...], turned: FLOAT[...], quantised: FLOAT[...]) -> FLOAT[...]:
    """Scales that keep the norm; no centroid is 0, so that there is one to divide by."""
    squares = op.Mul(quantised, quantised)
    lengths = op.Sqrt(op.ReduceSum(squares, op.Constant(value_ints=[-1]), keepdims=1))
    scales = op.Div(norms, lengths)
    return scales


@script(_WEB, default_opset=op)
def scales_of_product(norms: FLOAT[...], turned: FLOAT[...], quantised: FLOAT[...]) -> FLOAT[...]:
    """Scales that keep the product with the vector; 0 where that is not positive."""
    products = op.Mul(turned, quantised)
    along = op.ReduceSum(products, op.Constant(value_ints=[-1]), keepdims=1)
    zero = op.Constant(value_float=0.0)
    scales = op.Where(op.Greater(along, zero), op.Div(norms, along), zero)
    return scales


@script(_WEB, default_opset=op)
def half_bytes(
    scales: FLOAT[...], powers: FLOAT[...], units_per_one: FLOAT[...], bases: FLOAT[...]
) -> UINT8[...]:
    """Bytes [B, N, T, 2] of the float16 nearest to scales [B, N, T, 1], none negative, low first.

    How many of the powers of two a scale reaches tells its binade: units_per_one of the float16 in
    it, and the bits of its first number, less those that the mantissa brings.
    """
    clamped = op.Min(scales, op.Constant(value_float=_MAX_HALF))
    reached = op.Cast(op.GreaterOrEqual(clamped, powers), to=F32)
    last = op.Constant(value_ints=[-1])
    binade = op.Cast(op.ReduceSum(reached, last, keepdims=1), to=I32)
    steps = op.Round(op.Mul(clamped, op.Gather(units_per_one, binade)))
    bits = op.Add(steps, op.Gather(bases, binade))
    places = op.Constant(value_floats=[1.0, 256.0])
    shifted = op.Floor(op.Div(bits, places))
    pair = op.Cast(op.Mod(shifted, op.Constant(value_float=256.0), fmod=1), to=U8)
    return pair


@script(_WEB, default_opset=op)
def packed_plane(codes: FLOAT[...], weights: FLOAT[...], by_byte: INT64[...]) -> UINT8[...]:
    """A plane of codes in the order of its bytes, by_byte [0, 0, 0, n, k]."""
    plane = op.Cast(op.MatMul(op.Reshape(codes, by_byte), weights), to=U8)
    return plane


@script(_WEB, default_opset=op)
def tops_of(codes: FLOAT[...], top: FLOAT[...]) -> FLOAT[...]:
    """The highest bits of codes, which are worth top."""
    tops = op.Cast(op.GreaterOrEqual(codes, top), to=F32)
    return tops


@script(_WEB, default_opset=op)
def without_tops(codes: FLOAT[...], tops: FLOAT[...], top: FLOAT[...]) -> FLOAT[...]:
    """Codes without their highest bits."""
    rest = op.Sub(codes, op.Mul(tops, top))
    return rest


@script(_WEB, default_opset=op)
def packed_tops(
    tops: FLOAT[...], weights: FLOAT[...], by_part: INT64[...], part_weights: FLOAT[...]
) -> UINT8[...]:
    """A plane of the highest bits, by_part [0, 0, 0, r, n, k].

    Each of its bytes has bits of r bytes of the plane below: one of each, then the next of each.
    """
    parts = op.MatMul(op.Reshape(tops, by_part), weights)
    plane = op.Cast(op.MatMul(part_weights, parts), to=U8)
    return plane


@script(_WEB, default_opset=op)
def coordinates_of(
    cache: UINT8[...],
    starts: INT64[...],
    ends: INT64[...],
    axes: INT64[...],
    centroids: FLOAT[...],
    by_head: INT64[...],
) -> FLOAT[...]:
    """Coordinates [B, N, S, D] of the codes of a cache, without their scales.

    starts to ends are those of its live rows; centroids [256, k] has the k of each byte.
    """
    codes = op.Cast(op.Slice(cache, starts, ends, axes), to=I32)
    coordinates = op.Reshape(op.Gather(centroids, codes), by_head)
    return coordinates


@script(_WEB, default_opset=op)
def coordinates_of_planes(
    cache: UINT8[...],
    starts: INT64[...],
    ends: INT64[...],
    top_starts: INT64[...],
    top_ends: INT64[...],
    axes: INT64[...],
    tops: INT32[...],
    by_byte: INT64[...],
    centroids: FLOAT[...],
    by_head: INT64[...],
) -> FLOAT[...]:
    """The same of codes whose highest bits are in a plane of their own.

    tops [256, r] has what the r parts of a byte of that plane, bits of as many bytes of the other,
    add to these as an index into centroids.
    """
    bytes_below = op.Cast(op.Slice(cache, starts, ends, axes), to=I32)
    bytes_above = op.Cast(op.Slice(cache, top_starts, top_ends, axes), to=I32)
    parts = op.Transpose(op.Gather(tops, bytes_above), perm=[0, 1, 2, 4, 3])
    indices = op.Add(bytes_below, op.Reshape(parts, by_byte))
    coordinates = op.Reshape(op.Gather(centroids, indices), by_head)
    return coordinates


@script(_WEB, default_opset=op)
def scales_of(
    cache: UINT8[...],
    starts: INT64[...],
    ends: INT64[...],
    axes: INT64[...],
    places: INT32[...],
    halves: FLOAT[...],
) -> FLOAT[...]:
    """Scales [B, N, 1, S] of a cache; starts to ends are their bytes in its live rows."""
    pair = op.Cast(op.Slice(cache, starts, ends, axes), to=I32)
    bits = op.ReduceSum(op.Mul(pair, places), op.Constant(value_ints=[-1]), keepdims=0)
    scales = op.Unsqueeze(op.Gather(halves, bits), op.Constant(value_ints=[2]))
    return scales


@script(_WEB, default_opset=op)
def grouped_scores(
    query: FLOAT[...],
    rotation: FLOAT[...],
    grouped: INT64[...],
    keys: FLOAT[...],
    scales: FLOAT[...],
    by_head: INT64[...],
) -> FLOAT[...]:
    """Scores [B, H, T, S] of queries [B, H, T, D]; the rotation has the scale of scores in it."""
    turned = op.Reshape(op.MatMul(query, rotation), grouped)
    products = op.MatMul(turned, op.Transpose(keys, perm=[0, 1, 3, 2]))
    scores = op.Reshape(op.Mul(products, scales), by_head)
    return scores


@script(_WEB, default_opset=op)
def grouped_sums(
    weights: FLOAT[...],
    grouped: INT64[...],
    scales: FLOAT[...],
    values: FLOAT[...],
    by_head: INT64[...],
    rotation: FLOAT[...],
) -> FLOAT[...]:
    """Weighted sums [B, H, T, D] of values, by weights [B, H, T, S]."""
    scaled = op.Mul(op.Reshape(weights, grouped), scales)
    turned = op.Reshape(op.MatMul(scaled, values), by_head)
    sums = op.MatMul(turned, op.Transpose(rotation, perm=[1, 0]))
    return sums


@script(_WEB, default_opset=op)
def hiding(visible: BOOL[...]) -> FLOAT[...]:
    """What is added to scores: 0 for a visible key, the lowest number for a hidden one."""
    lowest = op.Constant(value_float=_LOWEST)
    mask = op.Where(visible, op.Constant(value_float=0.0), lowest)
    return mask


@script(_WEB, default_opset=op)
def biased(visible: BOOL[...], bias: FLOAT[...]) -> FLOAT[...]:
    """The same where there is a bias."""
    mask = op.Where(visible, op.Cast(bias, to=F32), op.Constant(value_float=_LOWEST))
    return mask


@script(_WEB, default_opset=op)
def sees_any(visible: BOOL[...]) -> BOOL[...]:
    """Whether a query sees a key: [B or 1, 1 or H, T, 1]."""
    count = op.ReduceSum(op.Cast(visible, to=F32), op.Constant(value_ints=[-1]), keepdims=1)
    any_key = op.Greater(count, op.Constant(value_float=0.0))
    return any_key


@script(_WEB, default_opset=op)
def or_zero(any_key: BOOL[...], sums: FLOAT[...]) -> FLOAT[...]:
    """Sums, zeros for queries that see no key."""
    kept = op.Where(any_key, sums, op.Constant(value_float=0.0))
    return kept


@script(_WEB, default_opset=op)
def capped(scores: FLOAT[...], softcap: FLOAT[...]) -> FLOAT[...]:
    """Scores that stay below a cap."""
    kept = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
    return kept


@script(_WEB, default_opset=op)
def softmax_with_sink(scores: FLOAT[...], sink: FLOAT[...]) -> FLOAT[...]:
    """Weights with one more score per head, sink [H], that has no value."""
    one = op.Constant(value_ints=[1])
    shape = op.Concat(op.Shape(scores, start=0, end=3), one, axis=0)
    column = op.Expand(op.Unsqueeze(op.Cast(sink, to=F32), op.Constant(value_ints=[1, 2])), shape)
    all_weights = op.Softmax(op.Concat(scores, column, axis=-1), axis=-1)
    first = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    weights = op.Slice(all_weights, first, op.Shape(scores, start=3), last)
    return weights


@script(_WEB, default_opset=op)
def appended(past: UINT8[...], room: UINT8[...], slots: INT64[...], rows: UINT8[...]) -> UINT8[...]:
    """Cache [B, N, S, W] with rows in their slots [B, N, T, W], and room for them."""
    present = op.ScatterElements(op.Concat(past, room, axis=2), slots, rows, axis=2)
    return present
