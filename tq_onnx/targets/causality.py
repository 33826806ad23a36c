"""Prove what masks, positions and lengths of a converted decoder are, by evaluating them.

Exporters compute them in dozens of ways, and targets replace them by other forms. A value may be
replaced if it has the expected numbers in several calls without padding: prompts, single tokens and
long caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer, converted_layers
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.liveness import data_ancestors, live_nodes, nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import static_dim
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

_HIDDEN: Final = -1e4
"""A bias up to here takes a key out of the softmax, in half precision too."""

BY_CONTENTS: Final = frozenset({"NonZero", "Compress", "Unique"})
"""Operators whose results have as many numbers as the contents say."""
_COMPUTED: Final = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
"""Values that are computed, so that their sizes follow."""

PADDED: Final = (
    ((2, 1, 5), (2, 0)),
    ((3, 4, 0), (3, 0, 1)),
    ((2, 3, 4), (6, 1)),
    ((1, 7, 40), (44,)),
    ((1, 1, 200_000), (7,)),
)
"""Calls with padding: sequences, new tokens and past tokens, and slots of padding of each."""

LENGTHS: Final = ((1, 1, 0), (2, 1, 5), (1, 4, 0), (2, 3, 4), (1, 7, 40), (1, 1, 200_000))
"""Sequences, new tokens and past tokens; the last is longer than windows are."""


def of_each_mask(layers: Iterable[ConvertedLayer]) -> list[ConvertedLayer]:
    """Return the first layer of each mask; most layers share theirs."""
    first: dict[tuple[ir.Value | None, int], ConvertedLayer] = {}
    for layer in layers:
        first.setdefault(_mask_of(layer.attention), layer)
    return list(first.values())


def window_of_mask(attention: AttentionNode, plan: Plan, model: ir.Model) -> int | None:
    """Return how many keys the mask of a layer shows to a query, its own included; 0 for all.

    Returns:
        None where the mask hides something else than the future and what is behind a window.
    """
    bias, causal = attention.bias, attribute_int(attention.node, "causal", 0) == 1
    if bias is None:
        return 0 if causal else None
    expect_no_contents(bias, plan, model)
    masks = [_bias_of_call(bias, plan, model, call) for call in LENGTHS[:-1]]
    if any(((numbers != 0) & (numbers > _HIDDEN)).any() for numbers in masks):
        raise NoMatch("it adds numbers to the scores, as ALiBi does")
    last, mask = _last_call(bias, plan, model)
    masks.append(mask)
    shown, longest = (masks[-1] == 0).sum(axis=-1).max(initial=0), sum(last[1:])
    is_for_all = masks[-1].shape[-1:] == (1,)
    window = 0 if is_for_all or shown >= longest else int(shown)
    calls = zip(masks, (*LENGTHS[:-1], last), strict=True)
    if all(hides_the_future(*call, already_causal=causal, window=window) for call in calls):
        return window
    return None


def _bias_of_call(bias: ir.Value, plan: Plan, model: ir.Model, call: tuple[int, int, int]) -> Array:
    try:
        return evaluate([bias], dict(inputs_of_call(plan, model, *call)))[0]
    except NoMatch:
        # Sizes of queries may be told by what is declared, where their contents are not computed.
        arrays = arrays_of_call([bias], plan, model, call) | _attended(model, call)
        if any(kind(node) in BY_CONTENTS for node in live_nodes([bias], cut=arrays.keys())):
            raise
        return evaluate([bias], arrays)[0]


def _last_call(bias: ir.Value, plan: Plan, model: ir.Model) -> tuple[tuple[int, int, int], Array]:
    """Return the last of ``LENGTHS``, or the longest call that a table has rows for, and its bias.

    A table ends where one token more cannot be computed.
    """

    def computed(call: tuple[int, int, int]) -> Array | None:
        with suppress(NoMatch):
            return _bias_of_call(bias, plan, model, call)
        return None

    mask = computed(LENGTHS[-1])
    if mask is not None:
        return LENGTHS[-1], mask
    tables = [value for node in live_nodes([bias]) for value in node.inputs if value is not None]
    counts = {
        size for value in tables if value.const_value is not None for size in sizes(value) or ()
    }
    for rows in sorted(size for size in counts if isinstance(size, int) and size > 1):
        call = (1, 1, rows - 1)
        mask = computed(call)
        if mask is not None and computed((1, 1, rows)) is None:
            return call, mask
    raise NoMatch(f"{bias.name} cannot be computed for {sum(LENGTHS[-1][1:]):,} tokens")


def windows(layers: Iterable[ConvertedLayer], plan: Plan, model: ir.Model) -> list[int]:
    """Return how many keys a query of each layer sees, its own included; 0 for all."""
    shown: dict[tuple[ir.Value | None, int], int] = {}
    result = []
    for layer in layers:
        layer_windows = [layer.plan.sliding_window]
        for attention in layer.attentions:
            key = _mask_of(attention)
            if key not in shown:
                shown[key] = _expect_window(layer, attention, plan, model)
            layer_windows.append(shown[key])
        result.append(min((window for window in layer_windows if window), default=0))
    return result


def _mask_of(attention: AttentionNode) -> tuple[ir.Value | None, int]:
    return attention.bias, attribute_int(attention.node, "causal", 0)


def _expect_window(
    layer: ConvertedLayer, attention: AttentionNode, plan: Plan, model: ir.Model
) -> int:
    try:
        shown, why = window_of_mask(attention, plan, model), complaint(attention)
    except NoMatch as miss:
        shown, why = None, miss.reason
    if shown is None:
        raise NoMatch(f"the mask of layer {layer.plan.layer} is not shown to be causal: {why}")
    return shown


def hides_padding(attention: AttentionNode, plan: Plan, model: ir.Model) -> bool:
    """Return True if a mask hides padding on the left, the future and what is behind a window.

    And nothing else, in calls with padding too.
    Queries that are padding may see anything: nobody reads what becomes of them.
    """
    bias, window = attention.bias, window_of_mask(attention, plan, model)
    if bias is None or window is None:
        return False
    causal = attribute_int(attention.node, "causal", 0) == 1
    for call, padding in PADDED:
        (numbers,) = evaluate([bias], dict(inputs_of_call(plan, model, *call, padding=padding)))
        if not hides_the_future(
            numbers, call, already_causal=causal, window=window, padding=padding
        ):
            return False
    return True


def is_past_of_padded(value: ir.Value, plan: Plan, model: ir.Model) -> bool:
    """Return True if ``[B]`` or ``[1]`` counts the tokens in the caches, padding among them."""
    return all(_counts_past(value, plan, model, call, padding) for call, padding in PADDED)


def complaint(attention: AttentionNode) -> str:
    """Return the problem of the mask of a layer that is not causal, as a clause."""
    return (
        "there is no mask"
        if attention.bias is None
        else "the mask hides more than the future, or less"
    )


def input_of(model: ir.Model, name: str | None) -> ir.Value | None:
    """Return the input of that name; None if the graph has none."""
    return next((value for value in model.graph.inputs if value.name == name), None)


def expect_no_contents(value: ir.Value, plan: Plan, model: ir.Model) -> None:
    """Refuse a value that is computed from tokens or positions, and not from their number only.

    Lengths can be tried out; what a prompt may be cannot: a mask may hide certain tokens.
    """
    ancestors = data_ancestors([value])
    for name in (plan.interface.tokens, plan.interface.position_ids):
        if input_of(model, name) in ancestors:
            raise NoMatch(f"the mask depends on the contents of {name}")


def inputs_of_call(
    plan: Plan,
    model: ir.Model,
    batch: int,
    tokens: int,
    past: int,
    *,
    padding: tuple[int, ...] = (0,),
) -> Iterator[tuple[ir.Value, Array]]:
    """Yield the inputs of a call; caches have a size only."""
    places = np.arange(past + tokens)
    first = np.broadcast_to(np.array(padding)[:, None], (batch, 1))
    caches = {cache.past for cache in plan.caches}
    interface = plan.interface
    for value in model.graph.inputs:
        dtype = None if value.dtype is None else value.dtype.numpy()
        if value.name in caches:
            heads, width = static_dim(value, 1), static_dim(value, 3)
            if heads is not None and width is not None:
                shape = (batch, heads, plan.overlay_rows + past, width)
                yield value, np.broadcast_to(np.zeros((), np.uint8), shape)
        elif value.name == interface.tokens:
            yield value, np.zeros((batch, tokens), dtype)
        elif value.name == interface.attention_mask:
            yield value, (places >= first).astype(dtype)
        elif value.name == interface.position_ids:
            yield value, np.maximum(places[past:] - first, 0).astype(dtype)


def hides_the_future(
    bias: Array,
    call: tuple[int, int, int],
    *,
    already_causal: bool,
    window: int = 0,
    padding: tuple[int, ...] = (0,),
) -> bool:
    """Return True if a bias is 0 for the past, and hides the future unless the operator does.

    Args:
        call: its sequences, new tokens and past tokens.
        padding: slots of padding, of each sequence or of all; these have to be hidden, too.
    """
    batch, tokens, past = call
    if bias.ndim != 4:
        return False
    try:
        numbers = np.broadcast_to(
            bias.astype(np.float64), (batch, bias.shape[1], tokens, past + tokens)
        )
    except ValueError:
        return False
    ago = past + np.arange(tokens)[:, None] - np.arange(past + tokens)
    seen = (ago >= 0) & (ago < window) if window else ago >= 0
    hidden = ~seen & (ago >= 0) if already_causal else ~seen
    if not any(padding):
        shows = bool((numbers[..., seen] == 0).all())
        return shows and bool((numbers[..., hidden] <= _HIDDEN).all())
    for b, first in enumerate(np.broadcast_to(padding, batch)):
        is_token = past + np.arange(tokens)[:, None] >= first
        is_padding = np.arange(past + tokens) < first
        shown = numbers[b][:, seen & is_token & ~is_padding]
        hidden_numbers = numbers[b][:, is_token & (hidden | is_padding)]
        if not ((shown == 0).all() and (hidden_numbers <= _HIDDEN).all()):
            return False
    return True


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
            condition, masked = choice.inputs[0], choice.inputs[3 - use.idx]
            numbers = None if masked is None else masked.const_value
            if condition is None or numbers is None or numbers.size != 1:
                continue
            if choice.outputs[0].is_graph_output():
                continue
            if _is_always(condition, use.idx == 1, plan, model):
                choice.outputs[0].replace_all_uses_with(attended)
                count += 1
    return count


def _is_always(condition: ir.Value, expected: bool, plan: Plan, model: ir.Model) -> bool:
    """Return True if a condition ``[B, 1, T, 1]`` or smaller is this in calls without padding."""
    try:
        expect_no_contents(condition, plan, model)
        for call in LENGTHS[:-1]:
            (numbers,) = evaluate([condition], dict(inputs_of_call(plan, model, *call)))
            rows = (call[0], 1, call[1], 1)
            if np.broadcast_shapes(numbers.shape, rows) != rows or not (numbers == expected).all():
                return False
    except (NoMatch, ValueError):  # of another shape
        return False
    return True


def is_positions(value: ir.Value, plan: Plan, model: ir.Model) -> bool:
    """Return True if a value ``[B, T]`` or ``[1, T]`` counts on from the past, without padding."""
    try:
        expect_no_contents(value, plan, model)
        for batch, tokens, past in LENGTHS:
            (positions,) = evaluate([value], dict(inputs_of_call(plan, model, batch, tokens, past)))
            expected = np.arange(past, past + tokens)
            if (
                positions.shape not in ((1, tokens), (batch, tokens))
                or not (positions == expected).all()
            ):
                return False
    except NoMatch:
        return False
    return True


def is_past_length(value: ir.Value, plan: Plan, model: ir.Model) -> bool:
    """Return True if ``[B]`` or ``[1]`` is the number of tokens in the caches, without padding."""
    expect_no_contents(value, plan, model)
    return all(_counts_past(value, plan, model, call) for call in LENGTHS)


def _counts_past(
    value: ir.Value,
    plan: Plan,
    model: ir.Model,
    call: tuple[int, int, int],
    padding: tuple[int, ...] = (0,),
) -> bool:
    batch, _, past = call
    (lengths,) = evaluate([value], arrays_of_call([value], plan, model, call, padding))
    return lengths.shape in ((1,), (batch,)) and bool((lengths == past).all())


def arrays_of_call(
    values: Sequence[ir.Value],
    plan: Plan,
    model: ir.Model,
    call: tuple[int, int, int],
    padding: tuple[int, ...] = (0,),
) -> dict[ir.Value, Array]:
    """Return what a call of ``(batch, tokens, past)`` gives, and what Shape nodes answer in it.

    These are the nodes that values are computed from. One that asks for a size that neither the
    graph nor the call tells is left out.
    """
    return Given.of(plan, model, call, padding).arrays_for(values)


@dataclass(frozen=True)
class Given:
    """What a call gives to any value."""

    arrays: dict[ir.Value, Array]  #: inputs, and new caches, which have a size only
    names: dict[str, int]  #: sizes by the names that the token ids declare

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: ir.Model,
        call: tuple[int, int, int],
        padding: tuple[int, ...] = (0,),
    ) -> Given:
        """Read what a call gives; the arguments are those of ``arrays_of_call``."""
        ids = input_of(model, plan.interface.tokens)
        named = zip((sizes(ids) or ())[:2], call, strict=False)
        names = {name: size for name, size in named if isinstance(name, str)}
        inputs = dict(inputs_of_call(plan, model, *call, padding=padding))
        return cls(_new_caches(model, call) | inputs, names)

    def arrays_for(self, values: Sequence[ir.Value]) -> dict[ir.Value, Array]:
        """Return the arrays, and what Shape nodes answer that values are computed from."""
        arrays = dict(self.arrays)
        pending = [value.producer() for value in values if value not in arrays]
        makers: set[ir.Node] = set()
        while pending:
            maker = pending.pop()
            if maker is None or maker in makers:
                continue
            makers.add(maker)
            for node in (maker, *nested_nodes(maker)):
                answer = self.declared_shape(node)
                if answer is not None:
                    arrays[node.outputs[0]] = answer
                else:
                    inputs = (value for value in node.inputs if value is not None)
                    pending += [value.producer() for value in inputs if value not in arrays]
        return arrays

    def declared_shape(self, node: ir.Node) -> Array | None:
        """Return what a Shape node answers, where that is known without computing its input."""
        source = node.inputs[0] if node.inputs else None
        if node.op_type != "Shape" or node.domain != "" or source is None:
            return None
        shape = sizes(source)
        if shape is None or source.dtype in _COMPUTED:
            return None
        start, end = attribute_int(node, "start", 0), attribute_int(node, "end", len(shape))
        part = shape[start:end]
        answer = [self.names.get(size) if isinstance(size, str) else size for size in part]
        return None if None in answer else np.array(answer, np.int64)


def presents(model: ir.Model) -> dict[ir.Value, tuple[int, int]]:
    """Return what the encoders make: heads and bytes of a row of each cache."""
    caches = (node.outputs[0] for node in Encode.nodes(model.graph))
    return {value: (static_dim(value, 1) or 1, static_dim(value, 3) or 1) for value in caches}


def _new_caches(model: ir.Model, call: tuple[int, int, int]) -> dict[ir.Value, Array]:
    """Return arrays of the sizes of new caches."""
    batch, tokens, past = call
    return {
        present: np.broadcast_to(np.zeros((), np.uint8), (batch, heads, tokens + past, width))
        for present, (heads, width) in presents(model).items()
    }


def _attended(model: ir.Model, call: tuple[int, int, int]) -> dict[ir.Value, Array]:
    """Return arrays of the sizes of what attention returns, for values made of no contents."""
    batch, tokens, _ = call
    arrays = {}
    for value in (node.outputs[0] for node in Attention.nodes(model.graph)):
        heads, width = static_dim(value, 1), static_dim(value, 3)
        if heads is not None and width is not None and value.dtype is not None:
            zero = np.zeros((), value.dtype.numpy())
            arrays[value] = np.broadcast_to(zero, (batch, heads, tokens, width))
    return arrays
