"""The bodies of the paged operators, made for the codecs and the optional inputs of one model.

Rows are written, and attention is computed, by what the contiguous operators are put together from
(``tq_onnx.ops.bodies.operators``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir

from tq_onnx.ops.bodies import I64, paged
from tq_onnx.ops.bodies.composing import Composer
from tq_onnx.ops.bodies.operators import AttentionBody, Model, centred, encoded_rows, inputs_of
from tq_onnx.ops.features import OFFSETS
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
    inputs = [given["past"], rows, given["block_table"], requests, slots]
    present = body.call("present", paged.written_pages, inputs)
    return body.function(PagedEncode, features, [*given.values()], present)


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
        inputs = [given[name], table]
        of_requests[name] = body.call(f"{name}_rows", paged.pages_in_a_row, inputs)
    total = body.call("total", paged.live_total, [given["past_seqlens"], counts])
    output = AttentionBody(model, body, of_requests, total, is_causal=True).output()
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


def _lengths(body: Composer, given: Mapping[str, ir.Value]) -> ir.Value:
    return body.standard("past_length", "Cast", [given["past_seqlens"]], to=I64)
