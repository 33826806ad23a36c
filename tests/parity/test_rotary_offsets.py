"""Offsets that turn with their slots, in the kernels of every level, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.pagedsite import PagedSite
from tests.ops.rows import assert_same_rows
from tests.ops.site import Arrays, Site
from tests.ops.test_paged_bodies import assert_paged
from tests.ops.windows import with_window
from tests.parity.backends import LEVELS, run
from tests.parity.compare import check_attention
from tests.parity.test_paged import LIMIT, LONG, solved
from tests.parity.test_window import PROMPTS, assert_kernels
from tests.singleop import INT4, codec_of

SIZE = 64
PAIRS = 10_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))
HALVES = tuple(np.tile(PAIRS, 2))
KINDS = {
    "halves": HALVES,
    "interleaved": tuple(np.repeat(PAIRS, 2)),
    "partial": (*np.tile(PAIRS[:16], 2), *[0.0] * 32),
    "fast": tuple(np.tile(np.linspace(3.1, 0.1, 32), 2)),
    "none": (0.0,),
}
TURNING = Site(
    *(INT4, codec_of(3)), heads=6, kv_heads=2, head_size=SIZE, offset_rows=3, frequencies=HALVES
)
CALLS = [((300, 41), 1), ((0, 0), 70), ((130, 64), 5), ((1100,), 1)]
"""A step of a ragged batch, a prompt, a chunk, and a step whose keys are split."""


def assert_layer(level: str, site: Site, feeds: Arrays, **attributes: Any) -> None:
    output, *presents = run(level, site.model(**attributes).SerializeToString(), feeds)
    assert_same_rows(site, feeds, presents, site.expected_presents(feeds))
    check_attention(level, site.element, output, site.attended(feeds, *presents, **attributes))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_prompts(level: str, kind: str, rng: Any) -> None:
    site = replace(TURNING, frequencies=KINDS[kind])
    for lengths, new in CALLS:
        assert_layer(level, site, site.feeds(rng, past_length=lengths, new=new))


@pytest.mark.parametrize("level", LEVELS)
def test_padding_windows_and_caps(level: str, rng: Any) -> None:
    site = replace(TURNING, has_padding=True, dtype=ir.DataType.FLOAT16)
    for lengths, new in CALLS:
        feeds = site.feeds(rng, past_length=lengths, new=new)
        feeds["left_padding"] = np.array([20, 3][: len(lengths)])
        assert_layer(level, site, feeds, sliding_window=50, softcap=0.7)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exact_window(level: str, rng: Any) -> None:
    assert_kernels(level, with_window(TURNING, 32, 4), rng, PROMPTS, slots=200)


@pytest.mark.parametrize("level", LEVELS)
def test_pages(level: str, rng: Any) -> None:
    for page_size in (16, 128):
        site = PagedSite(
            *(INT4, codec_of(2)),
            head_size=SIZE,
            offset_rows=3,
            frequencies=KINDS["interleaved"],
            page_size=page_size,
        )
        feeds = site.requests(rng, LONG)
        assert_paged(site, feeds, solved(level, site, feeds), limit=LIMIT)
