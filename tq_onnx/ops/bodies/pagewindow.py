"""Pieces of the paged operators' bodies for exact tokens in pages.

``tq_onnx.codec.pagewindow`` has the layout and the rule. Its tables are constants of the body,
``capacities`` and ``places`` int64 [2 S]: those of a first page, then those of any other one. A
cache without entries has the attributes recent and sinks 0, and takes nothing from them.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from typing import Final

from onnxscript import BOOL, FLOAT, INT32, INT64, UINT8, script

from tq_onnx.codec.window import ELEMENT_BYTES, TAG_BYTES
from tq_onnx.ops.bodies import F32, I64, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.half import half_bytes
from tq_onnx.ops.bodies.window import finite_vectors

_ELEMENT: Final = ELEMENT_BYTES
_TAG: Final = TAG_BYTES
_BYTES_OF_TAG: Final = [256**k for k in range(TAG_BYTES)]


@script(TURBOQUANT, default_opset=op)
def page_bytes(cache: UINT8[...]) -> UINT8[...]:
    """Bytes of each head [P, N, S W] of pages [P, S, N, W]."""
    tail_size = op.Constant(value_ints=[-1])
    pages = op.Shape(cache, start=0, end=1)
    heads = op.Shape(cache, start=2, end=3)
    planes = op.Reshape(cache, op.Concat(pages, heads, tail_size, axis=0))
    return planes


@script(TURBOQUANT, default_opset=op)
def rows_of_pages(cache: UINT8[...], row_stride: int) -> UINT8[...]:
    """Pages [P, S, N, stride] of the rows alone, of pages [P, S, N, W]."""
    first = op.Constant(value_ints=[0])
    width = op.Shape(cache, start=3)
    stride_attribute = op.Unsqueeze(op.Constant(value_int=row_stride), first)
    stride = op.Where(op.Equal(stride_attribute, first), width, stride_attribute)
    used = op.Mul(op.Shape(cache, start=1, end=2), stride)
    rows = op.Slice(page_bytes(cache), first, used, op.Constant(value_ints=[2]))
    row_pages = op.Reshape(rows, op.Concat(op.Shape(cache, start=0, end=3), stride, axis=0))
    return row_pages


@script(TURBOQUANT, default_opset=op)
def pages_of_tokens(
    cache: UINT8[...], block_table: INT32[...], requests: INT64[...], slots: INT64[...]
) -> INT64[...]:
    """Page [T] of each token in slots [1, T] of its request."""
    last = op.Constant(value_ints=[-1])
    columns = op.Div(op.Reshape(slots, last), op.Shape(cache, start=1, end=2))
    at = op.Concat(op.Unsqueeze(requests, last), op.Unsqueeze(columns, last), axis=-1)
    numbers = op.GatherND(op.Cast(block_table, to=I64), at)
    return numbers


@script(TURBOQUANT, default_opset=op)
def begun_pages(past: UINT8[...], numbers: INT64[...], slots: INT64[...]) -> UINT8[...]:
    """Pages [P, S, N, W], zeros where tokens [T] of these pages are the first ones."""
    unit = op.Constant(value_ints=[1])
    count = op.Shape(past, start=0, end=1)
    size = op.Shape(past, start=1, end=2)
    within = op.Mod(op.Reshape(slots, op.Constant(value_ints=[-1])), size)
    is_first = op.Equal(within, op.Constant(value_int=0))
    # One page more than there are stands for the tokens that are not the first ones.
    marked = op.Where(is_first, numbers, count)
    none = op.Expand(op.Constant(value_int=0), op.Add(count, unit))
    index = op.Unsqueeze(marked, op.Constant(value_ints=[-1]))
    begun = op.ScatterND(none, index, op.Expand(op.Constant(value_int=1), op.Shape(marked)))
    unmarked = op.Equal(
        op.Slice(begun, op.Constant(value_ints=[0]), count), op.Constant(value_int=0)
    )
    by_page = op.Unsqueeze(unmarked, op.Constant(value_ints=[1, 2, 3]))
    pages = op.Where(by_page, past, op.Cast(op.Constant(value_int=0), to=U8))
    return pages


@script(TURBOQUANT, default_opset=op)
def pages_with_rows(cache: UINT8[...], rows: UINT8[...]) -> UINT8[...]:
    """Pages [P, S, N, W] with other rows [P, S, N, stride]."""
    row_bytes = page_bytes(rows)
    first = op.Shape(row_bytes, start=2)
    end = op.Constant(value_ints=[9223372036854775807])
    tail_size = op.Slice(page_bytes(cache), first, end, op.Constant(value_ints=[2]))
    pages = op.Reshape(op.Concat(row_bytes, tail_size, axis=2), op.Shape(cache))
    return pages


@script(TURBOQUANT, default_opset=op)
def oldest_tokens(
    positions: INT64[...], slots: INT64[...], capacities: INT64[...], recent: int
) -> INT64[...]:
    """First of the newest tokens that queries at positions [...] take, in pages of [1] slots."""
    zero = op.Constant(value_int=0)
    unit = op.Constant(value_int=1)
    most = op.Constant(value_int=recent)
    column = op.Div(positions, slots)
    slot = op.Sub(positions, op.Mul(column, slots))
    counts = op.Min(capacities, most)
    count = op.Gather(counts, op.Add(op.Mul(op.Min(column, unit), slots), slot))
    before = op.Min(op.Max(op.Sub(column, unit), zero), unit)
    last = op.Sub(op.Mul(op.Add(before, unit), slots), unit)
    in_page = op.Add(op.Sub(positions, count), unit)
    first_kept = op.Sub(op.Mul(column, slots), op.Gather(counts, last))
    in_both = op.Max(first_kept, op.Add(op.Sub(positions, most), unit))
    is_alone = op.Or(op.LessOrEqual(count, slot), op.Equal(column, zero))
    oldest = op.Where(is_alone, in_page, in_both)
    return oldest


@script(TURBOQUANT, default_opset=op)
def places_of_tokens(
    tokens: INT64[...],
    ends: INT64[...],
    slots: INT64[...],
    capacities: INT64[...],
    places: INT64[...],
    recent: int,
    sinks: int,
) -> INT64[...]:
    """Place of tokens in pages of [1] slots once requests have ``ends`` tokens; -1 for none.

    Tokens and ends are broadcast.
    """
    zero = op.Constant(value_int=0)
    unit = op.Constant(value_int=1)
    first_tokens = op.Constant(value_int=sinks)
    column = op.Div(tokens, slots)
    begin = op.Mul(column, slots)
    table = op.Mul(op.Min(column, unit), slots)
    place = op.Gather(places, op.Add(table, op.Sub(tokens, begin)))
    last = op.Max(op.Sub(op.Min(ends, op.Add(begin, slots)), op.Add(begin, unit)), zero)
    counts = op.Min(capacities, op.Constant(value_int=recent))
    in_front = op.Where(op.Equal(column, zero), first_tokens, zero)
    live = op.Add(in_front, op.Gather(counts, op.Add(table, last)))
    is_there = op.Or(op.Less(tokens, first_tokens), op.Less(place, live))
    known = op.Where(is_there, place, op.Constant(value_int=-1))
    return known


@script(TURBOQUANT, default_opset=op)
def written_places(
    slots: INT64[...],
    ends: INT64[...],
    requests: INT64[...],
    size: INT64[...],
    capacities: INT64[...],
    places: INT64[...],
    recent: int,
    sinks: int,
) -> INT64[...]:
    """Place of each new token [T] that a later one of the call does not take; -1 for none.

    Slots [1, T] are those of requests that have ``ends`` [R] tokens then, in pages of [1] slots.
    """
    tokens = op.Reshape(slots, op.Constant(value_ints=[-1]))
    end = op.Gather(ends, requests)
    place = places_of_tokens(tokens, end, size, capacities, places, recent, sinks)
    unit = op.Constant(value_int=1)
    behind = op.Mul(op.Add(op.Div(tokens, size), unit), size)
    last = op.Sub(op.Min(end, behind), unit)
    oldest = oldest_tokens(last, size, capacities, recent)
    is_sink = op.Less(tokens, op.Constant(value_int=sinks))
    stays = op.Or(is_sink, op.GreaterOrEqual(tokens, oldest))
    unmarked = op.Where(stays, place, op.Constant(value_int=-1))
    return unmarked


@script(TURBOQUANT, default_opset=op)
def pages_without_remains(
    cache: UINT8[...],
    vectors: FLOAT[...],
    numbers: INT64[...],
    slots: INT64[...],
    ends: INT64[...],
    requests: INT64[...],
    capacities: INT64[...],
    row_stride: int,
    recent: int,
    sinks: int,
) -> UINT8[...]:
    """Pages [P, S, N, W] with zeros in what rows of the new tokens' pages leave of places.

    New tokens are in slots [1, T] of requests that have ``ends`` [R] tokens then, in pages
    ``numbers`` [T].
    """
    zero = op.Constant(value_int=0)
    unit = op.Constant(value_int=1)
    head_size = op.Shape(vectors, start=3)
    size = op.Add(
        op.Mul(head_size, op.Constant(value_ints=[_ELEMENT])), op.Constant(value_ints=[_TAG])
    )
    count = op.Shape(cache, start=1, end=2)
    column = op.Div(op.Reshape(slots, op.Constant(value_ints=[-1])), count)
    begin_of_page = op.Mul(column, count)
    used = op.Min(op.Sub(op.Gather(ends, requests), begin_of_page), count)
    table = op.Mul(op.Min(column, unit), count)
    counts = op.Min(capacities, op.Constant(value_int=recent))
    room = op.Gather(counts, op.Sub(op.Add(table, used), unit))
    in_front = op.Where(op.Equal(column, zero), op.Constant(value_int=sinks), zero)
    planes = page_bytes(cache)
    end = op.Shape(planes, start=2)
    all_places = op.Add(in_front, op.Constant(value_int=recent))
    behind_rows = op.Mul(used, op.Constant(value_int=row_stride))
    first = op.Max(behind_rows, op.Sub(end, op.Mul(all_places, size)))
    last = op.Sub(end, op.Mul(op.Add(in_front, room), size))
    # All tokens of a page say the same.
    index = op.Unsqueeze(numbers, op.Constant(value_ints=[-1]))
    none = op.Expand(zero, op.Shape(cache, start=0, end=1))
    axes = op.Constant(value_ints=[1, 2])
    first_of_page = op.Unsqueeze(op.ScatterND(none, index, first), axes)
    last_of_page = op.Unsqueeze(op.ScatterND(none, index, last), axes)
    byte = op.Range(zero, op.Squeeze(end), unit)
    stays = op.Or(op.Less(byte, first_of_page), op.GreaterOrEqual(byte, last_of_page))
    cleared = op.Where(stays, planes, op.Cast(zero, to=U8))
    pages = op.Reshape(cleared, op.Shape(cache))
    return pages


@script(TURBOQUANT, default_opset=op)
def pages_with_entries(
    cache: UINT8[...],
    vectors: FLOAT[...],
    numbers: INT64[...],
    slots: INT64[...],
    places: INT64[...],
) -> UINT8[...]:
    """Pages [P, S, N, W] with entries of vectors [1, N, T, D] in places [T] of their pages."""
    first = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    axis = op.Constant(value_ints=[2])
    wide = op.Cast(vectors, to=F32)
    halves = half_bytes(finite_vectors(wide))
    unit = op.Constant(value_int=1)
    number = op.Add(op.Reshape(slots, op.Constant(value_ints=[1, 1, -1, 1])), unit)
    byte = op.Constant(value_int=256)
    tag = op.Cast(op.Mod(op.Div(number, op.Constant(value_ints=_BYTES_OF_TAG)), byte), to=U8)
    leading = op.Shape(vectors, start=0, end=3)
    tags = op.Expand(tag, op.Concat(leading, op.Constant(value_ints=[_TAG]), axis=0))
    by_head = op.Squeeze(op.Concat(halves, tags, axis=-1), first)
    entries = op.Transpose(by_head, perm=[1, 0, 2])
    size = op.Shape(entries, start=2)
    planes = page_bytes(cache)
    end = op.Shape(planes, start=2)
    # Entries of tokens without a place go behind the pages, and are cut off again.
    begin = op.Sub(end, op.Mul(op.Add(places, unit), size))
    at = op.Where(op.Less(places, op.Constant(value_int=0)), end, begin)
    zero = op.Constant(value_int=0)
    steps = op.Range(zero, op.Squeeze(size), unit)
    bytes_of_entry = op.Add(op.Unsqueeze(at, op.Constant(value_ints=[1, 2])), steps)
    heads = op.Range(zero, op.Squeeze(op.Shape(entries, start=1, end=2)), unit)
    shape = op.Shape(entries)
    page_index = op.Expand(op.Unsqueeze(numbers, op.Constant(value_ints=[1, 2])), shape)
    head_index = op.Expand(op.Unsqueeze(heads, op.Constant(value_ints=[0, 2])), shape)
    byte_index = op.Expand(bytes_of_entry, shape)
    index = op.Concat(
        op.Unsqueeze(page_index, last),
        op.Unsqueeze(head_index, last),
        op.Unsqueeze(byte_index, last),
        axis=-1,
    )
    zero_byte = op.Cast(zero, to=U8)
    room = op.Expand(zero_byte, op.Concat(op.Shape(planes, start=0, end=2), size, axis=0))
    written = op.ScatterND(op.Concat(planes, room, axis=2), index, entries)
    pages = op.Reshape(op.Slice(written, first, end, axis), op.Shape(cache))
    return pages


@script(TURBOQUANT, default_opset=op)
def entries_of_pages(
    cache: UINT8[...], block_table: INT32[...], head_size: INT64[...], recent: int, sinks: int
) -> UINT8[...]:
    """Entries [R, N, C K + 1, bytes] of requests, those of K places of each page; the last is 0.

    In each page the last place comes first.
    """
    unit = op.Constant(value_ints=[1])
    first = op.Constant(value_ints=[0])
    axis = op.Constant(value_ints=[3])
    count = op.Add(op.Constant(value_int=recent), op.Constant(value_int=sinks))
    places = op.Max(op.Unsqueeze(count, first), unit)
    size = op.Add(
        op.Mul(head_size, op.Constant(value_ints=[_ELEMENT])), op.Constant(value_ints=[_TAG])
    )
    planes = page_bytes(cache)
    last = op.Sub(op.Shape(cache, start=0, end=1), unit)
    known = op.Min(op.Max(op.Cast(block_table, to=I64), first), last)
    by_head = op.Transpose(op.Gather(planes, known, axis=0), perm=[0, 2, 1, 3])
    held = op.Shape(by_head, start=3)
    used = op.Mul(places, size)
    zero_byte = op.Cast(op.Constant(value_int=0), to=U8)
    missing = op.Max(op.Sub(used, held), first)
    room = op.Expand(zero_byte, op.Concat(op.Shape(by_head, start=0, end=3), missing, axis=0))
    tail = op.Slice(by_head, op.Max(op.Sub(held, used), first), held, axis)
    leading = op.Shape(by_head, start=0, end=2)
    number = op.Mul(op.Shape(by_head, start=2, end=3), places)
    shape = op.Concat(leading, number, size, axis=0)
    of_places = op.Reshape(op.Concat(room, tail, axis=3), shape)
    none = op.Expand(zero_byte, op.Concat(leading, unit, size, axis=0))
    entries = op.Concat(of_places, none, axis=2)
    return entries


@script(TURBOQUANT, default_opset=op)
def entries_of_page_tokens(
    total: INT64[...],
    block_table: INT32[...],
    slots: INT64[...],
    places: INT64[...],
    recent: int,
    sinks: int,
) -> INT64[...]:
    """The entry [total] of ``entries_of_pages`` that each token may have; the last for none."""
    zero = op.Constant(value_int=0)
    unit = op.Constant(value_int=1)
    tokens = op.Range(zero, op.Squeeze(total), unit)
    column = op.Div(tokens, slots)
    within = op.Sub(tokens, op.Mul(column, slots))
    place = op.Gather(places, op.Add(op.Mul(op.Min(column, unit), slots), within))
    count = op.Max(op.Add(op.Constant(value_int=recent), op.Constant(value_int=sinks)), unit)
    entry = op.Sub(op.Mul(op.Add(column, unit), count), op.Add(place, unit))
    has_place = op.And(op.GreaterOrEqual(place, zero), op.Less(place, count))
    none = op.Mul(op.Shape(block_table, start=1, end=2), count)
    entries = op.Where(has_place, entry, none)
    return entries


@script(TURBOQUANT, default_opset=op)
def live_tokens(
    total: INT64[...],
    ends: INT64[...],
    slots: INT64[...],
    capacities: INT64[...],
    places: INT64[...],
    recent: int,
    sinks: int,
) -> BOOL[...]:
    """Whether a page still has the place of each token: [R, 1, total], of requests' ends [R]."""
    zero = op.Constant(value_int=0)
    tokens = op.Range(zero, op.Squeeze(total), op.Constant(value_int=1))
    by_request = op.Unsqueeze(ends, op.Constant(value_ints=[1, 2]))
    known = places_of_tokens(tokens, by_request, slots, capacities, places, recent, sinks)
    live = op.GreaterOrEqual(known, zero)
    return live


