"""The bodies of the paged operators, made for the codecs and the optional inputs of one model.

Rows are written, and attention is computed, by what the contiguous operators are put together from
(``tq_onnx.ops.bodies.operators``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from tq_onnx.ops.bodies import I64, paged, pagewindow
from tq_onnx.ops.bodies.composing import Composer
from tq_onnx.ops.bodies.operators import (
    AttentionBody,
    Exact,
    Model,
    centred,
    encoded_rows,
    inputs_of,
)
from tq_onnx.ops.features import EXACT_WINDOW, OFFSETS
from tq_onnx.ops.operators import PagedAttention, PagedEncode


def paged_encode_function(model: Model) -> ir.Function:
    """Return the body of TurboQuantPagedEncode."""
    features = model.encode_features
    given = inputs_of(PagedEncode, features)
    body = Composer()
    requests, steps = _tokens(body, given, given["vectors"])
    inputs = [given["past_seqlens"], requests, steps]
    slots = body.call("slots", paged.slots_of_tokens, inputs)
    vectors = given["vectors"]
    if OFFSETS in model.features:
        vectors = centred(body, model, given, slots)
    cases = {
        number: partial(encoded_rows, model=model, encoder=encoder, given=given, vectors=vectors)
        for number, encoder in enumerate(model.encoders)
    }
    rows = body.choose("rows", PagedEncode.codec_index, cases, _lengths(body, given))
    table = [given["block_table"], requests, slots]
    if model.pages is None:
        present = body.call("present", paged.written_pages, [given["past"], rows, *table])
        return body.function(PagedEncode, features, [*given.values()], present)
    present = _with_entries(body, model, given, rows, table)
    return body.function(PagedEncode, features, [*given.values()], present)


def _with_entries(
    body: Composer,
    model: Model,
    operands: Mapping[str, ir.Value],
    rows: ir.Value,
    table: list[ir.Value],
) -> ir.Value:
    """Return pages with new rows and entries; ``table`` has pages, requests and slots of tokens."""
    past, (_, requests, slots) = operands["past"], table
    stride = (PagedEncode.row_stride,)
    numbers = body.call("numbers", pagewindow.pages_of_tokens, [past, *table])
    begun = body.call("begun", pagewindow.begun_pages, [past, numbers, slots])
    old = body.call("row_pages", pagewindow.rows_of_pages, [begun], forwarded=stride)
    new = body.call("written", paged.written_pages, [old, rows, *table])
    pages = body.call("with_rows", pagewindow.pages_with_rows, [begun, new])
    size = body.standard("size", "Shape", [past], start=1, end=2)
    capacities, places_of_slots = _tables(body, model)
    sizes = (PagedEncode.recent, PagedEncode.sinks)
    new_tokens = [slots, _ends(body, operands), requests]
    inputs = [pages, operands["vectors"], numbers, *new_tokens, capacities]
    pages = body.call(
        "cleared", pagewindow.pages_without_remains, inputs, forwarded=(*stride, *sizes)
    )
    inputs = [*new_tokens, size, capacities, places_of_slots]
    places = body.call("places_of_new", pagewindow.written_places, inputs, forwarded=sizes)
    inputs = [pages, operands["vectors"], numbers, slots, places]
    return body.call("present", pagewindow.pages_with_entries, inputs)


def _ends(body: Composer, operands: Mapping[str, ir.Value]) -> ir.Value:
    """Return the tokens of each request, the new ones included."""
    counts = body.call("new_counts", paged.new_tokens, [operands["cumulative_sequence_length"]])
    return body.standard("ends", "Add", [_lengths(body, operands, "old_lengths"), counts])


def _tables(body: Composer, model: Model) -> list[ir.Value]:
    """Return the capacities and the places of pages, as constants."""
    assert model.pages is not None
    capacities, places = model.pages.capacities, model.pages.places
    return [body.numbers("capacities", capacities.flat), body.numbers("places", places.flat)]


def paged_attention_function(model: Model) -> ir.Function:
    """Return the body of TurboQuantPagedDequantAttention."""
    features = model.attention_features
    given = inputs_of(PagedAttention, features)
    body = Composer()
    bounds, table = given["cumulative_sequence_length"], given["block_table"]
    counts = body.call("counts", paged.new_tokens, [bounds])
    of_requests = {
        **given,
        "query": body.call("queries", paged.query_of_requests, [given["query"], bounds, counts]),
        "past_length": _lengths(body, given),
    }
    for name in ("key_cache", "value_cache"):
        pages = given[name]
        if model.pages is not None:
            of_requests[f"{name}_pages"] = pages
            stride = (PagedAttention.row_stride,)
            pages = body.call(
                f"{name}_of_rows", pagewindow.rows_of_pages, [pages], forwarded=stride
            )
        of_requests[name] = body.call(f"{name}_rows", paged.pages_in_a_row, [pages, table])
    if model.pages is not None:
        for name in ("new_keys", "new_values"):
            inputs = [given[name], bounds, counts]
            of_requests[name] = body.call(f"padded_{name}", paged.query_of_requests, inputs)
    total = body.call("total", paged.live_total, [given["past_seqlens"], counts])
    if model.pages is None:  # all rows are raw, and exact as they are
        model = replace(model, features=model.features - {EXACT_WINDOW})
    make = AttentionBody if model.pages is None else _AttentionOfPages
    output = make(model, body, of_requests, total, is_causal=True).output()
    requests, steps = _tokens(body, given, given["query"])
    packed = body.call("packed", paged.packed_again, [output, requests, steps])
    result = body.standard("output", "CastLike", [packed, given["query"]])
    return body.function(PagedAttention, features, [*given.values()], result)


def _tokens(
    body: Composer, given: Mapping[str, ir.Value], vectors: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the request of each token, and its place among the new ones of its request."""
    bounds = given["cumulative_sequence_length"]
    requests = body.call("requests", paged.requests_of_tokens, [bounds, vectors])
    return requests, body.call("steps", paged.steps_of_tokens, [bounds, requests])


