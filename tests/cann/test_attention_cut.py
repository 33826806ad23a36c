"""The cut of the attention's keys (``custom_ops/cann/host/attention_cut.h``), compiled alone."""

from __future__ import annotations

import ctypes
import itertools
import subprocess

import pytest

from simulated_kernels import COMPILER, CUSTOM_OPS, scratch_floats

SOURCE = """
#include "cann/host/attention_cut.h"
extern "C" void cut(const int64_t* sizes, int64_t head_size, int64_t* out) {
  const auto made = tq::cann::cut_attention(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
  out[0] = made.parts, out[1] = made.part_tokens, out[2] = made.sequences;
  out[3] = made.scratch_bytes(made.sequences, head_size);
}
extern "C" int64_t keys(const int64_t* sizes) {
  return tq::cann::keys_of_task(sizes[0], sizes[1], sizes[2], sizes[3]);
}
"""
MOST_SCRATCH = 16_800_000
MOST_PARTS = 64
HEAD_SIZE = 128


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cut")
    source = folder / "cut.cpp"
    source.write_text(SOURCE)
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", f"-I{CUSTOM_OPS}", str(source)]
    subprocess.run([*command, "-o", str(folder / "cut.so")], check=True)
    return ctypes.CDLL(str(folder / "cut.so"))


def _cut(library: ctypes.CDLL, *sizes: int) -> tuple[int, int, int, int]:
    out = (ctypes.c_int64 * 4)()
    library.cut((ctypes.c_int64 * 5)(*sizes), ctypes.c_int64(HEAD_SIZE), out)
    parts, part_tokens, sequences, scratch = out
    return parts, part_tokens, sequences, scratch


def test_every_cut_is_one_that_the_kernels_take(library: ctypes.CDLL) -> None:
    """Parts are whole tiles and hold all keys; scratch is bounded, and what ``tiling.h`` says."""
    for heads, group, tokens, keys, batch in itertools.product(
        (1, 2, 8, 40, 63, 64),
        (1, 2, 5, 8, 16),
        (1, 3, 40),
        (1, 512, 513, 4096, 32768, 10**6),
        (1, 90),
    ):
        parts, part_tokens, sequences, scratch = _cut(library, heads, group, tokens, keys, batch)
        assert 1 <= sequences <= batch
        if parts == 1:
            assert (part_tokens, scratch, sequences) == (0, 0, batch)
            continue
        assert keys > 512
        assert part_tokens >= 512
        assert part_tokens % 64 == 0
        assert (parts - 1) * part_tokens < keys <= parts * part_tokens
        assert parts <= MOST_PARTS
        shape = (sequences, heads * group, tokens, HEAD_SIZE)
        assert scratch == 4 * scratch_floats(shape, heads, parts) <= MOST_SCRATCH


def test_long_caches_of_few_heads_are_cut_and_others_are_not(library: ctypes.CDLL) -> None:
    assert _cut(library, 8, 2, 1, 4096, 1)[0] == 8
    assert _cut(library, 8, 5, 1, 32768, 1)[0] == 64
    assert _cut(library, 64, 1, 1, 32768, 1)[0] == 1
    assert _cut(library, 8, 5, 128, 32768, 1)[0] == 1  # a prompt is cut by its queries


def test_a_cut_does_not_depend_on_the_batch(library: ctypes.CDLL) -> None:
    for keys in (513, 5000, 70000):
        assert len({_cut(library, 8, 4, 1, keys, batch)[:2] for batch in (1, 7, 500)}) == 1


def test_a_task_has_no_more_keys_than_it_is_given_parts_for(library: ctypes.CDLL) -> None:
    """From the tile of the first key that its first query sees to the last query's own."""
    library.keys.restype = ctypes.c_int64
    for past, tokens, window, first in itertools.product(
        (0, 1, 63, 64, 700), (1, 2, 9, 200), (0, 1, 2, 64, 129, 800), (0, 5, 64, 130, 900)
    ):
        keys = past + tokens
        most = library.keys((ctypes.c_int64 * 4)(keys, tokens, window, first))
        assert 1 <= most <= keys
        for start in range(tokens):
            # The kernel's, for a task of up to eight queries of one head each.
            end = past + min(start + 8, tokens)
            least = max(first, past + start + 1 - window if window else 0)
            assert end - min(least, end - 1) // 64 * 64 <= most
