"""Memory that the caller binds: apart, the same, or in each other's way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.native.conftest import Feeds
from tests.native.single_node import Array, encode_model, make_session, run
from tq_onnx.ops.domain import ENCODE

ENOUGH = 4096


def encode_at(feeds: Feeds, memory: Array, past_at: int, present_at: int, slots: int) -> None:
    """Encodes with past and present at these bytes of ``memory``; present has ``slots``."""
    session = make_session(encode_model())
    binding = session.io_binding()
    for name, array in feeds.items():
        if name != "past":
            binding.bind_cpu_input(name, array)
    shape = feeds["past"].shape
    base = memory.ctypes.data
    memory[past_at : past_at + feeds["past"].size] = feeds["past"].ravel()
    binding.bind_input("past", "cpu", 0, np.uint8, shape, base + past_at)
    present = (*shape[:2], slots, shape[3])
    binding.bind_output("present", "cpu", 0, np.uint8, present, base + present_at)
    session.run_with_iobinding(binding)


@pytest.mark.parametrize("offset", [0, 320, 1000])
def test_the_same_buffer_or_another(offset: int, encode_feeds: Callable[..., Feeds]) -> None:
    feeds = encode_feeds()
    assert feeds["past"].size == 320
    memory = np.zeros(ENOUGH, np.uint8)
    encode_at(feeds, memory, 0, offset, 8)
    expected = run(make_session(encode_model()), feeds)
    np.testing.assert_array_equal(memory[offset : offset + 320], expected.ravel())


@pytest.mark.parametrize(
    ("past_at", "present_at", "slots", "tokens"),
    [(0, 1, 8, 3), (319, 0, 8, 3), (0, 319, 8, 3), (0, 0, 9, 5), (0, 40, 9, 5), (80, 0, 9, 5)],
)
def test_an_overlap_is_refused(
    past_at: int, present_at: int, slots: int, tokens: int, encode_feeds: Callable[..., Feeds]
) -> None:
    feeds = encode_feeds(tokens=tokens)
    memory = np.zeros(ENOUGH, np.uint8)
    with pytest.raises(Exception, match=f"{ENCODE}: present of shape .* overlaps past of shape"):
        encode_at(feeds, memory, past_at, present_at, slots)
    assert not memory[past_at + feeds["past"].size :].any()  # nothing was written


def test_an_empty_past_may_lie_anywhere(encode_feeds: Callable[..., Feeds]) -> None:
    feeds = encode_feeds(slots=0)
    feeds["past_length"] = np.zeros(1, np.int64)
    memory = np.zeros(ENOUGH, np.uint8)
    encode_at(feeds, memory, 0, 0, 3)
    expected = run(make_session(encode_model()), feeds)
    np.testing.assert_array_equal(memory[: expected.size], expected.ravel())


@pytest.mark.parametrize(
    ("tokens", "slots", "length", "message"),
    [
        (2**62, 2**62, 2**62, "new tokens is more than can be addressed"),
        (0, 2**62, 0, ""),
        (2**62, 0, 0, ""),
    ],
)
def test_huge_dimensions_of_nothing(
    tokens: int, slots: int, length: int, message: str, encode_feeds: Callable[..., Feeds]
) -> None:
    """Without heads there are no elements, so nothing but arithmetic can go wrong."""
    feeds = encode_feeds(heads=0)
    feeds["past_length"] = np.array([length], np.int64)
    memory = np.zeros(1, np.uint8)
    session = make_session(encode_model())
    binding = session.io_binding()
    for name, array in feeds.items():
        if name not in ("past", "vectors"):
            binding.bind_cpu_input(name, array)
    at = memory.ctypes.data
    binding.bind_input("vectors", "cpu", 0, np.float32, (2, 0, tokens, 16), at)
    binding.bind_input("past", "cpu", 0, np.uint8, (2, 0, slots, 10), at)
    binding.bind_output("present")
    if message:
        with pytest.raises(Exception, match=f"{ENCODE}: .*{message}"):
            session.run_with_iobinding(binding)
    else:
        session.run_with_iobinding(binding)
        assert binding.get_outputs()[0].shape() == [2, 0, max(tokens, slots), 10]
    assert memory[0] == 0
