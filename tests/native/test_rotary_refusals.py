"""Frequencies of offsets that cannot be: one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.native.conftest import Feeds
from tests.native.single_node import (
    ATTENTION_DEFAULTS,
    ENCODE_DEFAULTS,
    Array,
    make_session,
    run,
)
from tests.operatormodels import single_operator
from tests.singleop import optional_inputs, with_features
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.ops.features import LEFT_PADDING, OFFSETS, ROTARY_OFFSETS
from tq_onnx.ops.operators import Attention, Encode

SIZE = 16
GOOD = np.linspace(-np.pi, np.pi, SIZE, dtype=np.float32)
FEATURES = with_features({OFFSETS: True, ROTARY_OFFSETS: True, LEFT_PADDING: True})
PADDING = np.array([1, 2])


def frequencies(value: float, at: int) -> Array:
    changed = GOOD.copy()
    changed[at] = value
    return changed


CASES: dict[str, tuple[str, Array, str]] = {
    "length": ("frequencies", GOOD[:8], "{0}frequencies has shape [8], expected [16]"),
    "rank 2": ("frequencies", GOOD[None], "{0}frequencies has shape [1, 16], expected [16]"),
    "none": ("frequencies", GOOD[:0], "{0}frequencies has shape [0], expected [16]"),
    "not a number": (
        "frequencies",
        frequencies(np.nan, 3),
        "{0}frequencies of coordinate 3 is nan, expected radians from -pi to pi",
    ),
    "infinite": ("frequencies", frequencies(-np.inf, 0), "of coordinate 0 is -inf, expected"),
    "too fast": ("frequencies", frequencies(3.15, 15), "of coordinate 15 is 3.15"),
    "one row": ("offset", np.zeros((1, 2, SIZE), np.float32), "{0}offset has shape [1, 2, 16]"),
    "other heads": ("offset", np.zeros((3, 4, SIZE), np.float32), "expected [3, 2, 16]"),
    "no end of rows": ("offset", np.zeros((65, 2, SIZE), np.float32), "expected 1 to 64 rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_encode_refuses(name: str, encode_feeds: Callable[..., Feeds]) -> None:
    changed, array, message = CASES[name]
    optional = optional_inputs(FEATURES, Encode)
    session = make_session(single_operator(Encode, ENCODE_DEFAULTS, "float32", optional=optional))
    good = {**encode_feeds(offsets=2), "frequencies": GOOD, "left_padding": PADDING}
    before = run(session, good)
    with pytest.raises(Exception, match=re.escape(message.format(""))) as error:
        run(session, {**good, changed: array})
    assert f"{ENCODE}: " in str(error.value)
    np.testing.assert_array_equal(run(session, good), before)


@pytest.mark.parametrize("name", CASES)
def test_attention_refuses(name: str, attention_feeds: Callable[..., Feeds]) -> None:
    changed, array, message = CASES[name]
    optional = optional_inputs(FEATURES)
    model = single_operator(Attention, ATTENTION_DEFAULTS, "float32", optional=optional)
    session = make_session(model)
    good = {**attention_feeds(offsets=2), "key_frequencies": GOOD, "left_padding": PADDING}
    good["value_offset"] = good["value_offset"][:1]  # any number of rows
    before = run(session, good)
    with pytest.raises(Exception, match=re.escape(message.format("key_"))) as error:
        run(session, {**good, f"key_{changed}": array})
    assert f"{ATTENTION}: " in str(error.value)
    np.testing.assert_array_equal(run(session, good), before)


def test_frequencies_need_an_offset(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    model = single_operator(Encode, ENCODE_DEFAULTS, "float32", optional=[Encode.frequencies])
    with pytest.raises(Exception, match=f"{ENCODE}: offset is missing, expected it with freq"):
        run(make_session(model), {**encode_feeds(), "frequencies": GOOD})
    # One number is none.
    run(make_session(model), {**encode_feeds(), "frequencies": GOOD[:1]})
    model = single_operator(
        Attention, ATTENTION_DEFAULTS, "float32", optional=[Attention.key_frequencies]
    )
    with pytest.raises(Exception, match=f"{ATTENTION}: key_offset is missing, expected it with"):
        run(make_session(model), {**attention_feeds(), "key_frequencies": GOOD})
    run(make_session(model), {**attention_feeds(), "key_frequencies": GOOD[:1]})


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ([-1, 0], "left_padding[0] is -1, expected 0 or more"),
        ([0, 99], "left_padding[1] is 99, but present has only"),
        ([1, 2, 3], "left_padding has 3 elements, expected 1 or 2"),
    ],
)
def test_padding_that_cannot_be(
    padding: list[int], message: str, encode_feeds: Callable[..., Feeds]
) -> None:
    optional = optional_inputs(FEATURES, Encode)
    session = make_session(single_operator(Encode, ENCODE_DEFAULTS, "float32", optional=optional))
    feeds = {**encode_feeds(offsets=2), "frequencies": GOOD, "left_padding": np.array(padding)}
    with pytest.raises(Exception, match=re.escape(f"{ENCODE}: {message}")):
        run(session, feeds)
    # Offsets that do not turn do not heed it.
    run(session, {**feeds, "frequencies": GOOD[:1]})
