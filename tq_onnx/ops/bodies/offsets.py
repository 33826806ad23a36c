"""Pieces about offsets: what is taken from vectors before they are encoded, and comes back.

An offset [K, N, D] has a row for each slot, the last one for all further slots. With frequencies
[D] it has rows of cosines and of sines, which turn with the slot, and one for each first slot. A
phase, slot times frequency, is reduced to one turn in float64: float32 knows no part of a turn at
slot 1,000,000.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import numpy_helper
from onnxscript import FLOAT, INT64, script

from tq_onnx.ops.bodies import F32, F64, I64, TURBOQUANT, op

_TURN: Final = numpy_helper.from_array(np.array(2 * np.pi))


@script(TURBOQUANT, default_opset=op)
def slots_of_new(vectors: FLOAT[...], past_length: INT64[...]) -> INT64[...]:
    """Slots [B or 1, T] of new vectors [B, N, T, D]: past_length[b] + t."""
    new = op.Squeeze(op.Shape(vectors, start=2, end=3))
    steps = op.Range(op.Constant(value_int=0), new, op.Constant(value_int=1))
    slots = op.Add(op.Reshape(past_length, op.Constant(value_ints=[-1, 1])), steps)
    return slots


@script(TURBOQUANT, default_opset=op)
def all_slots(total: INT64[...]) -> INT64[...]:
    """Slots [1, total] from 0 on."""
    row = op.Range(op.Constant(value_int=0), op.Squeeze(total), op.Constant(value_int=1))
    slots = op.Unsqueeze(row, op.Constant(value_ints=[0]))
    return slots


@script(TURBOQUANT, default_opset=op)
def offset_of_slots(offset: FLOAT[...], slots: INT64[...]) -> FLOAT[...]:
    """Rows [B or 1, N, T, D] of an offset [K, N, D] for slots [B or 1, T]."""
    last = op.Sub(op.Shape(offset, start=0, end=1), op.Constant(value_int=1))
    rows = op.Gather(offset, op.Min(slots, last), axis=0)
    of_slots = op.Transpose(rows, perm=[0, 2, 1, 3])
    return of_slots


@script(TURBOQUANT, default_opset=op)
def turned_offset(
    offset: FLOAT[...], slots: INT64[...], frequencies: FLOAT[...], left_padding: INT64[...]
) -> FLOAT[...]:
    """Offsets [B or 1, N, T, D] that turn with slots [B or 1, T], less the padding in front.

    With one frequency alone, which stands for none, they are the rows of the slots: cosines are
    multiplied with 1 and sines with 0.
    """
    unit = op.Constant(value_int=1)
    zero = op.Constant(value_int=0)
    turns = op.Cast(op.Greater(op.Size(frequencies), unit), to=I64)
    padding = op.Mul(op.Reshape(left_padding, op.Constant(value_ints=[-1, 1])), turns)
    positions = op.Max(op.Sub(slots, padding), zero)
    turn = op.Constant(value=_TURN)
    angles = op.Mul(op.Cast(frequencies, to=F64), op.Cast(turns, to=F64))
    columns = op.Cast(op.Unsqueeze(positions, op.Constant(value_ints=[1, 3])), to=F64)
    all_turns = op.Mul(columns, op.Div(angles, turn))
    part = op.Sub(all_turns, op.Floor(all_turns))
    phases = op.Cast(op.Mul(part, turn), to=F32)
    cosines = offset_of_slots(offset, op.Mul(positions, op.Sub(unit, turns)))
    second = op.Unsqueeze(op.Constant(value_ints=[1]), op.Constant(value_ints=[0]))
    sines = offset_of_slots(offset, second)
    turned = op.Add(op.Mul(cosines, op.Cos(phases)), op.Mul(sines, op.Sin(phases)))
    rows = op.Add(positions, op.Constant(value_int=2))
    has_own = op.Cast(op.Less(rows, op.Shape(offset, start=0, end=1)), to=I64)
    shares = op.Unsqueeze(op.Mul(has_own, turns), op.Constant(value_ints=[1, 3]))
    own = op.Mul(offset_of_slots(offset, rows), op.Cast(shares, to=F32))
    offsets = op.Add(turned, own)
    return offsets


@script(TURBOQUANT, default_opset=op)
def without(vectors: FLOAT[...], offsets: FLOAT[...]) -> FLOAT[...]:
    """Vectors [B, N, T, D] in float32, less their offsets [B or 1, N, T, D]."""
    residual = op.Sub(op.Cast(vectors, to=F32), offsets)
    return residual


@script(TURBOQUANT, default_opset=op)
def turned_scores(query: FLOAT[...], offsets: FLOAT[...], scale: float) -> FLOAT[...]:
    """Scores [B, H, T, S] of queries [B, H, T, D] against the offsets [B or 1, N, S, D] of keys."""
    inferred = op.Constant(value_ints=[-1])
    grouped_shape = op.Concat(
        op.Shape(query, start=0, end=1),
        op.Shape(offsets, start=1, end=2),
        inferred,
        op.Shape(query, start=3),
        axis=0,
    )
    scaled = op.Mul(query, op.Constant(value_float=scale))
    columns = op.Transpose(offsets, perm=[0, 1, 3, 2])
    products = op.MatMul(op.Reshape(scaled, grouped_shape), columns)
    heads_shape = op.Concat(op.Shape(query, start=0, end=3), inferred, axis=0)
    scores = op.Reshape(products, heads_shape)
    return scores


@script(TURBOQUANT, default_opset=op)
def offset_scores(
    query: FLOAT[...], offset: FLOAT[...], total: INT64[...], scale: float
) -> FLOAT[...]:
    """Scores [B, H, T, total] of queries [B, H, T, D] against the offset [K, N, D] of keys."""
    zero = op.Constant(value_ints=[0])
    rows = op.Unsqueeze(op.Transpose(offset, perm=[1, 0, 2]), zero)
    last = op.Sub(op.Shape(offset, start=0, end=1), op.Constant(value_int=1))
    slots = op.Squeeze(op.Min(all_slots(total), last), zero)
    scores = op.Gather(turned_scores(query, rows, scale), slots, axis=3)
    return scores


@script(TURBOQUANT, default_opset=op)
def offset_sums(
    query: FLOAT[...], weights: FLOAT[...], offset: FLOAT[...], total: INT64[...]
) -> FLOAT[...]:
    """Weighted sums [B, H, T, D] of the offset [K, N, D] of values, weights [B, H, T, total]."""
    offsets = offset_of_slots(offset, all_slots(total))
    grouped_shape = op.Concat(
        op.Shape(weights, start=0, end=1),
        op.Shape(offsets, start=1, end=2),
        op.Constant(value_ints=[-1]),
        op.Shape(weights, start=3),
        axis=0,
    )
    sums = op.Reshape(op.MatMul(op.Reshape(weights, grouped_shape), offsets), op.Shape(query))
    return sums
