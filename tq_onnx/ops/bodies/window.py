"""Pieces of both operators for an exact window: entries in front of the rows or behind them.

``tq_onnx.codec.window`` has the layout and the rule. One more entry than there are, with the tag 0,
stands for tokens that never have one, so that nothing here is empty.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from typing import Final

from onnxscript import BOOL, FLOAT, INT64, UINT8, script

from tq_onnx.codec.window import ELEMENT_BYTES, TAG_BYTES
from tq_onnx.ops.bodies import F32, I64, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.attention import key_scores, value_weights
from tq_onnx.ops.bodies.elements import sum_of_floats
from tq_onnx.ops.bodies.half import half_bytes, half_values

_ELEMENT: Final = ELEMENT_BYTES
_TAG: Final = TAG_BYTES
_PLACES: Final = [256**k for k in range(TAG_BYTES)]
_LARGEST: Final = 3.4028234663852886e38
_END: Final = 9223372036854775807


@script(TURBOQUANT, default_opset=op)
def rows_behind(cache: UINT8[...], overlay_rows: int) -> UINT8[...]:
    """Rows of the tokens of a cache [B, N, P, W], behind those of the overlay."""
    first = op.Unsqueeze(op.Constant(value_int=overlay_rows), op.Constant(value_ints=[0]))
    end = op.Constant(value_ints=[_END])
    rows = op.Slice(cache, first, end, op.Constant(value_ints=[2]))
    return rows


@script(TURBOQUANT, default_opset=op)
def entry_rows(cache: UINT8[...], head_size: INT64[...]) -> INT64[...]:
    """Rows of an entry in a cache [B, N, S, W]: [1]."""
    width = op.Shape(cache, start=3)
    element = op.Constant(value_ints=[_ELEMENT])
    used = op.Add(op.Mul(head_size, element), op.Constant(value_ints=[_TAG]))
    rows = op.Div(op.Sub(op.Add(used, width), op.Constant(value_ints=[1])), width)
    return rows


@script(TURBOQUANT, default_opset=op)
def entries_of(cache: UINT8[...], head_size: INT64[...], recent: int, sinks: int) -> UINT8[...]:
    """Entries [B, N, E + 1, bytes] of a cache; zeros for what it has no rows for, and the last."""
    first = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    rows = entry_rows(cache, head_size)
    entries = op.Add(op.Constant(value_int=recent), op.Constant(value_int=sinks))
    used = op.Mul(entries, rows)
    some = op.Slice(cache, first, used, op.Constant(value_ints=[2]))
    missing = op.Sub(op.Add(used, rows), op.Shape(some, start=2, end=3))
    leading = op.Shape(cache, start=0, end=2)
    width = op.Shape(cache, start=3)
    nothing = op.Cast(op.Constant(value_int=0), to=U8)
    fill = op.Expand(nothing, op.Concat(leading, missing, width, axis=0))
    shape = op.Concat(leading, op.Add(entries, one), op.Mul(rows, width), axis=0)
    made = op.Reshape(op.Concat(some, fill, axis=2), shape)
    return made


@script(TURBOQUANT, default_opset=op)
def first_rows(cache: UINT8[...], rows: INT64[...], recent: int, sinks: int) -> INT64[...]:
    """First rows [1, 1, E, 1] of entries in the spare rows of a cache; some may be negative."""
    newest_tokens = op.Constant(value_int=recent)
    count = op.Add(newest_tokens, op.Constant(value_int=sinks))
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    # The ring is in front of the sinks.
    place = op.Mod(op.Add(numbers, newest_tokens), op.Max(count, op.Constant(value_int=1)))
    row = op.Add(op.Mul(op.Sub(place, count), rows), op.Shape(cache, start=2, end=3))
    first = op.Unsqueeze(row, op.Constant(value_ints=[0, 1, 3]))
    return first


@script(TURBOQUANT, default_opset=op)
def spare_entries_of(
    cache: UINT8[...], head_size: INT64[...], ends: INT64[...], recent: int, sinks: int
) -> UINT8[...]:
    """Entries [B, N, E + 1, bytes] behind the rows of so many tokens, [B or 1]; zeros for none."""
    zero = op.Constant(value_ints=[0])
    axis = op.Constant(value_ints=[2])
    zero_byte = op.Cast(op.Constant(value_int=0), to=U8)
    rows = entry_rows(cache, head_size)
    newest_tokens = op.Unsqueeze(op.Constant(value_int=recent), zero)
    count = op.Add(newest_tokens, op.Unsqueeze(op.Constant(value_int=sinks), zero))
    begin = op.Sub(op.Shape(cache, start=2, end=3), op.Mul(count, rows))
    leading = op.Shape(cache, start=0, end=2)
    width = op.Shape(cache, start=3)
    tail = op.Slice(cache, op.Max(begin, zero), op.Constant(value_ints=[_END]), axis)
    room_shape = op.Concat(leading, op.Max(op.Neg(begin), zero), width, axis=0)
    room = op.Expand(zero_byte, room_shape)
    size = op.Mul(rows, width)
    shape = op.Concat(leading, count, size, axis=0)
    places = op.Reshape(op.Concat(room, tail, axis=2), shape)
    ring = op.Slice(places, zero, newest_tokens, axis)
    by_number = op.Concat(op.Slice(places, newest_tokens, count, axis), ring, axis=2)
    lengths = op.Reshape(ends, op.Constant(value_ints=[-1, 1, 1, 1]))
    is_spare = op.GreaterOrEqual(first_rows(cache, rows, recent, sinks), lengths)
    last_shape = op.Concat(leading, op.Constant(value_ints=[1]), size, axis=0)
    last = op.Expand(zero_byte, last_shape)
    entries = op.Concat(op.Where(is_spare, by_number, zero_byte), last, axis=2)
    return entries


@script(TURBOQUANT, default_opset=op)
def ends_of(vectors: FLOAT[...], past_length: INT64[...]) -> INT64[...]:
    """Tokens [B or 1] of each sequence with the new vectors [B, N, T, D]."""
    ends = op.Add(past_length, op.Shape(vectors, start=2, end=3))
    return ends


@script(TURBOQUANT, default_opset=op)
def overlay_of_spare(past: UINT8[...], present: UINT8[...], entries: UINT8[...]) -> UINT8[...]:
    """Entries of a past as rows; zeros where the present has more rows, as entries end with it."""
    has_grown = op.Less(op.Shape(past, start=2, end=3), op.Shape(present, start=2, end=3))
    in_place = op.Where(has_grown, op.Cast(op.Constant(value_int=0), to=U8), entries)
    rest_size = op.Constant(value_ints=[-1])
    by_row = op.Concat(op.Shape(past, end=2), rest_size, op.Shape(past, start=3), axis=0)
    overlay = op.Reshape(in_place, by_row)
    return overlay


@script(TURBOQUANT, default_opset=op)
def with_spare_entries(
    present: UINT8[...], entries: UINT8[...], ends: INT64[...], recent: int, sinks: int
) -> UINT8[...]:
    """A cache [B, N, S, W] with entries [B, N, E + 1, bytes] in the rows behind its tokens."""
    zero = op.Constant(value_ints=[0])
    axis = op.Constant(value_ints=[2])
    first_tokens = op.Unsqueeze(op.Constant(value_int=sinks), zero)
    count = op.Add(op.Unsqueeze(op.Constant(value_int=recent), zero), first_tokens)
    width = op.Shape(present, start=3)
    rows = op.Div(op.Shape(entries, start=3), width)
    slots = op.Shape(present, start=2, end=3)
    lengths = op.Reshape(ends, op.Constant(value_ints=[-1, 1, 1, 1]))
    is_spare = op.GreaterOrEqual(first_rows(present, rows, recent, sinks), lengths)
    numbered = op.Slice(entries, zero, count, axis)
    spare = op.Where(is_spare, numbered, op.Cast(op.Constant(value_int=0), to=U8))
    ring = op.Slice(spare, first_tokens, count, axis)
    last = op.Slice(entries, count, op.Constant(value_ints=[_END]), axis)
    places = op.Concat(ring, op.Slice(spare, zero, first_tokens, axis), last, axis=2)
    leading = op.Shape(present, start=0, end=2)
    by_row = op.Concat(leading, op.Constant(value_ints=[-1]), width, axis=0)
    used = op.Mul(count, rows)
    begin = op.Sub(slots, used)
    tail = op.Slice(op.Reshape(places, by_row), op.Max(op.Neg(begin), zero), used, axis)
    front = op.Slice(present, zero, op.Max(begin, zero), axis)
    numbers = op.Range(op.Constant(value_int=0), op.Squeeze(slots), op.Constant(value_int=1))
    row = op.Unsqueeze(numbers, op.Constant(value_ints=[0, 1, 3]))
    is_entry = op.And(op.GreaterOrEqual(row, lengths), op.GreaterOrEqual(row, begin))
    cache = op.Where(is_entry, op.Concat(front, tail, axis=2), present)
    return cache


@script(TURBOQUANT, default_opset=op)
def tokens_of_entries(
    vectors: FLOAT[...], past_length: INT64[...], recent: int, sinks: int
) -> INT64[...]:
    """Place [B or 1, 1, E + 1, 1] among the new tokens of what each entry gets; T for nothing."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    newest_tokens = op.Constant(value_int=recent)
    first_tokens = op.Constant(value_int=sinks)
    entries = op.Add(newest_tokens, first_tokens)
    numbers = op.Range(zero, op.Add(entries, one), one)
    new = op.Squeeze(op.Shape(vectors, start=2, end=3))
    past = op.Reshape(past_length, op.Constant(value_ints=[-1, 1]))
    newest = op.Sub(op.Add(past, new), one)
    age = op.Mod(op.Sub(newest, numbers), op.Max(newest_tokens, one))
    is_sink = op.Less(numbers, first_tokens)
    token = op.Where(is_sink, op.Add(numbers, op.Mul(past, zero)), op.Sub(newest, age))
    is_of_entry = op.And(
        op.Less(numbers, entries), op.Or(is_sink, op.GreaterOrEqual(token, first_tokens))
    )
    is_new = op.And(op.GreaterOrEqual(token, past), op.LessOrEqual(token, newest))
    place = op.Where(op.And(is_of_entry, is_new), op.Sub(token, past), new)
    places = op.Unsqueeze(place, op.Constant(value_ints=[1, 3]))
    return places


