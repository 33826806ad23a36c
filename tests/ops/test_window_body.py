"""An exact window in the function bodies: entries byte for byte, attention as the oracle says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.site import FLOATS, INT3, Site
from tests.ops.test_attention_body import TOLERANCE
from tests.ops.windows import assert_calls, with_spare_rows, with_window
from tests.singleop import INT4, RUNTIMES, run_ort
from tq_onnx.codec.window import Window


def of_sizes(*sizes: tuple[int, int]) -> pytest.MarkDecorator:
    """Recent tokens and sinks; the first of them by the reference evaluator, too, which is slow."""
    cases = [*(("onnxruntime", *each) for each in sizes), ("reference evaluator", *sizes[0])]
    return pytest.mark.parametrize(("runtime", "recent", "sinks"), cases)


@of_sizes((4, 2), (5, 0), (0, 3), (16, 1))
def test_entries_and_attention(runtime: str, recent: int, sinks: int, rng: Any) -> None:
    site = Site(key=INT4, value=INT3, head_size=16, spare_bytes=recent % 2)
    assert_calls(with_window(site, recent, sinks), RUNTIMES[runtime], rng)


@of_sizes((4, 2), (5, 0), (0, 3), (3, 1))
def test_entries_in_spare_rows(runtime: str, recent: int, sinks: int, rng: Any) -> None:
    """Of full caches, of caches with room for some entries, and for all of them."""
    site = Site(key=INT4, value=INT3, head_size=16, spare_bytes=recent % 2)
    for slots in (18, 27, 33, 70):
        assert_calls(with_spare_rows(site, recent, sinks), RUNTIMES[runtime], rng, slots=slots)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [0, 1])
def test_with_all_else(dtype: ir.DataType, causal: int, rng: Any) -> None:
    site = Site(
        dtype=dtype,
        head_size=16,
        has_bias=True,
        has_sink=True,
        offset_rows=3,
        others=((FLOATS, FLOATS),) if dtype is ir.DataType.FLOAT else (),
    )
    attributes = {"causal": causal, "sliding_window": 6, "softcap": 0.9}
    assert_calls(with_window(site, 4, 2), run_ort, rng, **attributes)


def test_raw_caches_beside_others_have_rows_and_no_entries(rng: Any) -> None:
    site = Site(key=FLOATS, value=FLOATS, head_size=16, others=((INT4, INT4),))
    assert_calls(replace(site, window=Window(0, 0, 12)), run_ort, rng)


def test_a_growing_cache_may_begin_with_no_rows(rng: Any) -> None:
    site = with_window(Site(head_size=16), 4, 1)
    feeds = site.feeds(rng, past_length=(0,), new=6, capacity=0)
    _, *presents = run_ort(site.model(), feeds)
    overlay = site.window.overlay_rows if site.window else 0
    for made, said in zip(presents, site.expected_presents(feeds), strict=True):
        assert made.shape == said.shape == (1, 2, overlay + 6, said.shape[3])
        np.testing.assert_array_equal(made[:, :, :overlay], said[:, :, :overlay])


@pytest.mark.parametrize("model_opset", [15, 21])
def test_bodies_mean_the_same_in_the_opset_of_the_model(model_opset: int, rng: Any) -> None:
    site = Site(head_size=16, opset=model_opset)
    assert_calls(with_window(site, 4, 2), run_ort, rng, [((0,), 7), ((7,), 2)])
