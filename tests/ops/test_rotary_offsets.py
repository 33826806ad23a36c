"""Offsets that turn with their slots, in the bodies of the operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.rows import assert_same_rows
from tests.ops.site import FLOATS, INT3, Site
from tests.ops.test_attention_body import TOLERANCE, assert_attention, bias_for
from tests.ops.windows import assert_calls, with_window
from tests.singleop import INT4, RUNTIMES, function_model, run_ort
from tq_onnx.codec import reference
from tq_onnx.ops.features import OFFSETS, ROTARY_OFFSETS

SIZE = 16
_PAIRS = 0.9 ** np.arange(SIZE // 2)
HALVES = (*_PAIRS, *_PAIRS)
INTERLEAVED = tuple(np.repeat(_PAIRS, 2))
PARTIAL = (*_PAIRS[:4], *_PAIRS[:4], *[0.0] * 8)
KINDS = {"halves": HALVES, "interleaved": INTERLEAVED, "partial": PARTIAL, "none": (0.0,)}

TURNING = Site(INT4, INT3, head_size=SIZE, offset_rows=3, frequencies=HALVES)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_rotaries_of_every_kind(runtime: str, kind: str, rng: Any) -> None:
    """Of a ragged batch, in caches with room."""
    site = replace(TURNING, frequencies=KINDS[kind])
    feeds = site.feeds(rng, past_length=(9, 2), new=3, capacity=14)
    results = RUNTIMES[runtime](site.model(sliding_window=6), feeds)
    assert_attention(site, feeds, results, sliding_window=6)
    assert_same_rows(site, feeds, results[1:], site.expected_presents(feeds))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("padding", "frequencies"), [((4, 0), HALVES), ((7,), HALVES), ((2, 0), (0.0,))]
)
def test_padding_moves_what_turns(
    runtime: str, padding: tuple[int, ...], frequencies: tuple[float, ...], rng: Any
) -> None:
    site = replace(TURNING, has_padding=True, frequencies=frequencies)
    feeds = site.feeds(rng, past_length=(9, 1), new=3)
    feeds["left_padding"] = np.array(padding)
    results = RUNTIMES[runtime](site.model(), feeds)
    assert_attention(site, feeds, results)
    assert_same_rows(site, feeds, results[1:], site.expected_presents(feeds))
    # The negative twin: the comparison sees the padding.
    unpadded = site.centered(feeds | {"left_padding": np.array([0])}, "key")
    moves = np.abs(site.centered(feeds, "key") - unpadded).max()
    assert (moves > 1) == (len(frequencies) > 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_with_all_else(dtype: ir.DataType, rng: Any) -> None:
    site = replace(TURNING, dtype=dtype, has_bias=True, has_sink=True, has_padding=True)
    attributes = {"causal": 0, "sliding_window": 6, "softcap": 0.9}
    feeds = site.feeds(rng, past_length=(4, 1), new=3, capacity=9)
    feeds["attention_bias"] = bias_for(site, feeds, rng)
    feeds["head_sink"] = site.rounded(rng.standard_normal(site.heads))
    feeds["left_padding"] = np.array([2, 1])
    assert_attention(site, feeds, run_ort(site.model(**attributes), feeds), **attributes)


def test_an_exact_window_through_prompts_steps_and_rewinds(rng: Any) -> None:
    assert_calls(with_window(TURNING, 4, 2), run_ort, rng)


def test_raw_caches_beside_others_that_turn(rng: Any) -> None:
    others = ((INT4, INT4),)
    site = replace(TURNING, key=FLOATS, value=FLOATS, others=others, frequencies=(0.0,))
    feeds = site.feeds(rng, past_length=(3, 1), new=2)
    assert_attention(site, feeds, run_ort(site.model(), feeds))


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
