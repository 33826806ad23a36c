"""Pieces of the paged operators' bodies: from packed tokens and pages to a batch, and back.

Requests become the sequences of a batch, each with its pages in a row, and the pieces of the
contiguous operators do the rest. A request with fewer new tokens than others has its last ones
again behind them; nothing reads what comes of those.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from onnxscript import FLOAT, INT32, INT64, UINT8, script

from tq_onnx.ops.bodies import I64, TURBOQUANT, U8, op


@script(TURBOQUANT, default_opset=op)
def new_tokens(cumulative: INT32[...]) -> INT64[...]:
    """New tokens of each request [R], of the R + 1 bounds between requests."""
    bounds = op.Cast(cumulative, to=I64)
    first = op.Constant(value_ints=[0])
    second = op.Constant(value_ints=[1])
    end = op.Shape(bounds)
    starts = op.Slice(bounds, first, op.Sub(end, second), first)
    counts = op.Sub(op.Slice(bounds, second, end, first), starts)
    return counts


@script(TURBOQUANT, default_opset=op)
def requests_of_tokens(cumulative: INT32[...], vectors: FLOAT[...]) -> INT64[...]:
    """Number of the request that each of the tokens of vectors [1, N, T, D] belongs to: [T]."""
    zero = op.Constant(value_int=0)
    first = op.Constant(value_ints=[0])
    second = op.Constant(value_ints=[1])
    count = op.Squeeze(op.Shape(vectors, start=2, end=3))
    tokens = op.Range(zero, count, op.Constant(value_int=1))
    bounds = op.Cast(cumulative, to=I64)
    ends = op.Slice(bounds, second, op.Shape(bounds), first)
    is_behind = op.LessOrEqual(op.Unsqueeze(ends, second), tokens)
    requests = op.ReduceSum(op.Cast(is_behind, to=I64), first, keepdims=0)
    return requests


@script(TURBOQUANT, default_opset=op)
def steps_of_tokens(cumulative: INT32[...], requests: INT64[...]) -> INT64[...]:
    """Place of each token among the new ones of its request [T]."""
    tokens = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(requests)), op.Constant(value_int=1)
    )
    steps = op.Sub(tokens, op.Gather(op.Cast(cumulative, to=I64), requests))
    return steps


@script(TURBOQUANT, default_opset=op)
def slots_of_tokens(
    past_seqlens: INT32[...], requests: INT64[...], steps: INT64[...]
) -> INT64[...]:
    """Slot of each token in its request [1, T]."""
    slots = op.Add(op.Gather(op.Cast(past_seqlens, to=I64), requests), steps)
    row = op.Unsqueeze(slots, op.Constant(value_ints=[0]))
    return row


@script(TURBOQUANT, default_opset=op)
def heads_first(cache: UINT8[...]) -> UINT8[...]:
    """Pages as their bytes lie, [P, N, S, W], of a cache [P, S, N, W]."""
    sizes = op.Gather(op.Shape(cache), op.Constant(value_ints=[0, 2, 1, 3]))
    pages = op.Reshape(cache, sizes)
    return pages


@script(TURBOQUANT, default_opset=op)
def written_pages(
    past: UINT8[...],
    rows: UINT8[...],
    block_table: INT32[...],
    requests: INT64[...],
    slots: INT64[...],
) -> UINT8[...]:
    """Pages [P, S, N, W] with rows [1, N, T, W] of tokens in these slots [1, T].

    Rows that are narrower than those of past are filled up with zero bytes.
    """
    pages = heads_first(past)
    size = op.Shape(pages, start=2, end=3)
    width = op.Shape(past, start=3)
    first = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    free_bytes = op.Sub(width, op.Shape(rows, start=3))
    fill_shape = op.Concat(op.Shape(rows, start=0, end=3), free_bytes, axis=0)
    nothing = op.Cast(op.Constant(value_int=0), to=U8)
    filled = op.Concat(rows, op.Expand(nothing, fill_shape), axis=-1)
    of_tokens = op.Transpose(op.Squeeze(filled, first), perm=[1, 0, 2])
    flat_slots = op.Reshape(slots, last)
    columns = op.Div(flat_slots, size)
    entries = op.Concat(op.Unsqueeze(requests, last), op.Unsqueeze(columns, last), axis=-1)
    numbers = op.GatherND(op.Cast(block_table, to=I64), entries)
    within = op.Sub(flat_slots, op.Mul(columns, size))
    heads = op.Range(
        op.Constant(value_int=0),
        op.Squeeze(op.Shape(rows, start=1, end=2)),
        op.Constant(value_int=1),
    )
    shape = op.Concat(op.Shape(of_tokens, start=0, end=2), op.Constant(value_ints=[1]), axis=0)
    page_index = op.Expand(op.Reshape(numbers, op.Constant(value_ints=[-1, 1, 1])), shape)
    head_index = op.Expand(op.Reshape(heads, op.Constant(value_ints=[1, -1, 1])), shape)
    slot_index = op.Expand(op.Reshape(within, op.Constant(value_ints=[-1, 1, 1])), shape)
    places = op.Concat(page_index, head_index, slot_index, axis=-1)
    present = op.Reshape(op.ScatterND(pages, places, of_tokens), op.Shape(past))
    return present


@script(TURBOQUANT, default_opset=op)
def live_total(past_seqlens: INT32[...], counts: INT64[...]) -> INT64[...]:
    """Tokens of the longest request, the new ones included, as a tensor of one element."""
    total = op.ReduceMax(op.Add(op.Cast(past_seqlens, to=I64), counts), keepdims=1)
    return total


@script(TURBOQUANT, default_opset=op)
def pages_in_a_row(cache: UINT8[...], block_table: INT32[...]) -> UINT8[...]:
    """Caches of requests [R, N, C * S, W] of pages [P, S, N, W] by their numbers [R, C].

    A number that is none of a page stands for the nearest one: no token needs it.
    """
    one = op.Constant(value_ints=[1])
    pages = heads_first(cache)
    last = op.Sub(op.Shape(cache, start=0, end=1), one)
    known = op.Max(op.Cast(block_table, to=I64), op.Constant(value_ints=[0]))
    gathered = op.Gather(pages, op.Min(known, last), axis=0)
    by_head = op.Transpose(gathered, perm=[0, 2, 1, 3, 4])
    slots = op.Mul(op.Shape(by_head, start=2, end=3), op.Shape(by_head, start=3, end=4))
    sizes = op.Concat(op.Shape(by_head, start=0, end=2), slots, op.Shape(by_head, start=4), axis=0)
    rows = op.Reshape(by_head, sizes)
    return rows


@script(TURBOQUANT, default_opset=op)
def query_of_requests(query: FLOAT[...], cumulative: INT32[...], counts: INT64[...]) -> FLOAT[...]:
    """Queries of requests [R, H, most, D] of packed ones [1, H, T, D]; of fewer the last, again."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_ints=[1])
    first = op.Constant(value_ints=[0])
    most = op.ReduceMax(counts, keepdims=0)
    steps = op.Range(zero, most, op.Constant(value_int=1))
    bounds = op.Cast(cumulative, to=I64)
    starts = op.Slice(bounds, first, op.Sub(op.Shape(bounds), one), first)
    own = op.Min(steps, op.Unsqueeze(op.Max(op.Sub(counts, one), first), one))
    tokens = op.Add(op.Unsqueeze(starts, one), own)
    index = op.Min(tokens, op.Sub(op.Shape(query, start=2, end=3), one))
    gathered = op.Gather(op.Squeeze(query, first), index, axis=1)
    padded = op.Transpose(gathered, perm=[1, 0, 2, 3])
    return padded


@script(TURBOQUANT, default_opset=op)
def packed_again(of_requests: FLOAT[...], requests: INT64[...], steps: INT64[...]) -> FLOAT[...]:
    """Vectors [1, H, T, D] of the tokens, of vectors [R, H, most, D]."""
    by_head = op.Transpose(of_requests, perm=[1, 0, 2, 3])
    most = op.Shape(of_requests, start=2, end=3)
    sizes = op.Concat(
        op.Shape(by_head, start=0, end=1),
        op.Constant(value_ints=[-1]),
        op.Shape(by_head, start=3),
        axis=0,
    )
    rows = op.Reshape(by_head, sizes)
    index = op.Add(op.Mul(requests, most), steps)
    packed = op.Unsqueeze(op.Gather(rows, index, axis=1), op.Constant(value_ints=[0]))
    return packed
