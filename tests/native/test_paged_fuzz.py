"""Random packings of requests: the oracle's answer or an error of the operator, never a crash.

``packing_fits`` restates what the operators accept. See test_fuzz.py for how to run this with
sanitizers.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native.conftest import CODECS, Feeds, rows, tables
from tests.native.fuzzing import FUZZ, rotation_fits, spoiled
from tests.native.single_node import Array, make_session
from tests.operatormodels import attention_attributes, encode_attributes, single_operator
from tests.tolerances import bounds
from tq_onnx.codec import paged
from tq_onnx.codec.paged import Packing
from tq_onnx.codec.pagewindow import PageWindow
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.window import entry_of
from tq_onnx.ops.domain import PAGED_ATTENTION, PAGED_ENCODE
from tq_onnx.ops.operators import PagedAttention, PagedEncode

pytestmark = pytest.mark.usefixtures("exact_products")

FLOATS = bounds("attention")["float32"]
LENGTHS = "cumulative_sequence_length"


Entries = tuple[int, int, int]
"""Newest and first tokens that are exact, and bytes from a row to the next; zeros for none."""


def entry_attributes(entries: Entries) -> dict[str, int]:
    return dict(zip(("recent", "sinks", "row_stride"), entries, strict=True))


@functools.cache
def encode_session(codec: Codec, entries: Entries) -> ort.InferenceSession:
    given = {**encode_attributes(codec), **entry_attributes(entries)}
    return make_session(single_operator(PagedEncode, given, "float32"), 2)


@functools.cache
def attention_session(
    key: Codec, value: Codec, reach: int, entries: Entries
) -> ort.InferenceSession:
    declared = {each.name for each in PagedAttention.attributes}
    given = {**attention_attributes(key, value, 0.5), "sliding_window": reach}
    given |= entry_attributes(entries)
    chosen = {name: given[name] for name in given if name in declared}
    new = (PagedAttention.new_keys, PagedAttention.new_values) if any(entries[:2]) else ()
    return make_session(single_operator(PagedAttention, chosen, "float32", optional=new), 2)


def packing_of(feeds: Feeds) -> Packing:
    return Packing(feeds[LENGTHS], feeds["past_seqlens"], feeds["block_table"])


def packing_fits(feeds: Feeds, tokens: int, cache: Array) -> bool:
    lengths, past, table = (feeds[name] for name in (LENGTHS, "past_seqlens", "block_table"))
    if (lengths.ndim, past.ndim, table.ndim) != (1, 1, 2):
        return False
    requests, columns = table.shape
    if past.shape != (requests,) or lengths.shape != (requests + 1,) or cache.shape[1] < 1:
        return False
    steps = np.diff(lengths)
    if lengths[0] != 0 or (steps < 0).any() or lengths[-1] != tokens or (past < 0).any():
        return False
    for own, total in zip(table, past + steps, strict=True):
        needed = -(-int(total) // cache.shape[1])
        if needed > columns or any(not 0 <= page < len(cache) for page in own[:needed]):
            return False
    return True


def owns_its_pages(feeds: Feeds, page_size: int) -> bool:
    """True if no page that gets tokens is needed a second time."""
    written: list[int] = []
    needed: list[int] = []
    for tokens, past, own in packing_of(feeds):
        new = tokens.stop - tokens.start
        columns = range(-(-(past + new) // page_size))
        needed += [int(own[column]) for column in columns]
        written += [int(own[column]) for column in columns if new and column >= past // page_size]
    return all(needed.count(page) == 1 for page in written)


def drawn_packing(data: st.DataObject, page_size: int) -> tuple[Feeds, int]:
    """Lengths and a table that mostly fit, and the number of pages."""
    requests = data.draw(st.integers(0, 4))
    counts = st.lists(st.integers(0, 5), min_size=requests, max_size=requests)
    lasts = st.lists(st.integers(-1 if data.draw(st.booleans()) else 0, 40), min_size=requests,
                     max_size=requests)  # fmt: skip
    new, past = data.draw(counts), data.draw(lasts)
    needed = [-(-max(0, a + b) // page_size) for a, b in zip(new, past, strict=True)]
    columns = max([1, *needed]) - data.draw(st.sampled_from([0, 0, 0, 1]))
    pages = max(1, requests * columns)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    table = rng.permutation(pages)[: requests * columns]
    if data.draw(st.sampled_from([False, False, True])):  # shared, twice, or not there
        table = rng.integers(-1, pages + 1, requests * columns)
    bounds_of = np.cumsum([0, *new])
    if data.draw(st.sampled_from([False] * 5 + [True])):
        bounds_of = bounds_of + rng.integers(-1, 2, len(bounds_of))
    feeds: Feeds = {
        LENGTHS: bounds_of.astype(np.int32),
        "past_seqlens": np.array(past, np.int32).reshape(requests),
        "block_table": np.resize(table, (requests, columns)).astype(np.int32),
    }
    return feeds, pages


def drawn_entries(data: st.DataObject, codecs: list[Codec], size: int) -> Entries:
    """Exact tokens, mostly none; rows are as far apart as the wider ones want, or too near."""
    if any(codec.is_raw for codec in codecs) or data.draw(st.booleans()):
        return 0, 0, 0
    stride = max(row_layout(codec, size).row_bytes for codec in codecs)
    few = st.sampled_from([0, 1, 3, 9])
    return data.draw(few), data.draw(few), stride - data.draw(st.sampled_from([0] * 9 + [1]))


def window_in(cache: Array, entries: Entries, size: int, used: int) -> PageWindow | None:
    """Where entries lie in a cache; None where operators refuse it."""
    recent, sinks, stride = entries
    try:
        window = PageWindow(recent, sinks, size, cache.shape[1], stride, cache.shape[3])
    except (ValueError, ZeroDivisionError):
        return None
    return window if stride >= used else None


def tagged(caches: list[Array], packing: Packing, window: PageWindow, rng: Any) -> None:
    """Give most tokens before the call the entries that they may have, in both caches."""
    for tokens, past, table in packing:
        end = past + tokens.stop - tokens.start
        for token, cache in itertools.product(range(past), caches):
            place = window.place(token, end)
            if place < 0 or rng.random() < 0.1:
                continue
            planes = cache.reshape(cache.shape[0], cache.shape[2], -1)
            begin = window.begin(place)
            for plane in planes[table[token // window.slots]]:
                half = rng.standard_normal(window.head_size).astype(np.float16)
                plane[begin : begin + window.entry_bytes] = entry_of(half, token)


SIZES = (8, 24, 128)
"""Head sizes."""


@FUZZ
@given(st.data())
def test_encode(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    size = data.draw(st.sampled_from(SIZES))
    page_size, heads = data.draw(st.sampled_from([1, 16, 20])), data.draw(st.integers(1, 3))
    packing, pages = drawn_packing(data, page_size)
    tokens = max(0, int(packing[LENGTHS][-1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rotation, centroids, boundaries = tables(codec, size, 0)
    entries = drawn_entries(data, [codec], size)
    padding = data.draw(st.sampled_from([0, 3, 40]))
    cache = rows((pages, page_size, heads), codec, size, 2, padding)
    feeds: Feeds = {
        "vectors": rng.standard_normal((1, heads, tokens, size)).astype(np.float32),
        "past": cache,
        "rotation": rotation,
        "centroids": centroids,
        "boundaries": boundaries,
        **packing,
    }
    feeds = spoiled(data, feeds)
    session = encode_session(codec, entries)
    vectors, past = feeds["vectors"], feeds["past"]
    used = row_layout(codec, size).row_bytes
    is_on = past.ndim == 4 and any(entries[:2])
    window = window_in(past, entries, size, used) if is_on else None
    stride = entries[2] or past.shape[-1]
    fits = (
        (window is not None or not is_on)
        and used <= stride <= past.shape[-1]
        and vectors.ndim == past.ndim == 4
        and vectors.shape[0] == 1
        and vectors.shape[3] == size
        and past.shape[2] == vectors.shape[1]
        and past.shape[3] >= row_layout(codec, size).row_bytes
        and (not codec.is_rotated or rotation_fits(codec, size, feeds["rotation"]))
        and (not codec.is_rotated or feeds["centroids"].shape == centroids.shape)
        and (not codec.is_rotated or feeds["boundaries"].shape == boundaries.shape)
        and packing_fits(feeds, vectors.shape[2], past)
    )
    if not fits or not owns_its_pages(feeds, past.shape[1]):
        with pytest.raises(Exception, match=PAGED_ENCODE):
            session.run(None, feeds)
        return
    (present,) = session.run(None, feeds)
    own = packing_of(feeds)
    parts = [
        paged.rows_of_request(present, table, length + where.stop - where.start, row_stride=stride)[
            :, :, length:
        ]
        for where, length, table in own
    ]
    written = np.concatenate([*parts, np.zeros((1, past.shape[2], 0, stride), np.uint8)], 2)
    # Nothing but the new rows and entries is written, and each of them is there.
    if is_on or entries[2] in (0, past.shape[3]):
        expected = paged.write(past, written, own, window=window, vectors=vectors)
        np.testing.assert_array_equal(expected, present)
    assert not written[..., row_layout(codec, size).row_bytes :].any()
    alone = {**feeds, "past": np.zeros((1, 128, past.shape[2], past.shape[3]), np.uint8)}
    count = vectors.shape[2]
    alone |= {
        LENGTHS: np.array([0, count], np.int32),
        "past_seqlens": np.zeros(1, np.int32),
        "block_table": np.zeros((1, 1), np.int32),
    }
    (together,) = session.run(None, alone)
    expected = paged.rows_of_request(together, np.zeros(1, np.int32), count, row_stride=stride)
    np.testing.assert_array_equal(written, expected[:, :, :count])


@FUZZ
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    key, value = (data.draw(st.sampled_from(CODECS)) for _ in range(2))
    size = data.draw(st.sampled_from(SIZES))
    reach = data.draw(st.sampled_from([0, 5]))
    page_size, heads = data.draw(st.sampled_from([1, 16, 20])), data.draw(st.integers(1, 3))
    group = data.draw(st.integers(1, 3))
    packing, pages = drawn_packing(data, page_size)
    tokens = max(0, int(packing[LENGTHS][-1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    entries = drawn_entries(data, [key, value], size)
    used = [row_layout(codec, size).row_bytes for codec in (key, value)]
    is_on = any(entries[:2])
    room = data.draw(st.sampled_from([0, 30, 60]))
    widths = [max(used) + room - row for row in used] if any(entries) else [0, 2]
    key_rotation, key_centroids, _ = tables(key, size, 0)
    value_rotation, value_centroids, _ = tables(value, size, 1)
    feeds: Feeds = {
        "query": rng.standard_normal((1, heads * group, tokens, size)).astype(np.float32),
        "key_cache": rows((pages, page_size, heads), key, size, 4, widths[0]),
        "value_cache": rows((pages, page_size, heads), value, size, 5, widths[1]),
        "key_rotation": key_rotation,
        "key_centroids": key_centroids,
        "value_rotation": value_rotation,
        "value_centroids": value_centroids,
        **packing,
    }
    if is_on:
        shape = (1, heads, tokens, size)
        feeds |= {
            name: rng.standard_normal(shape).astype(np.float32)
            for name in ("new_keys", "new_values")
        }
    shapes = {name: array.shape for name, array in feeds.items()}
    feeds = spoiled(data, feeds)
    session = attention_session(key, value, reach, entries)
    query, keys, values = (feeds[name] for name in ("query", "key_cache", "value_cache"))
    is_fit = keys.ndim == values.ndim == 4
    window = window_in(keys, entries, size, max(used)) if is_on and is_fit else None
    fits = (
        (not is_on or (window is not None and keys.shape == values.shape))
        and (
            not entries[2]
            or all(max(used) <= entries[2] <= cache.shape[-1] for cache in (keys, values))
        )
        and all(
            feeds[name].shape == (1, *keys.shape[2:3], query.shape[-2], size)
            for name in ("new_keys", "new_values")
            if is_on and query.ndim == 4
        )
        and query.ndim == keys.ndim == values.ndim == 4
        and query.shape[0] == 1
        and query.shape[3] == size
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[2] > 0
        and query.shape[1] % keys.shape[2] == 0
        and packing_fits(feeds, query.shape[2], keys)
    )
    for side, codec in (("key", key), ("value", value)):
        cache, (_, centroids, _) = feeds[f"{side}_cache"], tables(codec, size, 0)
        fits = fits and cache.shape[3] >= row_layout(codec, size).row_bytes
        if codec.is_rotated:
            matrices = feeds[f"{side}_rotation"]
            fits = fits and rotation_fits(codec, size, matrices)
            fits = fits and feeds[f"{side}_centroids"].shape == centroids.shape
    if not fits:
        with pytest.raises(Exception, match=PAGED_ATTENTION):
            session.run(None, feeds)
        return
    if window is not None:
        tagged([keys, values], packing_of(feeds), window, rng)
    (output,) = session.run(None, feeds)
    assert output.shape == query.shape
    if output.size == 0:
        return
    expected = paged.attention(
        query, keys, values, packing_of(feeds),
        key=key, value=value, scale=0.5, sliding_window=reach,
        key_rotation=feeds["key_rotation"], key_codebook=feeds["key_centroids"],
        value_rotation=feeds["value_rotation"], value_codebook=feeds["value_centroids"],
        window=window, new_keys=feeds.get("new_keys"), new_values=feeds.get("new_values"),
        row_stride=entries[2],
    )  # fmt: skip
    shown = np.isfinite(expected)
    # In a cache of another shape fields are any bytes, which may be no numbers.
    assert shown.all() or shapes != {name: array.shape for name, array in feeds.items()}
    most = FLOATS * (1 + np.abs(expected[shown]).max(initial=0))
    np.testing.assert_allclose(output[shown], expected[shown], rtol=0, atol=most)
