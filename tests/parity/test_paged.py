"""The paged operators of the library against a loop over the contiguous oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.site import CODECS, FLOATS, INT2, INT3
from tests.parity.backends import BEST, run, session
from tests.parity.pagedsite import PagedSite, Requests, assert_calls, assert_paged
from tests.singleop import INT4
from tests.tolerances import bounds
from tq_onnx.codec.spec import Codec

LIMIT = bounds("attention")["float32"]
LENGTHS = "cumulative_sequence_length"

#: A prompt, single tokens, a chunk that ends in the next page, and a request that waits.
MIXED: Requests = [(0, 21), (15, 1), (16, 1), (9, 12), (5, 0), (31, 2)]
# Prompts of one length and of another, single tokens behind few and behind many.
LONG: Requests = [(0, 90), (200, 1), (700, 1), (128, 1), (3, 90), (130, 5)]


def solved(site: PagedSite, feeds: Any, **attributes: Any) -> list[Any]:
    return run(BEST, site.model(**attributes).SerializeToString(), feeds)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


@pytest.mark.parametrize("codec", [*CODECS, FLOATS], ids=str)
def test_every_codec_in_a_mixed_batch(*, codec: Codec, rng: Any) -> None:
    for page_size, requests in ((16, MIXED), (128, LONG), (48, LONG)):
        site = PagedSite(codec, codec, spare_bytes=3, page_size=page_size)
        feeds = site.requests(rng, requests)
        assert_paged(site, feeds, solved(site, feeds), limit=LIMIT)


def test_pages_that_requests_share_are_read_by_both(*, rng: Any) -> None:
    site = PagedSite()
    feeds = site.requests(rng, [(16, 1), (16, 1)])
    feeds["block_table"][1, 0] = feeds["block_table"][0, 0]
    assert_paged(site, feeds, solved(site, feeds), limit=LIMIT)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
def test_half_precision(*, dtype: ir.DataType, rng: Any) -> None:
    site = PagedSite(INT4, INT3, dtype=dtype, heads=6, head_size=64, page_size=128)
    feeds = site.requests(rng, LONG)
    assert_paged(site, feeds, solved(site, feeds))


def test_windows_caps_sinks_and_offsets(*, rng: Any) -> None:
    for page_size in (16, 128):
        site = PagedSite(
            INT4, INT2, kv_heads=2, heads=4, has_sink=True, offset_rows=3, page_size=page_size
        )
        attributes = {"sliding_window": 60, "softcap": 0.7}
        feeds = site.requests(rng, LONG)
        feeds["head_sink"] = site.rounded(rng.standard_normal(site.heads))
        results = solved(site, feeds, **attributes)
        assert_paged(site, feeds, results, limit=LIMIT, **attributes)


@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_the_order_of_pages_and_the_threads_change_no_bit(*, page_size: int, rng: Any) -> None:
    site = PagedSite(page_size=page_size)
    feeds = site.requests(rng, LONG)
    order = rng.permutation(len(feeds["past_key"]))
    table = feeds["block_table"]
    moved = {**feeds, "block_table": np.where(table < 0, table, np.argsort(order)[table])}
    moved["block_table"] = moved["block_table"].astype(np.int32)
    for name in ("past_key", "past_value"):
        moved[name] = feeds[name][order]
    model = site.model().SerializeToString()
    output, *presents = run(BEST, model, feeds)
    for threads in (1, 2):
        other, *its = session(BEST, model, threads).run(None, moved)
        np.testing.assert_array_equal(other, output)
        for present, its_present in zip(presents, its, strict=True):
            np.testing.assert_array_equal(its_present, present[order])


def test_pages_of_one_buffer_are_written_in_place(*, rng: Any) -> None:
    site = PagedSite(page_size=16)
    feeds = site.requests(rng, MIXED)
    model = site.model().SerializeToString()
    expected = run(BEST, model, feeds)
    opened = session(BEST, model)
    binding = opened.io_binding()
    pages = {name: feeds[name].copy() for name in ("past_key", "past_value")}
    for name, array in (feeds | pages).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("attended")
    for name, array in pages.items():
        output = name.replace("past", "present")
        binding.bind_output(output, "cpu", 0, np.uint8, array.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)
    for name, wanted in zip(pages, expected[1:], strict=True):
        np.testing.assert_array_equal(pages[name], wanted)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected[0])


#: Prompts of less than a page and of more, single tokens across the end of a page, chunks, a
#: request that goes back, and one that begins anew.
EXACT_CALLS: list[Requests] = [
    [(0, 14), (0, 37), (0, 0)],
    *([(14 + step, 1), (37 + step, 1), (0, 0)] for step in range(4)),
    [(18, 3), (41, 9), (0, 18)],
    [(12, 1), (30, 6), (18, 1)],
    [(0, 2), (36, 1), (19, 20)],
]
EXACT_SITES = [
    PagedSite(exact=(5, 2, 2), page_size=16, head_size=32),
    PagedSite(INT4, INT3, exact=(40, 0, 1), page_size=16, heads=6, head_size=64, has_sink=True),
    PagedSite(INT3, INT2, exact=(0, 3, 3), page_size=16, offset_rows=7, spare_bytes=2),
]


def test_exact_tokens_in_pages(*, rng: Any) -> None:
    def solve(model: Any, feeds: Any) -> list[Any]:
        return run(BEST, model.SerializeToString(), feeds)

    for site in EXACT_SITES:
        assert_calls(site, solve, rng, EXACT_CALLS, limit=LIMIT, sliding_window=30)
    # Prompts by tiles, whose later rows read pages that the same call has filled.
    site = PagedSite(page_size=128, head_size=64, exact=(32, 4, 4))
    long = [[(0, 300), (0, 90)], [(300, 1), (90, 70)], [(301, 90), (160, 1)], [(391, 1), (140, 1)]]
    assert_calls(site, solve, rng, long, limit=LIMIT)


def test_exact_tokens_are_the_same_however_tokens_come(*, rng: Any) -> None:
    """One call, token by token, and pieces that begin with a page; behind shared pages, too."""
    site = PagedSite(page_size=48, head_size=64, exact=(32, 4, 4))
    model = site.model().SerializeToString()
    total = 150
    whole = site.requests(rng, [(0, total)])
    assert site.pages is not None
    shape = (*whole["past_key"].shape[:3], site.pages.width)
    outputs = []
    for size in (total, 1, 48, 96):
        caches = {name: np.full(shape, size, np.uint8) for name in ("past_key", "past_value")}
        parts = []
        for past in range(0, total, size):
            new = slice(past, min(past + size, total))
            feeds = whole | caches | {"past_seqlens": np.array([past], np.int32)}
            feeds |= {name: whole[name][:, :, new] for name in ("query", "key", "value")}
            feeds[LENGTHS] = np.array([0, new.stop - past], np.int32)
            output, *presents = run(BEST, model, feeds)
            parts.append(output)
            caches = dict(zip(caches, presents, strict=True))
        outputs.append(np.concatenate(parts, axis=2))
    for output in outputs[1:]:
        assert np.abs(output - outputs[0]).max() <= LIMIT * np.abs(outputs[0]).max()