def _lengths(
    body: Composer, operands: Mapping[str, ir.Value], name: str = "past_length"
) -> ir.Value:
    return body.standard(name, "Cast", [operands["past_seqlens"]], to=I64)


class _AttentionOfPages(AttentionBody):
    """The body of attention over pages with entries."""

    def _exact(self) -> Exact:
        return _ExactOfPages(self.model, self.body, self.given, self.head_size, self.total)


class _ExactOfPages(Exact):
    """What queries take from entries at the end of pages, or from the call."""

    def __init__(
        self,
        model: Model,
        body: Composer,
        operands: Mapping[str, ir.Value],
        head_size: ir.Value,
        total: ir.Value,
    ) -> None:
        super().__init__(body, operands, head_size)
        sizes = (PagedAttention.recent, PagedAttention.sinks)
        table, pages = operands["block_table"], operands["key_cache_pages"]
        capacities, places = _tables(body, model)
        slots = body.standard("slots_of_page", "Shape", [pages], start=1, end=2)
        self.entries = {
            side: body.call(
                f"{side}_entries",
                pagewindow.entries_of_pages,
                [operands[f"{side}_cache_pages"], table, head_size],
                forwarded=sizes,
            )
            for side in ("key", "value")
        }
        inputs = [total, table, slots, places]
        piece = pagewindow.entries_of_page_tokens
        self.of_tokens = body.call("entries_of_tokens", piece, inputs, forwarded=sizes)
        inputs = [total, _ends(body, operands), slots, capacities, places]
        live = body.call("live", pagewindow.live_tokens, inputs, forwarded=sizes)
        key, value = (self.tagged(side) for side in ("key", "value"))
        tagged = body.standard("both_tagged", "And", [key, value])
        self.has_entry = body.standard("has_entry", "And", [tagged, live])
        inputs = [operands["query"], operands["past_length"], self.has_entry, slots, capacities]
        self.taken = body.call("taken", pagewindow.taken_in_pages, inputs, forwarded=sizes)
