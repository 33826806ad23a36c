"""An exact window in body and kernels: entries byte for byte, attention as the oracle says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.ops.site import FLOATS, INT3, Arrays, Site
from tests.parity.backends import BACKENDS, BEST, run, session
from tests.parity.compare import check_attention
from tests.parity.windows import (
    CALLS,
    assert_calls,
    behind_overlays,
    random_caches,
    with_spare_rows,
    with_window,
)
from tests.singleop import INT4, codec_of
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import Window

PROMPTS = [((0,), 150), ((150,), 1), ((151,), 40), ((60,), 100), ((160,), 1)]
"""Enough query rows for the tiles of a prefill, then decoding, in parts, and rewound."""


def call(site: Site, feeds: Arrays, backend: str = BEST) -> list[Any]:
    return run(backend, site.model().SerializeToString(), feeds)


def check(site: Site, feeds: Arrays, output: Any, *presents: Any) -> None:
    """Check attention over the caches that were given."""
    check_attention(site.element, output, site.attended(feeds, *presents))


CODECS = [
    (INT4, codec_of(3)),
    (codec_of(5), codec_of(2)),
    (Codec("fp8_e4m3", 8), Codec("uniform", 4)),
    (Codec("prod", 4), Codec("q8_0", 8)),
    (Codec("u8", 4), Codec("u8", 4)),
]


PLACES = {"overlay": with_window, "spare rows": with_spare_rows}
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@places
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codecs", CODECS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_codecs(backend: str, codecs: tuple[Codec, Codec], place: Any, rng: Any) -> None:
    """Also caches that are full, that have room for some entries, and for all of them."""
    site = place(Site(*codecs, head_size=40, spare_bytes=1), 5, 2)
    for slots in (18, 23, 90) if place is with_spare_rows else (20,):
        assert_calls(site, backend, rng, slots=slots)
    assert_calls(site, backend, rng, [((0,), 40), ((40,), 1), ((30,), 9)], slots=50)


@places
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("recent", "sinks"), [(4, 2), (5, 0), (0, 3), (16, 1)])
def test_entries_and_attention(backend: str, recent: int, sinks: int, place: Any, rng: Any) -> None:
    site = place(Site(INT4, INT3, head_size=16, spare_bytes=recent % 2), recent, sinks)
    assert_calls(site, backend, rng)


@places
@pytest.mark.parametrize(("recent", "sinks"), [(32, 4), (300, 0), (0, 5), (7, 200)])
def test_prompts(recent: int, sinks: int, place: Any, rng: Any) -> None:
    site = place(Site(head_size=64), recent, sinks)
    for slots in (200, 400) if place is with_spare_rows else (200,):
        assert_calls(site, BEST, rng, PROMPTS, slots=slots)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "causal"),
    [(ir.DataType.FLOAT, 0), (ir.DataType.FLOAT16, 1), (ir.DataType.BFLOAT16, 1)],
)
def test_with_all_else(backend: str, dtype: ir.DataType, causal: int, rng: Any) -> None:
    site = Site(dtype=dtype, head_size=16, has_bias=True, has_sink=True, offset_rows=3)
    attributes = {"causal": causal, "sliding_window": 6, "softcap": 0.9}
    if dtype is ir.DataType.FLOAT:
        site = replace(site, others=((FLOATS, FLOATS),))
    assert_calls(with_window(site, 4, 2), backend, rng, **attributes)
    long = [((0,), 40), ((40,), 1), ((30,), 50)]
    assert_calls(with_window(site, 4, 2), backend, rng, long, slots=90, **attributes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_cache_is_split(backend: str, rng: Any) -> None:
    site = with_window(Site(head_size=16, heads=2, kv_heads=1), 16, 2)
    assert_calls(site, backend, rng, [((0,), 700), ((700,), 1), ((701,), 2)], slots=703)


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_caches_beside_others_have_rows_and_no_entries(backend: str, rng: Any) -> None:
    site = Site(FLOATS, FLOATS, head_size=16, others=((INT4, INT4),), window=Window(0, 0, 12))
    assert_calls(site, backend, rng)


def test_a_growing_cache_may_begin_with_no_rows(rng: Any) -> None:
    site = with_window(Site(head_size=16), 4, 1)
    feeds = site.feeds(rng, past_length=(0,), new=6, capacity=0)
    overlay = site.window.overlay_rows if site.window else 0
    _, *presents = call(site, feeds, "body")
    for made, said in zip(presents, site.expected_presents(feeds), strict=True):
        assert made.shape == said.shape == (1, 2, overlay + 6, said.shape[3])
        np.testing.assert_array_equal(made[:, :, :overlay], said[:, :, :overlay])


@pytest.mark.parametrize("opset", [15, 21])
def test_bodies_mean_the_same_in_the_opset_of_the_model(opset: int, rng: Any) -> None:
    site = with_window(Site(head_size=16, opset=opset), 4, 2)
    assert_calls(site, "body", rng, [((0,), 7), ((7,), 2)])


@pytest.mark.parametrize("past", [0, 9])
def test_vectors_that_no_float16_holds(past: int, rng: Any) -> None:
    """Large ones are clamped, those that are not finite are zeros and spoil nothing."""
    site = with_window(Site(head_size=16), 4, 2)
    feeds = site.feeds(rng, past_length=(past,), new=3)
    feeds |= behind_overlays(site, feeds, rng)
    feeds["key"][0, 0, 0, 0] = np.nan
    feeds["value"][0, 1, 1, 3] = -np.inf
    feeds["value"][0, 0, 2] = [1e6, -1e6, 1e-9, -0.0] * 4
    for backend in BACKENDS:
        output, *presents = call(site, feeds, backend)
        overlay = slice(0, site.window.overlay_rows if site.window else 0)
        for made, said in zip(presents, site.expected_presents(feeds), strict=True):
            np.testing.assert_array_equal(made[:, :, overlay], said[:, :, overlay])
        check(site, feeds, output, *presents)


@pytest.mark.parametrize("new", [1, 90])
def test_tags_that_nobody_wrote_lead_nowhere(new: int, rng: Any) -> None:
    """Random tags, and the right ones over random vectors: as the oracle says, and in bounds."""
    site = with_window(Site(head_size=16), 8, 2)
    assert site.window is not None
    feeds = site.feeds(rng, past_length=(30,), new=new)
    feeds |= behind_overlays(site, feeds, rng)
    for name in ("past_key", "past_value"):
        plane = feeds[name]
        rows = site.window.overlay_rows // site.window.entries
        entries = plane[:, :, : site.window.overlay_rows].reshape(1, 2, -1, rows * plane.shape[3])
        halves = rng.standard_normal((1, 2, site.window.entries, 16)).astype(np.float16)
        entries[..., :32] = halves.view(np.uint8)
        tokens = np.array([site.window.sinks + (t - 2) % 8 for t in range(24, 30)])
        for token, entry in zip(range(24, 30), tokens, strict=True):
            entries[:, :, entry, 32:36] = np.array([token + 1], "<u4").view(np.uint8)
        if name == "past_value":
            entries[:, 1, tokens[2], 32:36] = 255
        plane[:, :, : site.window.overlay_rows] = entries.reshape(1, 2, -1, plane.shape[3])
    for backend in BACKENDS:
        output, *presents = call(site, feeds, backend)
        check(site, feeds, output, *presents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_in_one_call_is_the_same_tokens_one_by_one(backend: str, rng: Any) -> None:
    site = with_window(Site(head_size=16), 8, 2)
    whole = site.feeds(rng, past_length=(0,), new=70)
    output, *_ = call(site, whole | random_caches(site, 70, rng, 1), backend)
    caches, steps = random_caches(site, 70, rng, 1), []
    for t in range(70):
        feeds = {name: whole[name][:, :, t : t + 1] for name in ("query", "key", "value")}
        feeds |= {"past_length": np.array([t], np.int64), **caches}
        step, *presents = call(site, feeds, backend)
        steps.append(step)
        caches = dict(zip(("past_key", "past_value"), presents, strict=True))
    steps = np.concatenate(steps, axis=2)
    np.testing.assert_allclose(output, steps, atol=1e-4 * np.abs(output).max())


def test_beams_take_their_windows_along(rng: Any) -> None:
    """Sequences of a batch that change places, as beams do, go on as if they had been there."""
    site = with_window(Site(head_size=16), 4, 2)
    first = site.feeds(rng, past_length=(0, 0, 0), new=9) | random_caches(site, 20, rng, 3)
    _, *presents = call(site, first)
    caches = dict(zip(("past_key", "past_value"), presents, strict=True))
    feeds = site.feeds(rng, past_length=(9, 7, 8), new=2) | caches
    order = [2, 0, 0]
    there = call(site, {name: array[order] for name, array in feeds.items()})
    for moved, stayed in zip(there, call(site, feeds), strict=True):
        np.testing.assert_array_equal(moved, stayed[order])


def test_a_rewound_cache_reads_rows_where_entries_are_gone(rng: Any) -> None:
    """Rewinding by no more than is in the window, and going on, is never having gone beyond."""
    site = with_window(Site(head_size=16), 8, 2)
    caches = random_caches(site, 40, rng, 1)
    tokens = site.feeds(rng, past_length=(0,), new=30)

    def run_from(start: int, end: int, caches: Arrays) -> tuple[Any, Arrays]:
        names = ("query", "key", "value")
        feeds = {name: tokens[name][:, :, start:end] for name in names}
        feeds["past_length"] = np.array([start], np.int64)
        output, *presents = call(site, feeds | caches)
        return output, dict(zip(("past_key", "past_value"), presents, strict=True))

    _, at_20 = run_from(0, 20, caches)
    straight, _ = run_from(20, 21, at_20)
    # The same tokens again, after 20: their entries are those that stand there.
    _, at_21 = run_from(20, 21, at_20)
    _, rewound = run_from(19, 20, at_21)
    again, _ = run_from(20, 21, rewound)
    # One entry, of token 12, was overwritten by token 20; it is out of reach at 20.
    np.testing.assert_array_equal(again, straight)
    # Far beyond: the window is gone, and rows are read.
    _, at_30 = run_from(20, 30, at_20)
    beyond, _ = run_from(20, 21, at_30)
    assert np.abs(beyond - straight).max() > 1e-4 * np.abs(straight).max()
    feeds = {name: tokens[name][:, :, 20:21] for name in ("query", "key", "value")}
    feeds |= {"past_length": np.array([20], np.int64), **at_30}
    check(site, feeds, *call(site, feeds))


def test_in_place_is_as_growing(rng: Any) -> None:
    site = with_window(Site(head_size=16), 4, 2)
    opened = session(BEST, site.model().SerializeToString())
    bound = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        for name, cache in random_caches(site, 20, rng).items()
    }
    grown: Arrays = {
        name: np.zeros((2, site.kv_heads, 0, cache.shape()[3]), np.uint8)
        for name, cache in bound.items()
    }
    for lengths, new in CALLS:
        # A growing cache has as many rows as its longest sequence; here all have as many.
        feeds = site.feeds(rng, past_length=lengths, new=new) | {}
        given = {name: feeds[name] for name in ("query", "key", "value", "past_length")}
        output, *presents = call(site, given | grown)
        grown = dict(zip(("past_key", "past_value"), presents, strict=True))
        binding = opened.io_binding()
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("attended")
        for name, cache in bound.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past", "present"), cache)
        opened.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), output)