@script(TURBOQUANT, default_opset=op)
def picked(vectors: FLOAT[...], places: INT64[...]) -> FLOAT[...]:
    """Vectors [B, N, E, D] by their places [B or 1, 1, E, 1] among [B, N, T, D]; zeros for T."""
    wide = op.Cast(vectors, to=F32)
    one = op.Constant(value_ints=[1])
    leading = op.Shape(vectors, start=0, end=2)
    size = op.Shape(vectors, start=3)
    zeros = op.Expand(op.Constant(value_float=0.0), op.Concat(leading, one, size, axis=0))
    shape = op.Concat(leading, op.Shape(places, start=2, end=3), size, axis=0)
    found = op.GatherElements(op.Concat(wide, zeros, axis=2), op.Expand(places, shape), axis=2)
    return found


@script(TURBOQUANT, default_opset=op)
def finite_vectors(vectors: FLOAT[...]) -> FLOAT[...]:
    """Vectors [..., D], zeros for those with an element that is not finite."""
    zero = op.Constant(value_float=0.0)
    # Comparisons with NaN are false.
    finite = op.LessOrEqual(op.Abs(vectors), op.Constant(value_float=_LARGEST))
    others = op.ReduceSum(op.Cast(op.Not(finite), to=F32), op.Constant(value_ints=[-1]), keepdims=1)
    kept = op.Where(op.Equal(others, zero), vectors, zero)
    return kept


