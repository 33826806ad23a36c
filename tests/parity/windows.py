"""Calls of one attention layer with an exact window, each compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.ops.site import Arrays, Site
from tests.parity.backends import run
from tests.parity.compare import check_attention
from tq_onnx.codec.window import Window, window_of

CALLS = [((0, 0), 7), ((7, 3), 1), ((8, 4), 3), ((5, 0), 1), ((6, 1), 12)]
"""Past lengths and new tokens: prompts, decoding, a longer call, rewound, and one begun anew."""


def with_spare_rows(site: Site, recent: int, sinks: int) -> Site:
    """The layer with so many entries behind the rows of its tokens."""
    return replace(site, window=Window(recent, sinks))


def with_window(site: Site, recent: int, sinks: int) -> Site:
    """The layer with room for so many entries in both caches."""
    planes = [(site.head_size, site.width(codec)) for codec in (site.key, site.value)]
    return replace(site, window=window_of(recent, sinks, planes))


def random_caches(site: Site, slots: int, rng: Any, batch: int = 2) -> Arrays:
    """Past caches with room for so many tokens, full of random bytes."""
    assert site.window is not None
    rows = site.window.overlay_rows + slots
    return {
        f"past_{side}": rng.integers(
            0, 256, (batch, site.kv_heads, rows, site.width(codec)), np.uint8
        )
        for side, codec in (("key", site.key), ("value", site.value))
    }


def behind_overlays(site: Site, feeds: Arrays, rng: Any) -> Arrays:
    """The past caches of the feeds, behind overlays of random bytes and with room for more."""
    assert site.window is not None
    made = {}
    for name in ("past_key", "past_value"):
        rows = feeds[name]
        shape = (*rows.shape[:2], site.window.overlay_rows, rows.shape[3])
        made[name] = np.concatenate([rng.integers(0, 256, shape, np.uint8), rows], axis=2)
    return made


def assert_entries(site: Site, made: Any, said: Any, ends: Any) -> None:
    """All rows but those of tokens are the same: entries, and what is between."""
    assert made.shape == said.shape
    assert site.window is not None
    first = site.window.overlay_rows
    for of_made, of_said, end in zip(made, said, ends, strict=True):
        np.testing.assert_array_equal(of_made[:, :first], of_said[:, :first])
        np.testing.assert_array_equal(of_made[:, first + end :], of_said[:, first + end :])


def assert_calls(
    site: Site,
    backend: str,
    rng: Any,
    calls: Iterable[tuple[tuple[int, ...], int]] = CALLS,
    *,
    slots: int = 20,
    **attributes: Any,
) -> None:
    """Every call does what the oracle says, beginning with buffers of random bytes."""
    assert site.window is not None
    model = site.model(**attributes).SerializeToString()
    pasts = None
    for lengths, new in calls:
        if pasts is None:
            pasts = random_caches(site, slots, rng, len(lengths))
        feeds: Arrays = site.feeds(rng, past_length=lengths, new=new) | pasts
        feeds |= random_extras(site, feeds, rng)
        output, *presents = run(backend, model, feeds)
        for made, said in zip(presents, site.expected_presents(feeds), strict=True):
            assert_entries(site, made, said, np.array(lengths) + new)
        # The codes of the oracle may differ at ties: attention over the caches that were made.
        check_attention(site.element, output, site.attended(feeds, *presents, **attributes))
        pasts = {"past_key": presents[0], "past_value": presents[1]}


def random_extras(site: Site, feeds: Arrays, rng: Any) -> Arrays:
    """Bias and sinks, where the layer has them."""
    made = {}
    if site.has_bias:
        batch, heads, new, _ = feeds["query"].shape
        total = int(feeds["past_length"].max()) + new
        made["attention_bias"] = site.rounded(rng.standard_normal((batch, heads, new, total)))
    if site.has_sink:
        made["head_sink"] = site.rounded(rng.standard_normal(site.heads))
    return made
