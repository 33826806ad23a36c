"""What the shim counts of launches, beside small kernels that were counted by hand."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from simulated_kernels import INT4, Kernels, rotation_of, row_bytes
from simulator import CoreCounts, MovedCount, VectorCount
from tq_onnx.codec.search import gain_table

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann

NOTHING = MovedCount(0, 0, 0)


def _vector(core: CoreCounts) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Instructions and repeats by name and bytes of an element read and written."""
    found = {
        (one.name, one.from_bytes, one.to_bytes): (one.instructions, one.repeats)
        for one in core.vector
    }
    assert len(found) == len(core.vector)
    return found


def test_swish(kernels: Kernels) -> None:
    """1,040 halves: three cores with two pieces of 256 each at most, the last of 16."""
    x = np.zeros(1040, np.float16)
    with kernels.counted() as launches:
        kernels.swish(x, cores=4)
    (launch,) = launches
    assert launch.kernel == "tq_swish_float16"
    first, second, third, idle = launch.cores
    # 512 elements are 8 repeats of floats; halves move, and are cast to floats and back.
    each = dict.fromkeys([("Muls", 4, 4), ("Exp", 4, 4), ("Adds", 4, 4), ("Div", 4, 4)], (1, 8))
    assert _vector(first) == each | {("Cast", 2, 4): (1, 8), ("Cast", 4, 2): (1, 8)}
    assert first.moved_in == first.moved_out == MovedCount(1, 1, 1024)
    assert second == first
    assert set(_vector(third).values()) == {(1, 1)}
    assert third.moved_in == third.moved_out == MovedCount(1, 1, 32)
    assert idle.vector == ()
    assert idle.moved_in == idle.moved_out == NOTHING
    # Between each instruction and the next; in and out are ordered by flags.
    assert first.barriers == third.barriers == 5
    assert first.scalar_reads == first.scalar_writes == first.scalar_loads == 0


def test_transpose(kernels: Kernels) -> None:
    """Rows come in one by one, columns go out one by one, each in as many pieces as it has rows."""
    x = np.zeros((1, 4, 2, 64), np.uint8)
    with kernels.counted() as launches:
        kernels.transpose(x, cores=1)
    (core,) = launches[0].cores
    assert core.vector == ()
    assert core.moved_in == MovedCount(4, 4, 512)
    assert core.moved_out == MovedCount(2, 8, 512)
    assert core.barriers == 0
    # For a place that is free, for the tile that came, and for both places at the end.
    assert core.flags_waited == 4


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


def test_only_what_is_asked_for_is_counted(kernels: Kernels) -> None:
    x = np.zeros(256, np.float32)
    with kernels.counted() as launches:
        pass
    kernels.swish(x)
    with kernels.counted() as more:
        kernels.swish(x, cores=1)
    assert launches == []
    assert [launch.kernel for launch in more] == ["tq_swish_float32"]
    text = ctypes.create_string_buffer(3)
    assert kernels.call("tq_sim_launches_json", text, ctypes.c_size_t(3)) == 2
    assert text.value == b"[]"


def test_a_kind_of_instruction_is_one_entry(kernels: Kernels) -> None:
    x = np.zeros(256, np.float32)
    with kernels.counted() as launches:
        kernels.swish(x, cores=1)
    assert VectorCount("Div", 4, 4, 1, 4) in launches[0].cores[0].vector