@script(TURBOQUANT, default_opset=op)
def written_entries(
    past: UINT8[...], vectors: FLOAT[...], past_length: INT64[...], recent: int, sinks: int
) -> UINT8[...]:
    """Entries [B, N, E + 1, bytes] of a cache, with those of new vectors [B, N, T, D]."""
    nothing = op.Cast(op.Constant(value_int=0), to=U8)
    head_size = op.Shape(vectors, start=3)
    old = entries_of(past, head_size, recent, sinks)
    places = tokens_of_entries(vectors, past_length, recent, sinks)
    halves = half_bytes(finite_vectors(picked(vectors, places)))
    lengths = op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1, 1]))
    number = op.Add(op.Add(places, lengths), op.Constant(value_int=1))
    byte = op.Constant(value_int=256)
    tag = op.Cast(op.Mod(op.Div(number, op.Constant(value_ints=_PLACES)), byte), to=U8)
    leading = op.Shape(old, start=0, end=3)
    tags = op.Expand(tag, op.Concat(leading, op.Constant(value_ints=[_TAG]), axis=0))
    size = op.Shape(old, start=3)
    tag_at = op.Mul(head_size, op.Constant(value_ints=[_ELEMENT]))
    tag_end = op.Add(tag_at, op.Constant(value_ints=[_TAG]))
    fill = op.Expand(nothing, op.Concat(leading, op.Sub(size, tag_end), axis=0))
    written = op.Concat(halves, tags, fill, axis=-1)
    numbers = op.Range(op.Constant(value_int=0), op.Squeeze(size), op.Constant(value_int=1))
    is_tag = op.And(op.GreaterOrEqual(numbers, tag_at), op.Less(numbers, tag_end))
    is_empty = op.Equal(lengths, op.Constant(value_int=0))
    kept = op.Where(op.And(is_empty, is_tag), nothing, old)
    is_written = op.Less(places, op.Shape(vectors, start=2, end=3))
    entries = op.Where(is_written, written, kept)
    return entries


