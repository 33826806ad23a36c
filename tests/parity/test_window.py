"""An exact window in the kernels of every level: entries byte for byte, attention as the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from tests.ops.site import FLOATS, Arrays, Site
from tests.ops.windows import (
    CALLS,
    Run,
    assert_calls,
    behind_overlays,
    random_caches,
    with_spare_rows,
    with_window,
)
from tests.parity.backends import LEVELS, LEVELS_AND_BODY, run, session
from tests.parity.compare import check_attention
from tests.singleop import INT4, codec_of
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import Window

PROMPTS = [((0,), 150), ((150,), 1), ((151,), 40), ((60,), 100), ((160,), 1)]
"""Enough query rows for the tiles of a prefill, then decoding, in parts, and rewound."""


def kernels(level: str) -> Run:
    """Run a model on the kernels of a level."""

    def call(model: onnx.ModelProto, feeds: Arrays) -> list[Any]:
        return run(level, model.SerializeToString(), feeds)

    return call


def check(level: str, site: Site, feeds: Arrays, output: Any, *presents: Any) -> None:
    """Check attention of a kernel over the caches that it was given."""
    check_attention(level, site.element, output, site.attended(feeds, *presents))


def assert_kernels(level: str, site: Site, rng: Any, *args: Any, **attributes: Any) -> None:
    """Check the calls of a kernel, beginning with buffers of random bytes."""

    def check(site: Site, output: Any, expected: Any) -> None:
        check_attention(level, site.element, output, expected)

    assert_calls(site, kernels(level), rng, *args, check=check, **attributes)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


CODECS = [
    (INT4, codec_of(3)),
    (codec_of(5), codec_of(2)),
    (Codec("fp8_e4m3", 8), Codec("uniform", 4)),
    (Codec("prod", 4), Codec("q8_0", 8)),
    (Codec("u8", 4), Codec("u8", 4)),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codecs", CODECS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_codecs(level: str, codecs: tuple[Codec, Codec], rng: Any) -> None:
    site = with_window(Site(*codecs, head_size=40, spare_bytes=1), 5, 2)
    assert_kernels(level, site, rng)
    assert_kernels(level, site, rng, [((0,), 40), ((40,), 1)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("recent", "sinks"), [(32, 4), (300, 0), (0, 5), (7, 200)])
def test_prompts(level: str, recent: int, sinks: int, rng: Any) -> None:
    site = with_window(Site(head_size=64), recent, sinks)
    assert_kernels(level, site, rng, PROMPTS, slots=200)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codecs", CODECS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_spare_rows(level: str, codecs: tuple[Codec, Codec], rng: Any) -> None:
    """Caches that are full, that have room for some entries, and for all of them."""
    site = with_spare_rows(Site(*codecs, head_size=40, spare_bytes=1), 5, 2)
    for slots in (18, 23, 44, 90):
        assert_kernels(level, site, rng, slots=slots)
    assert_kernels(level, site, rng, [((0,), 40), ((40,), 1), ((30,), 9)], slots=50)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("recent", "sinks"), [(32, 4), (300, 0), (0, 5)])
def test_prompts_in_caches_with_spare_rows(level: str, recent: int, sinks: int, rng: Any) -> None:
    site = with_spare_rows(Site(head_size=64), recent, sinks)
    for slots in (161, 220, 400):
        assert_kernels(level, site, rng, PROMPTS, slots=slots)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "causal"),
    [(ir.DataType.FLOAT, 0), (ir.DataType.FLOAT16, 1), (ir.DataType.BFLOAT16, 1)],
)
def test_with_all_else(level: str, dtype: ir.DataType, causal: int, rng: Any) -> None:
    site = Site(dtype=dtype, head_size=16, has_bias=True, has_sink=True, offset_rows=3)
    site = with_window(site, 4, 2)
    attributes = {"causal": causal, "sliding_window": 6, "softcap": 0.9}
    assert_kernels(level, site, rng, **attributes)
    long = [((0,), 40), ((40,), 1), ((30,), 50)]
    assert_kernels(level, site, rng, long, slots=90, **attributes)


def test_a_long_cache_is_split(rng: Any) -> None:
    site = with_window(Site(head_size=16, heads=2, kv_heads=1), 16, 2)
    calls = [((0,), 700), ((700,), 1), ((701,), 2)]
    assert_kernels(LEVELS[-1], site, rng, calls, slots=703)


def test_raw_caches_beside_others_have_rows_and_no_entries(rng: Any) -> None:
    site = Site(key=FLOATS, value=FLOATS, head_size=16, others=((INT4, INT4),))
    assert_kernels(LEVELS[-1], replace(site, window=Window(0, 0, 12)), rng)


@pytest.mark.parametrize("past", [0, 9])
def test_vectors_that_no_float16_holds(past: int, rng: Any) -> None:
    """Large ones are clamped, those that are not finite are zeros and spoil nothing."""
    site = with_window(Site(head_size=16), 4, 2)
    feeds = site.feeds(rng, past_length=(past,), new=3)
    feeds |= behind_overlays(site, feeds, rng)
    feeds["key"][0, 0, 0, 0] = np.nan
    feeds["value"][0, 1, 1, 3] = -np.inf
    feeds["value"][0, 0, 2] = [1e6, -1e6, 1e-9, -0.0] * 4
    for level in LEVELS:
        output, *presents = kernels(level)(site.model(), feeds)
        overlay = slice(0, site.window.overlay_rows if site.window else 0)
        for made, said in zip(presents, site.expected_presents(feeds), strict=True):
            np.testing.assert_array_equal(made[:, :, overlay], said[:, :, overlay])
        check(level, site, feeds, output, *presents)


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
    for level in LEVELS:
        output, *presents = kernels(level)(site.model(), feeds)
        check(level, site, feeds, output, *presents)


def one_call_and_steps(site: Site, rng: Any, level: str) -> tuple[Any, Any]:
    """Outputs of a prompt in one call, and of the same tokens one by one."""
    model, whole = site.model(), site.feeds(rng, past_length=(0,), new=70)
    output, *_ = kernels(level)(model, whole | random_caches(site, 70, rng, 1))
    caches, steps = random_caches(site, 70, rng, 1), []
    for t in range(70):
        names = ("query", "key", "value")
        feeds = {name: whole[name][:, :, t : t + 1] for name in names} | caches
        step, *presents = kernels(level)(model, feeds | {"past_length": np.array([t], np.int64)})
        steps.append(step)
        caches = dict(zip(("past_key", "past_value"), presents, strict=True))
    return output, np.concatenate(steps, axis=2)


@pytest.mark.parametrize("level", LEVELS_AND_BODY)
def test_a_prompt_in_one_call_is_the_same_tokens_one_by_one(level: str, rng: Any) -> None:
    whole, steps = one_call_and_steps(with_window(Site(head_size=16), 8, 2), rng, level)
    np.testing.assert_allclose(whole, steps, atol=1e-4 * np.abs(whole).max())


def test_beams_take_their_windows_along(rng: Any) -> None:
    """Sequences of a batch that change places, as beams do, go on as if they had been there."""
    site = with_window(Site(head_size=16), 4, 2)
    model, call = site.model(), kernels(LEVELS[-1])
    first = site.feeds(rng, past_length=(0, 0, 0), new=9) | random_caches(site, 20, rng, 3)
    _, *presents = call(model, first)
    caches = dict(zip(("past_key", "past_value"), presents, strict=True))
    feeds = site.feeds(rng, past_length=(9, 7, 8), new=2) | caches
    order = [2, 0, 0]
    there = call(model, {name: array[order] for name, array in feeds.items()})
    for moved, stayed in zip(there, call(model, feeds), strict=True):
        np.testing.assert_array_equal(moved, stayed[order])


def test_a_rewound_cache_reads_rows_where_entries_are_gone(rng: Any) -> None:
    """Rewinding by no more than is in the window, and going on, is never having gone beyond."""
    site = with_window(Site(head_size=16), 8, 2)
    model, call = site.model(), kernels(LEVELS[-1])
    caches = random_caches(site, 40, rng, 1)
    tokens = site.feeds(rng, past_length=(0,), new=30)

    def run_from(start: int, end: int, caches: Arrays) -> tuple[Any, Arrays]:
        names = ("query", "key", "value")
        feeds = {name: tokens[name][:, :, start:end] for name in names}
        feeds["past_length"] = np.array([start], np.int64)
        output, *presents = call(model, feeds | caches)
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
    assert_window(site, call, model, feeds)


def assert_window(site: Site, call: Run, model: onnx.ModelProto, feeds: Arrays) -> None:
    """Check one call with the oracle."""
    output, *presents = call(model, feeds)
    check(LEVELS[-1], site, feeds, output, *presents)


def test_in_place_is_as_growing(rng: Any) -> None:
    site = with_window(Site(head_size=16), 4, 2)
    model = site.model()
    opened = session(LEVELS[-1], model.SerializeToString())
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
        output, *presents = kernels(LEVELS[-1])(model, given | grown)
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
