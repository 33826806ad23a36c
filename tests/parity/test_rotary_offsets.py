"""Offsets of keys that turn with their slots, in the kernels of every level against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.rows import assert_same_rows
from tests.ops.site import Site
from tests.ops.test_attention_body import bias_for
from tests.ops.windows import assert_calls, with_window
from tests.parity.backends import LEVELS, run, session
from tests.parity.compare import check_attention
from tests.parity.pagedsite import PagedSite, assert_paged
from tests.parity.test_paged import LIMIT, LONG
from tests.parity.test_window import PROMPTS, kernels
from tests.singleop import INT4, codec_of
from tq_onnx.codec.spec import Codec

SIZE = 64
PAIRS = 2.5 * 1e4 ** -(np.arange(SIZE // 2) / (SIZE // 2))
HALVES = (*PAIRS, *PAIRS)
INTERLEAVED = tuple(np.repeat(PAIRS, 2))
PARTIAL = (*PAIRS[:8], *PAIRS[:8], *[0.0] * (SIZE - 16))

TURNING = Site(INT4, codec_of(3), head_size=SIZE, offset_rows=3, frequencies=HALVES)
CODECS = [INT4, codec_of(2), Codec("uniform", 4), Codec("prod", 4), Codec("q8_0", 8)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(36)


def assert_solved(level: str, site: Site, feeds: Any, **attributes: Any) -> None:
    output, *presents = run(level, site.model(**attributes).SerializeToString(), feeds)
    assert_same_rows(site, feeds, presents, site.expected_presents(feeds))
    expected = site.attended(feeds, *presents, **attributes)
    check_attention(level, site.element, output, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_steps_and_prompts_of_padded_batches(level: str, codec: Codec, rng: Any) -> None:
    for turning in (HALVES, INTERLEAVED, PARTIAL):
        site = replace(TURNING, key=codec, frequencies=turning, has_padding=True)
        for past, new, window in (((300, 17), 1, 0), ((9, 140), 90, 60)):
            feeds = site.feeds(rng, past_length=past, new=new, capacity=max(past) + new + 3)
            feeds["left_padding"] = np.array([131, 3] if new == 1 else [5])
            assert_solved(level, site, feeds, sliding_window=window)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
def test_with_all_else(level: str, dtype: ir.DataType, rng: Any) -> None:
    site = replace(TURNING, dtype=dtype, has_bias=True, has_sink=True, has_padding=True)
    feeds = site.feeds(rng, past_length=(140, 1), new=3)
    feeds["attention_bias"] = bias_for(site, feeds, rng)
    feeds["head_sink"] = site.rounded(rng.standard_normal(site.heads))
    feeds["left_padding"] = np.array([2, 1])
    assert_solved(level, site, feeds, causal=0, sliding_window=60, softcap=0.9)


@pytest.mark.parametrize("level", LEVELS)
def test_exact_windows_through_prompts_steps_and_rewinds(level: str, rng: Any) -> None:
    def check(site: Site, output: Any, expected: Any) -> None:
        check_attention(level, site.element, output, expected)

    site = with_window(TURNING, 32, 4)
    assert_calls(site, kernels(level), rng, PROMPTS, slots=200, check=check)


@pytest.mark.parametrize("level", LEVELS)
def test_pages(level: str, rng: Any) -> None:
    for page_size in (16, 128, 48):
        site = PagedSite(
            INT4,
            INT4,
            head_size=SIZE,
            offset_rows=1,
            frequencies=HALVES,
            page_size=page_size,
        )
        feeds = site.requests(rng, LONG)
        results = run(level, site.model().SerializeToString(), feeds)
        assert_paged(site, feeds, results, limit=LIMIT)


def test_threads_change_no_bit(rng: Any) -> None:
    site = replace(TURNING, heads=4, kv_heads=2)
    feeds = site.feeds(rng, past_length=(2000,), new=1)
    model = site.model().SerializeToString()
    single, double = (session(LEVELS[0], model, threads).run(None, feeds) for threads in (1, 2))
    for left, right in zip(single, double, strict=True):
        np.testing.assert_array_equal(left, right)
