"""Remove the attention mask from a graph for CANN, whose kernels mask by lengths alone.

An exporter computes a mask of floats from ``attention_mask`` and from lengths, and attention adds
it to its scores. Where that mask only hides the future, as long as no token is padding, the
operator's own ``causal`` does the same, and the mask can go; ``tq_onnx.targets.causality`` shows
that it is so. Where it is shown that masks hide padding on the left, too, the operator is told how
many slots that is. Other padding would be read as text, so it is refused at run time: the index of
a Gather is then out of range. That stops every runtime, and the message has the node's name,
``PADDING`` or ``NOT_ON_THE_LEFT``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import rank
from tq_onnx.plan import Plan
from tq_onnx.targets.causality import input_of

PADDING: Final = "attention_mask_must_not_have_padding"
"""Ends the name of the node that fails where it has."""

NOT_ON_THE_LEFT: Final = "attention_mask_must_have_its_padding_on_the_left"
"""Likewise where a 0 stands behind a 1."""

_POSITIONS: Final = "position_ids"
_MASKS: Final = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def past_length(build: Builder, model: ir.Model, plan: Plan) -> ir.Value:
    """Return the number of tokens in the caches, int64 ``[1]`` or ``[B]``.

    From the mask; where there is none, from the position of each sequence's first new token.
    """
    mask, positions = _mask(model, plan), input_of(model, plan.interface.position_ids)
    if mask is not None:
        return _past_of_mask(build, mask, model, plan)
    if plan.interface.attention_mask is not None:  # nothing would refuse its padding
        raise NoMatch(f"{plan.interface.attention_mask} is not [batch, total tokens]")
    # A list of another name, as long as the tokens, may hold anything.
    if positions is not None and rank(positions) == 2 and positions.name == _POSITIONS:
        return _first_positions(build, positions)
    raise NoMatch(
        "the model has no attention_mask [batch, total tokens] and no "
        f"{_POSITIONS} [batch, tokens], which tell the tokens in caches of fixed capacity"
    )


def length_without_padding(build: Builder, model: ir.Model, plan: Plan) -> ir.Value | None:
    """Return the length, read in a way that fails where the mask has a 0; None without a mask."""
    mask = _mask(model, plan)
    if mask is None:
        return None
    return _refusing_padding(build, mask, _past_of_mask(build, mask, model, plan))


def length_and_padding(
    build: Builder, model: ir.Model, plan: Plan
) -> tuple[ir.Value, ir.Value] | None:
    """Return the length, and how many zeros each row of the mask begins with, int64 ``[B]``.

    The length is read in a way that fails where a 0 stands behind a 1. None without a mask.
    """
    mask = _mask(model, plan)
    if mask is None:
        return None
    int64, matrix, row = ir.DataType.INT64, [None, None], ir.DataType.BOOL
    zero, unit, zeroth = build.integers(0), build.integers(1), build.number(0)
    is_token = mask
    if mask.dtype is not row:
        padding_value = np.zeros((), np.int64 if mask.dtype is int64 else np.int32)
        none = build.constant(f"tq.padding.{padding_value.dtype}", padding_value)
        is_padding = build.op("Equal", [mask, none], "is_padding", dtype=row, shape=matrix)
        is_token = build.op("Not", [is_padding], "is_token", dtype=row, shape=matrix)
    zeros = build.op("Where", [is_token, zero, unit], "zeros", dtype=int64, shape=matrix)
    padding = build.op(
        "ReduceSum", [zeros, unit], "left_padding", dtype=int64, shape=[None], keepdims=0
    )
    total = build.dim(mask, 1, "total_tokens")
    end = build.op("Squeeze", [total, zero], "end", dtype=int64, shape=[])
    places = build.op("Range", [zeroth, end, build.number(1)], "places", dtype=int64, shape=[None])
    ends = build.op("Unsqueeze", [padding, unit], "padding_ends", dtype=int64, shape=[None, 1])
    before = build.op("Less", [places, ends], "is_before", dtype=row, shape=matrix)
    wrong = build.op("Equal", [before, is_token], "is_wrong", dtype=row, shape=matrix)
    counted = build.op("Where", [wrong, unit, zero], "wrong", dtype=int64, shape=matrix)
    most = build.op("ReduceMax", [counted], "any_wrong", dtype=int64, shape=[], keepdims=0)
    index = build.op("Unsqueeze", [most, zero], "index", dtype=int64, shape=[1])
    past = _past_of_mask(build, mask, model, plan)
    length = build.op("Gather", [past, index], NOT_ON_THE_LEFT, dtype=int64, shape=[1], axis=0)
    return length, padding


def positions(build: Builder, model: ir.Model, plan: Plan) -> ir.Value | None:
    """Return the new tokens' positions by the mask, int64 ``[1, T]``; None without a mask."""
    mask = _mask(model, plan)
    if mask is None:
        return None

    def make() -> ir.Value:
        zeroth, int64 = build.integers(0), ir.DataType.INT64
        past, total = _past_of_mask(build, mask, model, plan), build.dim(mask, 1, "total_tokens")
        first = build.op("Squeeze", [past, zeroth], "first", dtype=int64, shape=[])
        end = build.op("Squeeze", [total, zeroth], "end", dtype=int64, shape=[])
        row = build.op("Range", [first, end, build.number(1)], "row", dtype=int64, shape=[None])
        return build.op("Unsqueeze", [row, zeroth], "positions", dtype=int64, shape=[1, None])

    return build.once("positions", make)


