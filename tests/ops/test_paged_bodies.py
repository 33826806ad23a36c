"""The bodies of the paged operators against a loop over the contiguous oracle, in both runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.pagedsite import PagedSite, Requests, assert_calls, assert_pages
from tests.ops.site import CODECS, FLOATS, INT2, INT3
from tests.ops.test_attention_body import TOLERANCE
from tests.singleop import INT4, RUNTIMES, run_ort
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import Codec

#: A prompt, single tokens, a chunk that ends in the next page, and a request that waits.
MIXED: Requests = [(0, 21), (15, 1), (16, 1), (9, 12), (5, 0), (31, 2)]


def assert_paged(
    site: PagedSite,
    feeds: Any,
    results: list[Any],
    *,
    limit: float | None = None,
    **attributes: Any,
) -> None:
    output, *presents = results
    assert_pages(site, feeds, presents)
    wanted = site.over_pages(feeds, *presents, **attributes)
    assert output.shape == wanted.shape
    error = np.abs(output - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= (TOLERANCE[site.dtype] if limit is None else limit)


@pytest.mark.parametrize("codec", [*CODECS, FLOATS], ids=str)
def test_every_codec_in_a_mixed_batch(*, codec: Codec, rng: Any) -> None:
    site = PagedSite(codec, codec, spare_bytes=3)
    feeds = site.requests(rng, MIXED)
    assert_paged(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
def test_half_precision(*, dtype: ir.DataType, rng: Any) -> None:
    site = PagedSite(INT4, INT3, dtype=dtype, heads=6, head_size=64)
    feeds = site.requests(rng, MIXED)
    assert_paged(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.parametrize(
    "requests", [[(0, 1)], [(40, 1)], [(0, 17)], [(3, 1)] * 4, [(0, 0), (0, 2)]]
)
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages_and_batches(*, requests: Requests, page_size: int, rng: Any) -> None:
    site = PagedSite(INT4, INT2, page_size=page_size, heads=3, kv_heads=3)
    feeds = site.requests(rng, requests)
    assert_paged(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_windows_caps_sinks_offsets_and_several_codecs(*, runtime: str, rng: Any) -> None:
    site = PagedSite(
        *(Codec(PROD, 4), INT3), has_sink=True, offset_rows=7, others=((INT4, FLOATS),), opset=21
    )
    attributes = {"sliding_window": 6, "softcap": 0.7}
    feeds = site.requests(rng, MIXED)
    feeds["head_sink"] = site.rounded(rng.standard_normal(site.heads))
    assert_paged(site, feeds, RUNTIMES[runtime](site.model(**attributes), feeds), **attributes)


def test_pages_in_another_order_give_the_same_bits(*, rng: Any) -> None:
    site = PagedSite()
    feeds = site.requests(rng, MIXED)
    order = rng.permutation(len(feeds["past_key"]))
    place = np.argsort(order).astype(np.int32)
    table = feeds["block_table"]
    moved = {**feeds, "block_table": np.where(table < 0, table, place[table])}
    for name in ("past_key", "past_value"):
        moved[name] = feeds[name][order]
    model = site.model()
    output, *presents = run_ort(model, feeds)
    other, *its = run_ort(model, moved)
    np.testing.assert_array_equal(other, output)
    for present, its_present in zip(presents, its, strict=True):
        np.testing.assert_array_equal(its_present, present[order])


def test_pages_that_requests_share_are_read_by_both(*, rng: Any) -> None:
    site = PagedSite()
    feeds = site.requests(rng, [(16, 1), (16, 1)])
    feeds["block_table"][1, 0] = feeds["block_table"][0, 0]
    assert_paged(site, feeds, run_ort(site.model(), feeds))


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


@pytest.mark.parametrize("site", EXACT_SITES, ids=lambda site: str(site.exact))
def test_exact_tokens_in_pages(*, site: PagedSite, rng: Any) -> None:
    limit = TOLERANCE[site.dtype]
    assert_calls(site, run_ort, rng, EXACT_CALLS, limit=limit, sliding_window=30)
