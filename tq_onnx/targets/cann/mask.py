"""Remove the attention mask from a graph for CANN, whose kernels mask by lengths alone.

An exporter computes a mask of floats from ``attention_mask`` and from lengths, and attention adds
it to its scores. Where that mask only hides the future, as long as no token is padding, the
operator's own ``causal`` does the same, and the mask can go. That it is so is shown by its numbers,
for prompts, single tokens and long caches. Padding cannot be said then, and would be read as text:
a Gather whose index is out of range if the mask has a 0 stops every runtime; the runtime's message
has its name, ``PADDING``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer, converted_layers
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.liveness import data_ancestors
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.plan import Plan
from tq_onnx.targets.cann.hostshapes import shapes_by_name

PADDING: Final = "attention_mask_must_not_have_padding"
"""Ends the name of the node that fails where it has."""

_POSITIONS: Final = "position_ids"
_MASKS: Final = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
_HIDDEN: Final = -1e4
"""A bias up to here takes a key out of the softmax, in half precision too."""

_LENGTHS: Final = ((1, 1, 0), (2, 1, 5), (1, 4, 0), (2, 3, 4), (1, 7, 40), (1, 1, 200_000))
"""Sequences, new tokens and past tokens; the last is longer than windows are."""


def of_each_mask(layers: Iterable[ConvertedLayer]) -> list[ConvertedLayer]:
    """Return the first layer of each mask; most layers share theirs."""
    first: dict[tuple[ir.Value | None, int], ConvertedLayer] = {}
    for layer in layers:
        attention = layer.attention
        key = attention.bias, attribute_int(attention.node, "causal", 0)
        first.setdefault(key, layer)
    return list(first.values())


def is_causal(attention: AttentionNode, plan: Plan, model: ir.Model) -> bool:
    """Return True if a layer's mask hides the future and nothing else.

    Args:
        attention: TurboQuantDequantAttention.
        plan: of the conversion; it names the inputs that a mask is made of.
        model: the converted model.

    Raises:
        NoMatch: the mask depends on something else than lengths and ``attention_mask``.
    """
    bias, causal = attention.bias, attribute_int(attention.node, "causal", 0) == 1
    if bias is None:
        return causal
    _expect_no_contents(bias, plan, model)
    return all(
        _hides_the_future(
            evaluate([bias], dict(_inputs(plan, model, *call)))[0], *call, already_causal=causal
        )
        for call in _LENGTHS
    )


def complaint(attention: AttentionNode) -> str:
    """Return the problem of the mask of a layer that is not causal, as a clause."""
    return (
        "there is no mask"
        if attention.bias is None
        else "the mask hides more than the future, or less"
    )


def _expect_no_contents(value: ir.Value, plan: Plan, model: ir.Model) -> None:
    """Refuse a value that is computed from tokens or positions, and not from their number only.

    Lengths can be tried out; what a prompt may be cannot: a mask may hide certain tokens.
    """
    ancestors = data_ancestors([value])
    for name in (plan.interface.tokens, plan.interface.position_ids):
        if _input(model, name) in ancestors:
            raise NoMatch(f"the mask depends on the contents of {name}")


def _inputs(
    plan: Plan, model: ir.Model, batch: int, tokens: int, past: int
) -> Iterator[tuple[ir.Value, Array]]:
    """Yield the inputs of a call without padding; caches have a size only."""
    caches = {pair.past for layer in plan.layers for pair in (layer.key, layer.value)}
    interface = plan.interface
    for value in model.graph.inputs:
        dtype = None if value.dtype is None else value.dtype.numpy()
        if value.name in caches:
            heads, width = static_dim(value, 1), static_dim(value, 3)
            if heads is not None and width is not None:
                shape = (batch, heads, past, width)
                yield value, np.broadcast_to(np.zeros((), np.uint8), shape)
        elif value.name == interface.tokens:
            yield value, np.zeros((batch, tokens), dtype)
        elif value.name == interface.attention_mask:
            yield value, np.ones((batch, past + tokens), dtype)
        elif value.name == interface.position_ids:
            numbers = np.arange(past, past + tokens, dtype=dtype)
            yield value, np.broadcast_to(numbers, (batch, tokens))


def _hides_the_future(
    bias: Array, batch: int, tokens: int, past: int, *, already_causal: bool
) -> bool:
    """Return True if a bias is 0 for the past, and hides the future unless the operator does."""
    if bias.ndim != 4:
        return False
    try:
        numbers = np.broadcast_to(
            bias.astype(np.float64), (batch, bias.shape[1], tokens, past + tokens)
        )
    except ValueError:
        return False
    seen = np.arange(past + tokens) <= past + np.arange(tokens)[:, None]
    shows = bool((numbers[..., seen] == 0).all())
    return shows and (already_causal or bool((numbers[..., ~seen] <= _HIDDEN).all()))


def drop_bias(attention: AttentionNode) -> None:
    """Let the operator hide the future itself; what made the mask is left without a reader."""
    attention.bias = None
    attention.node.attributes["causal"] = ir.AttrInt64("causal", 1)


def keep_all_rows(model: ir.Model, plan: Plan) -> int:
    """Drop what puts zeros in the place of queries that see no key: only padding has such queries.

    Returns:
        how many there were.
    """
    count = 0
    for layer in converted_layers(model, plan):
        attended = layer.attention.output
        for use in list(attended.uses()):
            choice = use.node
            if choice.domain != "" or choice.op_type != "Where" or use.idx == 0:
                continue
            condition, other = choice.inputs[0], choice.inputs[3 - use.idx]
            numbers = None if other is None else other.const_value
            if condition is None or numbers is None or numbers.size != 1:
                continue
            if choice.outputs[0].is_graph_output():
                continue
            if _is_always(condition, use.idx == 1, plan, model):
                choice.outputs[0].replace_all_uses_with(attended)
                count += 1
    return count


def _is_always(condition: ir.Value, wanted: bool, plan: Plan, model: ir.Model) -> bool:
    """Return True if a condition ``[B, 1, T, 1]`` or smaller is this in calls without padding."""
    try:
        _expect_no_contents(condition, plan, model)
        for call in _LENGTHS[:-1]:
            (numbers,) = evaluate([condition], dict(_inputs(plan, model, *call)))
            rows = (call[0], 1, call[1], 1)
            if np.broadcast_shapes(numbers.shape, rows) != rows or not (numbers == wanted).all():
                return False
    except (NoMatch, ValueError):  # of another shape
        return False
    return True


def past_length(build: Builder, model: ir.Model, plan: Plan) -> ir.Value:
    """Return the number of tokens in the caches, int64 ``[1]`` or ``[B]``.

    From the mask; where there is none, from the position of each sequence's first new token.

    Raises:
        NoMatch: the model has neither.
    """
    mask, positions = _mask(model, plan), _input(model, plan.interface.position_ids)
    if mask is not None:
        return _refusing_padding(build, mask, _past_of_mask(build, mask, model, plan))
    if plan.interface.attention_mask is not None:  # nothing would refuse its padding
        raise NoMatch(f"{plan.interface.attention_mask} is not [batch, total tokens]")
    # A list of another name, as long as the tokens, may hold anything.
    if positions is not None and rank(positions) == 2 and positions.name == _POSITIONS:
        return _first_positions(build, positions)
    raise NoMatch(
        "the model has no attention_mask [batch, total tokens] and no "
        f"{_POSITIONS} [batch, tokens], which tell the tokens in caches of fixed capacity"
    )


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


def _input(model: ir.Model, name: str | None) -> ir.Value | None:
    return next((v for v in model.graph.inputs if v.name == name), None)


def _mask(model: ir.Model, plan: Plan) -> ir.Value | None:
    mask = _input(model, plan.interface.attention_mask)
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


def is_positions(value: ir.Value, plan: Plan, model: ir.Model) -> bool:
    """Return True if a value ``[B, T]`` or ``[1, T]`` counts on from the past, without padding."""
    try:
        _expect_no_contents(value, plan, model)
        for batch, tokens, past in _LENGTHS[:-1]:
            (found,) = evaluate([value], dict(_inputs(plan, model, batch, tokens, past)))
            wanted = np.arange(past, past + tokens)
            if found.shape not in ((1, tokens), (batch, tokens)) or not (found == wanted).all():
                return False
    except NoMatch:
        return False
    return True


def is_past_length(value: ir.Value, plan: Plan, model: ir.Model) -> bool:
    """Return True if ``[B]`` or ``[1]`` is the number of tokens in the caches, without padding.

    Raises:
        NoMatch: it depends on something else than lengths and ``attention_mask``.
    """
    _expect_no_contents(value, plan, model)
    ids = _input(model, plan.interface.tokens)
    for batch, tokens, past in _LENGTHS[:-1]:
        named = zip((sizes(ids) or ())[:2], (batch, tokens), strict=False)
        names = {name: size for name, size in named if isinstance(name, str)}
        given = {**shapes_by_name(value, names), **dict(_inputs(plan, model, batch, tokens, past))}
        (found,) = evaluate([value], given)
        if found.shape not in ((1,), (batch,)) or not (found == past).all():
            return False
    return True
