"""Offsets of keys that turn with their slots, in body and kernels against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.site import FLOATS, INT3, Site
from tests.parity.backends import BACKENDS, BEST, run, session
from tests.parity.compare import assert_same_rows, check_attention
from tests.parity.pagedsite import PagedSite, assert_paged
from tests.parity.test_paged import LIMIT, LONG
from tests.parity.test_window import PROMPTS
from tests.parity.windows import assert_calls, random_extras, with_window
from tests.singleop import INT4, RUNTIMES, codec_of, function_model
from tq_onnx.codec import reference
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.features import OFFSETS, ROTARY_OFFSETS

SIZE = 64
PAIRS = 2.5 * 1e4 ** -(np.arange(SIZE // 2) / (SIZE // 2))
HALVES = (*PAIRS, *PAIRS)
KINDS = {
    "halves": HALVES,
    "interleaved": tuple(np.repeat(PAIRS, 2)),
    "partial": (*PAIRS[:8], *PAIRS[:8], *[0.0] * (SIZE - 16)),
    "none": (0.0,),
}
TURNING = Site(INT4, INT3, head_size=SIZE, offset_rows=3, frequencies=HALVES)
CODECS = [INT4, codec_of(2), Codec("uniform", 4), Codec("prod", 4), Codec("q8_0", 8)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(36)


def assert_solved(backend: str, site: Site, feeds: Any, **attributes: Any) -> None:
    output, *presents = run(backend, site.model(**attributes).SerializeToString(), feeds)
    assert_same_rows(site, feeds, presents, tie_rate=1.0)
    expected = site.attended(feeds, *presents, **attributes)
    check_attention(site.element, output, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_prompts_of_padded_batches(
    backend: str, codec: Codec, kind: str, rng: Any
) -> None:
    site = replace(TURNING, key=codec, frequencies=KINDS[kind], has_padding=True)
    for past, new, window in (((300, 17), 1, 0), ((9, 140), 90, 60)):
        feeds = site.feeds(rng, past_length=past, new=new, capacity=max(past) + new + 3)
        feeds["left_padding"] = np.array([131, 3] if new == 1 else [5])
        assert_solved(backend, site, feeds, sliding_window=window)
        # The negative twin: the comparison sees the padding.
        unpadded = site.centered(feeds | {"left_padding": np.array([0])}, "key")
        moves = np.abs(site.centered(feeds, "key") - unpadded).max()
        assert (moves > 0.5) == (kind != "none")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
def test_with_all_else(backend: str, dtype: ir.DataType, rng: Any) -> None:
    site = replace(TURNING, dtype=dtype, has_bias=True, has_sink=True, has_padding=True)
    feeds = site.feeds(rng, past_length=(140, 1), new=3)
    feeds |= {**random_extras(site, feeds, rng), "left_padding": np.array([2, 1])}
    assert_solved(backend, site, feeds, causal=0, sliding_window=60, softcap=0.9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_windows_through_prompts_steps_and_rewinds(backend: str, rng: Any) -> None:
    assert_calls(with_window(TURNING, 32, 4), backend, rng, PROMPTS, slots=200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_caches_beside_others_that_turn(backend: str, rng: Any) -> None:
    others = ((INT4, INT4),)
    site = replace(TURNING, key=FLOATS, value=FLOATS, others=others, frequencies=(0.0,))
    assert_solved(backend, site, site.feeds(rng, past_length=(3, 1), new=2))


@pytest.mark.parametrize("page_size", [16, 128, 48])
def test_pages(page_size: int, rng: Any) -> None:
    how = {"offset_rows": 1, "frequencies": HALVES, "page_size": page_size}
    site = PagedSite(INT4, INT4, head_size=SIZE, **how)
    feeds = site.requests(rng, LONG)
    results = run(BEST, site.model().SerializeToString(), feeds)
    assert_paged(site, feeds, results, limit=LIMIT)


def test_threads_change_no_bit(rng: Any) -> None:
    site = replace(TURNING, heads=4, kv_heads=2)
    feeds = site.feeds(rng, past_length=(2000,), new=1)
    model = site.model().SerializeToString()
    single, double = (session(BEST, model, threads).run(None, feeds) for threads in (1, 2))
    for left, right in zip(single, double, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_phases_at_slot_one_million(runtime: str, rng: Any) -> None:
    sizes = {"offset": (2, 1, SIZE), "slots": (1, 6), "frequencies": (SIZE,), "left_padding": (1,)}
    slots = np.array([0, 1, 4095, 131_072, 999_999, 1_048_575])
    feeds = {
        "offset": rng.standard_normal(sizes["offset"]).astype(np.float32),
        "slots": slots[None],
        "frequencies": np.float32([np.pi, *rng.uniform(0, 3, SIZE - 1)]),
        "left_padding": np.zeros(1, np.int64),
    }
    types = {name: ir.DataType.from_numpy(array.dtype) for name, array in feeds.items()}
    features = frozenset({OFFSETS, ROTARY_OFFSETS})
    model = function_model("TurnedOffset", types, sizes, ir.DataType.FLOAT, features)
    (turned,) = RUNTIMES[runtime](model, feeds)
    for slot, row in zip(slots, turned[0, 0], strict=True):
        expected = reference.offset_rows(
            feeds["offset"], np.array([slot]), 1, 1, frequencies=feeds["frequencies"]
        )
        np.testing.assert_allclose(row, expected[0, 0, 0], atol=2e-6)
