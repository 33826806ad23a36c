"""Fixed-capacity caches: the same buffer as past and present, step after step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.ops.site import INT3, Site
from tests.parity.backends import BACKENDS, run, session
from tests.parity.compare import assert_same_rows, check_attention
from tests.singleop import INT4

STEPS = (17, 1, 1, 2, 1, 5)
CAPACITY = 64
SENTINEL = 0xC3
SITE = Site(INT4, INT3, head_size=128)
MODEL = SITE.model().SerializeToString()
SIDES = {"past_key": "present_key", "past_value": "present_value"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("past", [(0,), (3, 0, 20)], ids=["together", "own-lengths"])
def test_steps(past: tuple[int, ...], backend: str, rng: Any) -> None:
    """They are written in place, hold the bytes of growing ones, and nothing else is touched."""
    feeds = SITE.feeds(rng, past_length=past, capacity=0)
    # The caller's own memory: no copy of it may stand between.
    caches = {
        name: np.full((*feeds[name].shape[:2], CAPACITY, feeds[name].shape[3]), SENTINEL, np.uint8)
        for name in SIDES
    }
    bound = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(cache) for name, cache in caches.items()
    }
    growing = {name: cache[:, :, : max(past)].copy() for name, cache in caches.items()}
    lengths = past
    for new in STEPS:
        feeds = SITE.feeds(rng, past_length=lengths, new=new)
        given = {name: feeds[name] for name in ("query", "key", "value", "past_length")}
        before = {name: cache.copy() for name, cache in caches.items()}
        opened = session(backend, MODEL)
        binding = opened.io_binding()
        binding.bind_output("attended")
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        for name, value in bound.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(SIDES[name], value)
            assert value.data_ptr() == caches[name].ctypes.data
        opened.run_with_iobinding(binding)
        output = binding.copy_outputs_to_cpu()[0]
        assert_same_rows(SITE, given | before, list(caches.values()))
        check_attention("float32", output, SITE.attended(given, *caches.values()))
        grown, *presents = run(backend, MODEL, given | growing)
        np.testing.assert_array_equal(grown, output)
        growing = dict(zip(SIDES, presents, strict=True))
        lengths = tuple(length + new for length in lengths)
        for name, cache in growing.items():
            for own, other, end in zip(cache, caches[name], lengths, strict=True):
                np.testing.assert_array_equal(own[:, :end], other[:, :end])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_give_the_bytes_of_one_prompt(backend: str, rng: Any) -> None:
    feeds = SITE.feeds(rng, new=9)
    _, *whole = run(backend, MODEL, feeds)
    caches, done = [feeds[name] for name in SIDES], 0
    for size in (4, 1, 3, 1):
        part = {name: feeds[name][:, :, done : done + size] for name in ("query", "key", "value")}
        part |= {**dict(zip(SIDES, caches, strict=True)), "past_length": np.array([done])}
        _, *caches = run(backend, MODEL, part)
        done += size
    for one, other in zip(whole, caches, strict=True):
        np.testing.assert_array_equal(one, other)