@script(TURBOQUANT, default_opset=op)
def overlay_of(
    past: UINT8[...], entries: UINT8[...], recent: int, sinks: int, overlay_rows: int
) -> UINT8[...]:
    """The overlay of a cache, of its entries and of the rows that belong to none."""
    first = op.Constant(value_ints=[0])
    rank = op.Constant(value_ints=[2])
    rest_size = op.Constant(value_ints=[-1])
    leading = op.Shape(past, start=0, end=2)
    width = op.Shape(past, start=3)
    rows = op.Div(op.Shape(entries, start=3), width)
    count = op.Add(op.Constant(value_int=recent), op.Constant(value_int=sinks))
    used = op.Mul(count, rows)
    by_row = op.Concat(leading, rest_size, width, axis=0)
    made = op.Slice(op.Reshape(entries, by_row), first, used, rank)
    end = op.Unsqueeze(op.Constant(value_int=overlay_rows), first)
    rest = op.Slice(past, used, end, rank)
    missing = op.Sub(op.Sub(end, used), op.Shape(rest, start=2, end=3))
    nothing = op.Cast(op.Constant(value_int=0), to=U8)
    room = op.Expand(nothing, op.Concat(leading, missing, width, axis=0))
    overlay = op.Concat(made, rest, room, axis=2)
    return overlay


