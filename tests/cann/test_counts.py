"""What the shim counts of launches, beside small kernels that were counted by hand."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from simulated_kernels import INT4, Kernels, rotation_of, row_bytes
from simulator import MovedCount, VectorCount, text_of
from tq_onnx.codec.search import gain_table

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann


def test_scalar_work_of_encode(kernels: Kernels) -> None:
    """Tables are read from global memory, and the squared norm of each vector from UB."""
    vectors = np.ones((1, 1, 3, 64), np.float32)
    cache = np.zeros((1, 1, 3, row_bytes(64)), np.uint8)
    with kernels.counted() as launches:
        kernels.encode(vectors, cache, 0, rotation_of(64), gains=gain_table(2), cores=2)
    core, idle = launches[0].cores
    tables = 2**INT4.bits + 2**INT4.bits - 1 + 2
    assert core.scalar_loads == idle.scalar_loads == tables
    assert core.scalar_reads == 3
    assert idle.scalar_reads == 0
    if kernels.arch == 2201:
        assert core.scalar_writes == idle.scalar_writes == 0
        assert core.moved_out.bytes == 3 * row_bytes(64)
        return
    # 2002 writes where the halves of what it stores are, of the rows and of their last 32 bytes,
    # and stores the rows in whole blocks, and these 32 bytes once more.
    assert core.scalar_writes == idle.scalar_writes == 3 * row_bytes(64) // 2 + 16
    assert core.moved_out.bytes == 3 * row_bytes(64) // 32 * 32 + 32


def test_rows_that_attention_reads(kernels: Kernels) -> None:
    """Every row of both caches is moved once, with one query and the rotation of the keys."""
    query = np.ones((1, 1, 1, 128), np.float32)
    rows = np.zeros((1, 1, 200, row_bytes(128)), np.uint8)
    rotations = (rotation_of(128), rotation_of(128, 1))
    with kernels.counted() as launches:
        kernels.attention(query, rows, rows, 199, rotations, scale=0.1, cores=1)
        kernels.attention(query, rows, rows, 199, rotations, scale=0.1, cores=1, part_tokens=128)
    whole, parts, merge = (launch.cores[0] for launch in launches)
    assert [launch.kernel for launch in launches] == [
        *["tq_attention_float32"] * 2, "tq_attention_merge_float32",
    ]  # fmt: skip
    moved = row_bytes(128) if kernels.arch == 2201 else 96
    matrix, vector = 4 * 128 * 128, 4 * 128
    assert whole.moved_in.bytes == 2 * 200 * moved + vector + 2 * matrix
    assert parts.moved_in.bytes == 2 * 200 * moved + vector + matrix
    # Sums, largest scores and weights of eight queries for each of two parts.
    assert parts.moved_out == MovedCount(6, 6, 2 * 8 * (vector + 8))
    assert merge.moved_in.bytes == parts.moved_out.bytes + matrix


def test_a_text_that_grows_is_whole() -> None:
    """Counts of a stream that still runs; here the text has seven more letters with each call."""
    written: list[bytes] = []

    def call(text: ctypes.Array[ctypes.c_char], capacity: ctypes.c_size_t) -> int:
        written.append(7 * (1 + len(written)) * b"x" if len(written) < 4 else written[-1])
        text.value = written[-1][: capacity.value - 1]
        return len(written[-1])

    assert text_of(call) == 28 * "x"


def _turn(kernels: Kernels, cores: int) -> None:
    table = np.ones((1, 32), np.float32)
    kernels.rotary_embedding(np.zeros((1, 1, 64), np.float32), (table, table), 0, cores=cores)


def test_only_what_is_asked_for_is_counted(kernels: Kernels) -> None:
    with kernels.counted() as launches:
        pass
    _turn(kernels, cores=3)
    with kernels.counted() as more:
        _turn(kernels, cores=1)
    assert launches == []
    assert [launch.kernel for launch in more] == ["tq_rotary_embedding_float32"]
    text = ctypes.create_string_buffer(3)
    assert kernels.call("tq_sim_report", text, ctypes.c_size_t(3)) > 2
    assert text.value == b'{"'


def test_what_a_core_does_and_another_does_not(kernels: Kernels) -> None:
    """A head of one token: its halves times cosine and sine, a difference and a sum."""
    with kernels.counted() as launches:
        _turn(kernels, cores=2)
    core, idle = launches[0].cores
    assert set(core.vector) == {
        VectorCount("Mul", 4, 4, 4, 4), VectorCount("Sub", 4, 4, 1, 1),
        VectorCount("Add", 4, 4, 1, 1),
    }  # fmt: skip
    # Two rows of the tables, of half a head each, and the head.
    assert core.moved_in == MovedCount(3, 3, 512)
    assert core.moved_out == MovedCount(1, 1, 256)
    assert core.scalar_reads == core.scalar_writes == core.scalar_loads == 0
    assert idle.vector == ()
    assert idle.moved_in == idle.moved_out == MovedCount(0, 0, 0)