@script(TURBOQUANT, default_opset=op)
def taken_in_pages(
    query: FLOAT[...],
    past_length: INT64[...],
    has_entry: BOOL[...],
    slots: INT64[...],
    capacities: INT64[...],
    recent: int,
    sinks: int,
) -> BOOL[...]:
    """Which tokens each query takes exactly: [R, H, T, total], has_entry [R, N, total]."""
    zero = op.Constant(value_int=0)
    unit = op.Constant(value_int=1)
    last = op.Constant(value_ints=[-1])
    total = op.Squeeze(op.Shape(has_entry, start=2))
    tokens = op.Range(zero, total, unit)
    new = op.Squeeze(op.Shape(query, start=2, end=3))
    past = op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1]))
    missing = op.Not(op.Or(has_entry, op.GreaterOrEqual(tokens, past)))
    single = op.Constant(value_ints=[1])
    behind, _last = op.TopK(op.Where(missing, op.Add(tokens, unit), zero), single)
    before, _first = op.TopK(op.Where(missing, tokens, total), single, largest=0)
    is_sink = op.Less(tokens, op.Min(before, op.Constant(value_int=sinks)))
    has_recent = op.GreaterOrEqual(tokens, behind)
    steps = op.Unsqueeze(op.Range(zero, new, unit), op.Constant(value_ints=[1]))
    positions = op.Add(op.Unsqueeze(past, last), steps)
    is_near = op.GreaterOrEqual(tokens, oldest_tokens(positions, slots, capacities, recent))
    axis = op.Constant(value_ints=[2])
    by_head = op.Or(op.And(is_near, op.Unsqueeze(has_recent, axis)), op.Unsqueeze(is_sink, axis))
    heads = op.Shape(has_entry, start=1, end=2)
    group = op.Div(op.Shape(query, start=1, end=2), heads)
    batch = op.Shape(query, start=0, end=1)
    tail_size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(has_entry, start=2), axis=0)
    grouped = op.Expand(
        op.Unsqueeze(by_head, axis), op.Concat(batch, heads, group, tail_size, axis=0)
    )
    exact = op.Reshape(grouped, op.Concat(op.Shape(query, start=0, end=2), tail_size, axis=0))
    return exact
