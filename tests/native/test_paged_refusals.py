"""Lengths and tables that do not fit, refused before a page is read or written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.native.badcalls import Bad, assert_refused, bad, each, rows, zeros
from tests.native.single_node import Array, make_session
from tests.operatormodels import attention_attributes, encode_attributes, single_operator
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW
from tq_onnx.ops.domain import PAGED_ATTENTION, PAGED_ENCODE
from tq_onnx.ops.operators import PagedAttention, PagedEncode

INT4 = Codec(LLOYD_MAX, 4)
D, W, N, H, S, P = 16, 10, 2, 4, 16, 6


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


# Three requests: a prompt of 20, one token behind 31, none behind 4.
PACKING = {
    "cumulative_sequence_length": ints(0, 20, 21, 21),
    "past_seqlens": ints(0, 31, 4),
    "block_table": np.array([[3, 0], [5, 1], [2, -1]], np.int32),
}


def encode_feeds() -> dict[str, Array]:
    return {
        "vectors": np.random.default_rng(1).standard_normal((1, N, 21, D)).astype(np.float32),
        "past": np.random.default_rng(2).integers(0, 256, (P, S, N, W), np.uint8),
        "rotation": np.eye(D, dtype=np.float32),
        "centroids": np.linspace(-1, 1, 16, dtype=np.float32),
        "boundaries": np.linspace(-0.9, 0.9, 15, dtype=np.float32),
        **PACKING,
    }


def attention_feeds() -> dict[str, Array]:
    given = encode_feeds()
    tables = {
        f"{side}_{name}": given[name]
        for side in ("key", "value")
        for name in ("rotation", "centroids")
    }
    caches = {f"{side}_cache": rows(P, S, N, W) for side in ("key", "value")}
    return {"query": zeros(1, H, 21, D), **caches, **tables, **PACKING}


def table(*pages: list[int]) -> dict[str, Array]:
    return {"block_table": np.array(pages, np.int32)}


PACKING_CASES = [
    bad(
        "cumulative_sequence_length[0] is 1, expected 0",
        cumulative_sequence_length=ints(1, 20, 21, 21),
    ),
    bad(
        "cumulative_sequence_length[2] is 19, less than 20 before it",
        cumulative_sequence_length=ints(0, 20, 19, 21),
    ),
    bad(
        "cumulative_sequence_length[3] is 22, expected the 21 packed tokens",
        cumulative_sequence_length=ints(0, 20, 21, 22),
    ),
    bad(
        "cumulative_sequence_length has shape [3], expected [4]",
        cumulative_sequence_length=ints(0, 20, 21),
    ),
    bad("past_seqlens[1] is -1, expected 0", past_seqlens=ints(0, -1, 4)),
    bad("past_seqlens[0] is -2147483648, expected 0", past_seqlens=ints(-(2**31), 31, 4)),
    bad(
        "past_seqlens[0] is 13, and with 20 new tokens they need 3 pages of 16, but block_table "
        "has 2 columns",
        past_seqlens=ints(13, 31, 4),
    ),
    bad("past_seqlens[1] is 2147483647", past_seqlens=ints(0, 2**31 - 1, 4)),
    bad("past_seqlens has shape [2], expected", past_seqlens=ints(0, 31)),
    bad(
        "block_table[1, 1] is 6, expected a page from 0 to below 6",
        **table([3, 0], [5, 6], [2, -1]),
    ),
    bad(
        "block_table[1, 0] is -2, expected a page from 0 to below 6",
        **table([3, 0], [-2, 1], [2, -1]),
    ),
    bad("block_table[0, 1] is -1", **table([3, -1], [5, 1], [2, -1])),
    bad("block_table has shape [3], expected 2", block_table=ints(3, 5, 2)),
]
ENCODE_CASES = [
    *PACKING_CASES,
    bad(
        "block_table[1, 1] is 1, a page that gets tokens and is in the tables of two requests",
        **table([3, 1], [5, 1], [2, -1]),
    ),
    bad("block_table[0, 1] is 3, a page that gets", **table([3, 3], [5, 1], [2, -1])),
    bad("block_table[1, 0] is 5, a page that gets tokens", **table([3, 5], [5, 1], [2, -1])),
    bad("block_table[2, 0] is 2, a page that gets tokens", **table([2, 0], [5, 1], [2, -1])),
    bad("[2, 2, 21, 16], expected [1, 2, 21, 16]", vectors=zeros(2, N, 21, D)),
    bad("[6, 16, 3, 10], expected [6, 16, 2", past=rows(P, S, 3, W)),
    bad("past has row width 9", past=rows(P, S, N, 9)),
    bad("pages have no slots", past=rows(P, 0, N, W)),
    bad("rotation has shape [16, 8], expected [16, 16]", rotation=zeros(16, 8)),
    bad("boundaries has shape [16], expected [15]", boundaries=zeros(16)),
]
ATTENTION_CASES = [
    *PACKING_CASES,
    bad("[2, 4, 21, 16], expected [1, 4, 21, 16]", query=zeros(2, H, 21, D)),
    bad("query has 3 heads, expected a multiple of the 2", query=zeros(1, 3, 21, D)),
    bad(
        "value_cache has shape [5, 16, 2, 10], expected [6, 16, 2, 10]",
        value_cache=rows(P - 1, S, N, W),
    ),
    bad(
        "value_cache has shape [6, 32, 2, 10], expected [6, 16, 2, 10]",
        value_cache=rows(P, S * 2, N, W),
    ),
    bad("key_cache has row width 9", key_cache=rows(P, S, N, 9)),
    bad("key_centroids has shape [8], expected [16]", key_centroids=zeros(8)),
]


def encode_model() -> bytes:
    return single_operator(PagedEncode, encode_attributes(INT4), "float32")


def attention_model() -> bytes:
    declared = {each.name for each in PagedAttention.attributes}
    given = attention_attributes(INT4, INT4, 0.25)
    return single_operator(
        PagedAttention, {name: given[name] for name in given if name in declared}, "float32"
    )


@each(ENCODE_CASES)
def test_encode_refuses(case: Bad) -> None:
    assert_refused(encode_model(), encode_feeds(), case, PAGED_ENCODE)


@each(ATTENTION_CASES)
def test_attention_refuses(case: Bad) -> None:
    assert_refused(attention_model(), attention_feeds(), case, PAGED_ATTENTION)


@each(PACKING_CASES)
def test_a_refusal_writes_nothing(case: Bad) -> None:
    feeds = {**encode_feeds(), **case.changes}
    session = make_session(encode_model())
    binding = session.io_binding()
    pages = feeds["past"].copy()
    for input_name, array in {**feeds, "past": pages}.items():
        binding.bind_cpu_input(input_name, array)
    binding.bind_output("present", "cpu", 0, np.uint8, pages.shape, pages.ctypes.data)
    with pytest.raises(Exception, match=PAGED_ENCODE):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(pages, feeds["past"])


def test_pages_may_be_shared_where_nothing_is_written() -> None:
    feeds = encode_feeds() | table([3, 0], [5, 1], [5, -1])
    (present,) = make_session(encode_model()).run(None, feeds)
    np.testing.assert_array_equal(present[[2, 4, 5]], feeds["past"][[2, 4, 5]])


def test_no_requests_and_no_tokens() -> None:
    empty = {
        "vectors": zeros(1, N, 0, D),
        "cumulative_sequence_length": ints(0),
        "past_seqlens": ints(),
        "block_table": np.zeros((0, 0), np.int32),
    }
    feeds = encode_feeds() | empty
    np.testing.assert_array_equal(make_session(encode_model()).run(None, feeds)[0], feeds["past"])
    attended = {k: v for k, v in empty.items() if k != "vectors"} | {"query": zeros(1, H, 0, D)}
    (output,) = make_session(attention_model()).run(None, attention_feeds() | attended)
    assert output.shape == (1, H, 0, D)


#: Rows of 10 bytes in pages of 16 * 20: 160 bytes behind them have room for 4 entries of 36.
EXACT = {"recent": 8, "sinks": 3, "row_stride": W}
EXACT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"row_stride": 9}, "row_stride is 9, expected 10 to 20"),
    ({"row_stride": 21}, "row_stride is 21, expected 10 to 20"),
    ({"row_stride": -1}, "row_stride is -1, expected 0 to"),
    ({"sinks": 5}, "sinks is 5, but a full page of"),
    ({"recent": 5000}, "recent is 5000, expected 0 to 4096"),
    ({"codec": RAW, "bits": 32}, "caches of raw have no entries"),
]


@pytest.mark.parametrize(("attributes", "message"), EXACT_CASES)
def test_exact_tokens_that_have_no_place(attributes: dict[str, Any], message: str) -> None:
    given = {**encode_attributes(INT4), **EXACT, **attributes}
    model = single_operator(PagedEncode, given, "float32")
    wide = np.random.default_rng(2).integers(0, 256, (P, S, N, 2 * W), np.uint8)
    with pytest.raises(Exception, match=re.escape(message)):
        make_session(model).run(None, encode_feeds() | {"past": wide})


EXACT_CALLS = [
    bad("new_keys has shape [1, 2, 20, 16], expected", new_keys=zeros(1, N, 20, D)),
    bad("new_values has shape [1, 3, 21, 16], expected", new_values=zeros(1, 3, 21, D)),
    bad(
        "value_cache has shape [6, 16, 2, 21], expected [6, 16, 2, 20]",
        value_cache=rows(P, S, N, 2 * W + 1),
    ),
    bad(
        "sinks is 3, but a full page of key_cache has room for 0",
        key_cache=rows(P, S, N, W + 1),
        value_cache=rows(P, S, N, W + 1),
    ),
]


@each(EXACT_CALLS)
def test_attention_to_exact_tokens_refuses(case: Bad) -> None:
    declared = {each.name for each in PagedAttention.attributes}
    given = {**attention_attributes(INT4, INT4, 0.25), **EXACT}
    new = (PagedAttention.new_keys, PagedAttention.new_values)
    chosen = {name: given[name] for name in given if name in declared}
    model = single_operator(PagedAttention, chosen, "float32", optional=new)
    feeds = attention_feeds() | {each.name: zeros(1, N, 21, D) for each in new}
    feeds |= {f"{side}_cache": rows(P, S, N, 2 * W) for side in ("key", "value")}
    assert_refused(model, feeds, case, PAGED_ATTENTION)