def _mask(model: ir.Model, plan: Plan) -> ir.Value | None:
    mask = input_of(model, plan.interface.attention_mask)
    return mask if mask is not None and mask.dtype in _MASKS and rank(mask) == 2 else None


def _past_of_mask(build: Builder, mask: ir.Value, model: ir.Model, plan: Plan) -> ir.Value:
    """Return the length of the mask without the new tokens, int64 ``[1]``.

    No arithmetic: the provider takes additions and casts of integers to itself, and copies for
    each.
    """

    def make() -> ir.Value:
        tokens = next(v for v in model.graph.inputs if v.name == plan.interface.tokens)
        new = build.dim(tokens, 1, "new_tokens")
        ends = build.integers(np.iinfo(np.int64).max)
        bounds = [mask, new, ends, build.integers(1)]
        shape = [None, None]
        before = build.op("Slice", bounds, "mask_of_past", dtype=mask.dtype, shape=shape)
        return build.dim(before, 1, "past_tokens")

    return build.once("past_of_mask", make)


def _refusing_padding(build: Builder, mask: ir.Value, past: ir.Value) -> ir.Value:
    """Return the length, read in a way that fails where the mask has a 0."""
    int64 = ir.DataType.INT64
    if mask.dtype is ir.DataType.BOOL:
        # No Cast: the provider takes those to itself, and copies.
        numbers = [mask, build.integers(1), build.integers(0)]
        mask = build.op("Where", numbers, "mask_of_integers", dtype=int64, shape=[None, None])
    lowest = build.op("ReduceMin", [mask], "lowest", dtype=mask.dtype, shape=[], keepdims=0)
    zero = np.zeros((), np.int64 if mask.dtype is int64 else np.int32)
    padding = build.constant(f"tq.padding.{zero.dtype}", zero)
    padded = build.op("Equal", [lowest, padding], "has_padding", dtype=ir.DataType.BOOL, shape=[])
    choices = [padded, build.integers(1), build.integers(0)]
    index = build.op("Where", choices, "index", dtype=int64, shape=[1])
    return build.op("Gather", [past, index], PADDING, dtype=int64, shape=[1], axis=0)


def _first_positions(build: Builder, ids: ir.Value) -> ir.Value:
    """Return the first column of the positions, int64 ``[B]``."""
    zeroth, first, int64 = build.integers(0), build.integers(1), ir.DataType.INT64
    bounds = [ids, zeroth, first, first]
    column = build.op("Slice", bounds, "first_positions", dtype=ids.dtype, shape=[None, 1])
    if ids.dtype is not int64:
        column = build.op("Cast", [column], "first_positions", dtype=int64, shape=[None, 1], to=7)
    return build.op("Squeeze", [column, first], "past_length", dtype=int64, shape=[None])
