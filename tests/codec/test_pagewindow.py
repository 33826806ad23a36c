"""Exact tokens in pages are what was written last, whatever was taken back before."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec.paged import exact_tokens, write
from tq_onnx.codec.pagewindow import PageWindow, page_width
from tq_onnx.codec.window import rounded

SLOTS, ROW, HEAD_SIZE = 64, 21, 32


@pytest.mark.parametrize(("recent", "sinks", "entries"), [(32, 4, 4), (9, 0, 1), (12, 3, 3)])
def test_entries_hold_the_last_vectors(recent: int, sinks: int, entries: int) -> None:
    width = page_width(ROW, entries, SLOTS, HEAD_SIZE)
    window = PageWindow(recent, sinks, HEAD_SIZE, SLOTS, ROW, width)
    draw = np.random.default_rng(recent)
    pages = draw.integers(0, 256, (2, 3, SLOTS, 1, width), np.uint8)
    table = np.array([2, 0])
    vectors = np.zeros((2, 1, 2 * SLOTS, HEAD_SIZE))
    end, found = 0, 0
    while end < 2 * SLOTS - 8:
        past, new = max(0, end - int(draw.integers(0, 9))), int(draw.integers(1, 9))
        end = past + new
        vectors[:, :, past:end] = draw.standard_normal((2, 1, new, HEAD_SIZE))
        for cache, sources in zip(pages, vectors, strict=True):
            rows = draw.integers(0, 256, (1, 1, new, ROW), np.uint8)
            packing = [(slice(0, new), past, table)]
            cache[:] = write(
                cache, rows, packing, window=window, vectors=sources[None, :, past:end]
            )
        calls = vectors[0][None, :, past:end], vectors[1][None, :, past:end]
        exact = exact_tokens((pages[0], pages[1]), calls, past, table, window)
        taken = exact.taken[0, 0].any(axis=0)
        expected = rounded(vectors[:, 0, :end][:, taken])
        np.testing.assert_array_equal(
            np.stack([exact.keys, exact.values])[:, 0, 0][:, taken], expected
        )
        found += int(taken[:past].sum())
    assert found > 100
