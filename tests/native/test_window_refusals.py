"""An exact window that its caches have no room for, or that is none, is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ops.site import FLOATS, Site
from tests.ops.windows import behind_overlays, with_window
from tests.parity.backends import LEVELS, run
from tq_onnx.codec.window import Window

BASE = with_window(Site(head_size=16), 4, 2)


@pytest.mark.parametrize(
    ("window", "sentence"),
    [
        (Window(-1, 2, 30), "recent is -1, expected 0 to 4096"),
        (Window(4, 4097, 30), "sinks is 4097, expected 0 to 4096"),
        (Window(2049, 2048, 30), "recent and sinks together are 4097"),
        (
            Window(4, 2, 23),
            "overlay_rows is 23, but 6 entries of head size 16 need 24 rows of past",
        ),
        (Window(4, 2, 1 << 40), "overlay_rows is 1099511627776"),
    ],
)
def test_attributes(window: Window, sentence: str) -> None:
    site = replace(BASE, window=window)
    feeds = site.feeds(np.random.default_rng(0), past_length=(0,), new=1)
    with pytest.raises(Exception, match=sentence):
        run(LEVELS[-1], site.model().SerializeToString(), feeds)


def test_raw_caches_have_no_entries() -> None:
    site = Site(key=FLOATS, value=FLOATS, head_size=16, window=Window(1, 0, 1))
    feeds = site.feeds(np.random.default_rng(0), past_length=(0,), new=1)
    with pytest.raises(Exception, match="caches of raw have no entries"):
        run(LEVELS[-1], site.model().SerializeToString(), feeds)


def _feeds(**others: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds = BASE.feeds(rng, past_length=(5,), new=1)
    return feeds | behind_overlays(BASE, feeds, rng) | others


def test_a_past_that_the_overlay_leaves_no_room_for() -> None:
    feeds = _feeds()
    for name in ("past_key", "past_value"):
        feeds[name] = feeds[name][:, :, :-1]
    with pytest.raises(Exception, match=r"past_length\[0\] is 5, but past has only 4 slots"):
        run(LEVELS[-1], BASE.model().SerializeToString(), feeds)


def test_more_tokens_than_tags() -> None:
    with pytest.raises(Exception, match=r"past_length\[0\] is 4294967295"):
        feeds = _feeds(past_length=np.array([2**32 - 1], np.int64))
        run(LEVELS[-1], BASE.model().SerializeToString(), feeds)


@pytest.mark.parametrize("missing", ["new_keys", "new_values"])
def test_vectors_of_the_call_are_needed(missing: str) -> None:
    model = BASE.model()
    node = next(each for each in model.graph.node if each.name == "attended")
    slot = len(node.input) - (2 if missing == "new_keys" else 1)
    node.input[slot] = ""
    with pytest.raises(Exception, match=f"{missing} has type another type, expected float"):
        run(LEVELS[-1], model.SerializeToString(), _feeds())