@script(TURBOQUANT, default_opset=op)
def entries_of_tokens(total: INT64[...], recent: int, sinks: int) -> INT64[...]:
    """The entry [total] that each token may have; the last one, of none, for the others."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    newest_tokens = op.Constant(value_int=recent)
    first_tokens = op.Constant(value_int=sinks)
    tokens = op.Range(zero, op.Squeeze(total), one)
    turn = op.Mod(op.Sub(tokens, first_tokens), op.Max(newest_tokens, one))
    in_turn = op.Where(
        op.Greater(newest_tokens, zero),
        op.Add(first_tokens, turn),
        op.Add(newest_tokens, first_tokens),
    )
    entries = op.Where(op.Less(tokens, first_tokens), tokens, in_turn)
    return entries


@script(TURBOQUANT, default_opset=op)
def tokens_with_tags(
    entries: UINT8[...], head_size: INT64[...], of_tokens: INT64[...]
) -> BOOL[...]:
    """Whether the entry of each token has its tag: [B, N, total]."""
    last = op.Constant(value_ints=[-1])
    start = op.Mul(head_size, op.Constant(value_ints=[_ELEMENT]))
    stop = op.Add(start, op.Constant(value_ints=[_TAG]))
    places = op.Constant(value_ints=_PLACES)
    numbers = op.Mul(op.Cast(op.Slice(entries, start, stop, last), to=I64), places)
    tags = op.Gather(op.ReduceSum(numbers, last, keepdims=0), of_tokens, axis=2)
    one = op.Constant(value_int=1)
    count = op.Squeeze(op.Shape(of_tokens))
    tokens = op.Range(op.Constant(value_int=0), count, one)
    has_tag = op.Equal(tags, op.Add(tokens, one))
    return has_tag


@script(TURBOQUANT, default_opset=op)
def exact_vectors(
    entries: UINT8[...],
    of_tokens: INT64[...],
    has_entry: BOOL[...],
    vectors: FLOAT[...],
    past_length: INT64[...],
) -> FLOAT[...]:
    """Vectors [B, N, total, D] at hand: of entries, else of the call [B, N, T, D], else zeros."""
    zero = op.Constant(value_int=0)
    last = op.Constant(value_ints=[-1])
    head_size = op.Shape(vectors, start=3)
    pair = op.Constant(value_ints=[_ELEMENT])
    stop = op.Mul(head_size, pair)
    stored = op.Slice(entries, op.Constant(value_ints=[0]), stop, last)
    by_element = op.Concat(op.Shape(stored, start=0, end=3), head_size, pair, axis=0)
    of_entries = op.Gather(half_values(op.Reshape(stored, by_element)), of_tokens, axis=2)
    new = op.Squeeze(op.Shape(vectors, start=2, end=3))
    count = op.Squeeze(op.Shape(of_tokens))
    tokens = op.Range(zero, count, op.Constant(value_int=1))
    place = op.Sub(tokens, op.Reshape(past_length, op.Constant(value_ints=[-1, 1])))
    is_new = op.And(op.GreaterOrEqual(place, zero), op.Less(place, new))
    places = op.Unsqueeze(op.Where(is_new, place, new), op.Constant(value_ints=[1, 3]))
    # Two bytes and back: onnxruntime may leave out a cast to float16 that another one undoes.
    halves = half_bytes(finite_vectors(picked(vectors, places)))
    of_call_shape = op.Concat(op.Shape(halves, start=0, end=3), head_size, pair, axis=0)
    of_call = half_values(op.Reshape(halves, of_call_shape))
    found = op.Where(op.Unsqueeze(has_entry, last), of_entries, of_call)
    return found


@script(TURBOQUANT, default_opset=op)
def taken_exactly(
    query: FLOAT[...], past_length: INT64[...], has_entry: BOOL[...], recent: int, sinks: int
) -> BOOL[...]:
    """Which tokens each query takes exactly: [B, H, T, total], has_entry [B, N, total]."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    last = op.Constant(value_ints=[-1])
    total = op.Squeeze(op.Shape(has_entry, start=2))
    tokens = op.Range(zero, total, one)
    new = op.Squeeze(op.Shape(query, start=2, end=3))
    past = op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1]))
    exists = op.Less(tokens, op.Add(past, new))
    at_hand = op.Or(has_entry, op.GreaterOrEqual(tokens, past))
    missing = op.And(exists, op.Not(at_hand))
    single = op.Constant(value_ints=[1])
    behind, _last = op.TopK(op.Where(missing, op.Add(tokens, one), zero), single)
    before, _first = op.TopK(op.Where(missing, tokens, total), single, largest=0)
    newest_tokens = op.Constant(value_int=recent)
    is_sink = op.Less(tokens, op.Min(before, op.Constant(value_int=sinks)))
    has_recent = op.And(op.GreaterOrEqual(tokens, behind), op.Greater(newest_tokens, zero))
    steps = op.Unsqueeze(op.Range(zero, new, one), op.Constant(value_ints=[1]))
    positions = op.Add(op.Unsqueeze(past, last), steps)
    is_near = op.Less(op.Sub(positions, tokens), newest_tokens)
    axis = op.Constant(value_ints=[2])
    by_head = op.Or(op.And(is_near, op.Unsqueeze(has_recent, axis)), op.Unsqueeze(is_sink, axis))
    heads = op.Shape(has_entry, start=1, end=2)
    group = op.Div(op.Shape(query, start=1, end=2), heads)
    batch = op.Shape(query, start=0, end=1)
    rest = op.Concat(op.Shape(query, start=2, end=3), op.Shape(has_entry, start=2), axis=0)
    grouped = op.Expand(op.Unsqueeze(by_head, axis), op.Concat(batch, heads, group, rest, axis=0))
    taken = op.Reshape(grouped, op.Concat(op.Shape(query, start=0, end=2), rest, axis=0))
    return taken


@script(TURBOQUANT, default_opset=op)
def exact_scores(query: FLOAT[...], keys: FLOAT[...], scale: float) -> FLOAT[...]:
    """Scores [B, H, T, total] of queries [B, H, T, D] against keys [B, N, total, D]."""
    ones = op.Expand(op.Constant(value_float=1.0), op.Shape(keys, start=0, end=3))
    scores = key_scores(op.Cast(query, to=F32), keys, ones, scale)
    return scores


@script(TURBOQUANT, default_opset=op)
def row_weights(weights: FLOAT[...], taken: BOOL[...]) -> FLOAT[...]:
    """Weights [B, H, T, total], zero where queries take tokens exactly."""
    kept = op.Where(taken, op.Constant(value_float=0.0), weights)
    return kept


@script(TURBOQUANT, default_opset=op)
def exact_sums(
    weights: FLOAT[...], taken: BOOL[...], values: FLOAT[...], query: FLOAT[...]
) -> FLOAT[...]:
    """Weighted sums [B, H, T, D] of the values [B, N, total, D] that queries take exactly."""
    ones = op.Expand(op.Constant(value_float=1.0), op.Shape(values, start=0, end=3))
    sums = op.Reshape(sum_of_floats(value_weights(weights, taken, ones), values), op.Shape(query))
    return sums
