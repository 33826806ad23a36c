"""The Ascend C kernels, run in the shim, against the oracle: rows to the byte, attention to 1e-5.

Nothing here was seen by bisheng or an NPU: the shim executes the kernels' sources and refuses what
the device would not do (``custom_ops/cann/testing/shim/core.h``). No run may have a hazard.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

import mutations
from simulated_kernels import ARCHITECTURES, INT4, Kernels, rotation_of, row_bytes
from tests.cann.bench import Measured
from tests.parity.compare import check_rows
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.spec import Codec

HEAD_SIZES = (64, 128)
GROUPS = (1, 2, 4, 5, 8)
TILE_ROWS = 64
"""Rows of the cache that are attended at once: kTileRows."""
LONGEST = len(GROUPS) * TILE_ROWS
HALF_STEP = 2.0**-11
"""Relative error of rounding to float16."""

both_sizes = pytest.mark.parametrize("size", HEAD_SIZES)
both_types = pytest.mark.parametrize("dtype", ["float32", "float16"])


@cache
def _rows(size: int, heads: int, count: int, layer: int, codec: Codec = INT4) -> np.ndarray:
    """Encoded random vectors ``[1, heads, count, W]``."""
    vectors = np.random.default_rng(layer).standard_normal((1, heads, count, size))
    return reference.encode(vectors, codec, rotation_of(size, layer), codebook_of(codec, size))


def _encode(
    kernels: Kernels, vectors: np.ndarray, past: int | np.ndarray, spare: int = 1, cores: int = 3
) -> None:
    """Encodes into a cache of noise; everything but the new rows must stay as it was."""
    batch, heads, new, size = vectors.shape
    lengths = np.broadcast_to(past, batch)
    capacity = int(lengths.max()) + new + spare
    codec = kernels.codec
    before = np.random.default_rng(5).integers(
        0, 256, (batch, heads, capacity, row_bytes(size, codec)), dtype=np.uint8
    )
    rotation = rotation_of(size)
    after = kernels.encode(vectors, before, past, rotation, cores=cores)
    assert not kernels.hazards, kernels.messages()
    new_rows = [after[b, :, lengths[b] : lengths[b] + new] for b in range(batch)]
    rows = reference.encode(vectors, codec, rotation, codebook_of(codec, size))
    if not np.array_equal(np.stack(new_rows), rows):
        check_rows(np.stack(new_rows), vectors, codec, rotation)
    for b in range(batch):
        after[b, :, lengths[b] : lengths[b] + new] = before[b, :, lengths[b] : lengths[b] + new]
    assert np.array_equal(after, before)


def _attend(
    kernels: Kernels,
    shape: tuple[int, int, int, int, int],
    past: int | np.ndarray,
    *,
    spare: int = 0,
    dtype: str = "float32",
    cores: int = 3,
    part_tokens: int | None = None,
) -> float:
    """The largest error; ``shape`` is batch, KV heads, group, new tokens, head size."""
    batch, heads, group, new, size = shape
    capacity = int(np.max(past)) + new + spare
    codec = kernels.codec
    caches = [_rows(size, batch * heads, LONGEST + 1, layer, codec) for layer in (0, 1)]
    keys, values = (
        cache[:, :, :capacity].copy().reshape(batch, heads, capacity, -1) for cache in caches
    )
    for b, length in enumerate(np.broadcast_to(past, batch)):
        keys[b, :, length + new :] = values[b, :, length + new :] = 0xFF  # scales are NaN
    seed = new * 1000 + int(np.max(past))
    query = np.random.default_rng(seed).standard_normal((batch, heads * group, new, size))
    query = query.astype(dtype)
    rotations = (rotation_of(size), rotation_of(size, 1))
    scale = size**-0.5
    output = kernels.attention(
        query, keys, values, past, rotations, scale=scale, cores=cores, part_tokens=part_tokens
    )
    assert not kernels.hazards, kernels.messages()
    assert output.dtype == query.dtype
    centroids = codebook_of(codec, size).centroids
    expected = reference.attention(
        query, keys, values, np.atleast_1d(past),
        key=codec, value=codec, key_rotation=rotations[0], key_codebook=centroids,
        value_rotation=rotations[1], value_codebook=centroids, scale=scale, causal=True,
    )  # fmt: skip
    error = np.abs(output - expected)
    if dtype == "float16":
        error = np.maximum(error - HALF_STEP * np.abs(expected), 0)
    return float(error.max())


def test_heads_that_share_a_line_of_memory(coded: Kernels) -> None:
    """A prompt that fills its cache: 41 rows of 66 bytes end within 32 bytes of the next head's.

    In planes eight scales are a line: a step to the eighth token loads those of the head before.
    """
    for new, past in ((41, 0), (5, 3)):
        vectors = np.random.default_rng(2).standard_normal((1, 4, new, 128)).astype("float32")
        _encode(coded, vectors, past, spare=0)


@both_sizes
@both_types
@pytest.mark.parametrize("new", [1, 7, 8, 9, 33])
def test_rows_are_those_of_the_oracle(coded: Kernels, size: int, dtype: str, new: int) -> None:
    rng = np.random.default_rng(new)
    vectors = rng.standard_normal((2, 3, new, size)) * np.exp(rng.standard_normal((2, 3, new, 1)))
    _encode(coded, vectors.astype(dtype), past=new % 3)


@both_sizes
def test_rows_of_a_batch_go_where_its_lengths_say(coded: Kernels, size: int) -> None:
    vectors = np.random.default_rng(3).standard_normal((3, 2, 5, size)).astype(np.float32)
    _encode(coded, vectors, past=np.array([4, 0, 17]))


@both_sizes
def test_unusual_vectors(coded: Kernels, size: int) -> None:
    vectors = np.random.default_rng(4).standard_normal((1, 1, 9, size)).astype(np.float32)
    vectors[0, 0, 0] = 0
    vectors[0, 0, 1, 5] = np.inf
    vectors[0, 0, 2, 0] = np.nan
    vectors[0, 0, 3] = 3e38  # the squared norm is not finite
    vectors[0, 0, 4] *= 1e5  # the scale is clamped
    vectors[0, 0, 5] *= 1e-7  # a scale that float16 has as a subnormal
    vectors[0, 0, 6] = 0
    vectors[0, 0, 6, 1] = 1
    with np.errstate(invalid="ignore"):
        _encode(coded, vectors, past=0)


@pytest.mark.parametrize("cores", [1, 2, 40])
def test_any_number_of_cores(coded: Kernels, cores: int) -> None:
    vectors = np.random.default_rng(6).standard_normal((1, 3, 10, 64)).astype(np.float32)
    _encode(coded, vectors, past=2, cores=cores)
    assert _attend(coded, (1, 2, 4, 5, 64), 70, cores=cores) < 1e-5


@both_sizes
@pytest.mark.parametrize("group", GROUPS)
def test_decode(coded: Kernels, size: int, group: int) -> None:
    for past in (0, 1, 62, 63, 64, 127, 150):
        assert _attend(coded, (1, 2, group, 1, size), past, spare=past % 2) < 1e-5


@both_sizes
@pytest.mark.parametrize("group", GROUPS)
def test_prefill(coded: Kernels, size: int, group: int) -> None:
    for new, past in ((9, 0), (17, 60)):
        assert _attend(coded, (1, 2, group, new, size), past) < 1e-5


@both_sizes
def test_a_batch_of_different_lengths(coded: Kernels, size: int) -> None:
    past = np.array([100, 0, 63])
    assert _attend(coded, (3, 2, 2, 1, size), past) < 1e-5
    assert _attend(coded, (3, 1, 4, 3, size), past, spare=2) < 1e-5


@both_sizes
@pytest.mark.parametrize("group", GROUPS)
def test_decode_in_parts(coded: Kernels, size: int, group: int) -> None:
    """Of one tile and of two, the last one short or full; the first total is one part alone."""
    for past, part_tokens in ((63, 64), (64, 64), (127, 64), (191, 64), (255, 128), (300, 128)):
        assert _attend(coded, (1, 2, group, 1, size), past, part_tokens=part_tokens) < 1e-5


@both_sizes
def test_several_tokens_in_parts(coded: Kernels, size: int) -> None:
    """The first tokens do not see all parts, and some tasks have fewer of them."""
    for new, past in ((9, 60), (33, 100)):
        for dtype in ("float32", "float16"):
            shape = (1, 1, 5, new, size)
            assert _attend(coded, shape, past, dtype=dtype, part_tokens=64, spare=1) < 1e-5


@both_sizes
def test_parts_of_a_batch_of_different_lengths(coded: Kernels, size: int) -> None:
    past = np.array([200, 0, 63])
    assert _attend(coded, (3, 2, 2, 1, size), past, part_tokens=64) < 1e-5


@both_sizes
def test_parts_are_the_same_on_any_number_of_cores(kernels: Kernels, size: int) -> None:
    query = np.random.default_rng(11).standard_normal((1, 4, 2, size)).astype(np.float32)
    keys, values = (_rows(size, 2, LONGEST, layer)[:, :, :LONGEST] for layer in (0, 1))
    rotations = (rotation_of(size), rotation_of(size, 1))
    outputs = set()
    for cores in (1, 8, 20, 40, 48):
        kernels.reset()
        attended = kernels.attention(
            query, keys, values, LONGEST - 2, rotations, scale=0.1, cores=cores, part_tokens=64
        )
        assert not kernels.hazards, kernels.messages()
        assert kernels.cores_used == min(cores, 2 * LONGEST // 64)
        outputs.add(attended.tobytes())
    assert len(outputs) == 1


@pytest.mark.parametrize("seen", [np.inf, np.nan, 3e38])
def test_parts_of_queries_that_are_no_numbers(kernels: Kernels, seen: float) -> None:
    """Only the query that has one is lost, as without parts."""
    query = np.random.default_rng(12).standard_normal((1, 2, 1, 64)).astype(np.float32)
    query[0, 1, 0, 3] = seen
    keys, values = (_rows(64, 1, 200, layer)[:, :, :200] for layer in (0, 1))
    rotations = (rotation_of(64), rotation_of(64, 1))
    whole, cut = (
        kernels.attention(query, keys, values, 199, rotations, scale=0.1, part_tokens=part_tokens)
        for part_tokens in (None, 64)
    )
    assert not kernels.hazards, kernels.messages()
    assert np.abs(whole[0, 0] - cut[0, 0]).max() < 1e-6
    assert np.array_equal(np.isfinite(whole), np.isfinite(cut))


@pytest.mark.cann
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_long_cache(libraries: Mapping[int, Kernels], measured: Measured, arch: int) -> None:
    """32k tokens of one KV head, read by all cores: as the oracle, on any number of cores."""
    kernels, tokens, size, part_tokens = libraries[arch], 32768, 64, 512
    kernels.reset()
    query = np.random.default_rng(13).standard_normal((1, 1, 1, size)).astype(np.float32)
    caches = [_rows(size, 1, tokens, layer) for layer in (0, 1)]
    rotations = (rotation_of(size), rotation_of(size, 1))
    few, many = (
        kernels.attention(
            query, *caches, tokens - 1, rotations,
            scale=size**-0.5, cores=cores, part_tokens=part_tokens,
        )
        for cores in (8, 40)
    )  # fmt: skip
    assert not kernels.hazards, kernels.messages()
    assert np.array_equal(few, many)
    measured("cores_used", kernels.cores_used)
    assert kernels.cores_used == 40
    centroids = codebook_of(INT4, size).centroids
    expected = reference.attention(
        query, *caches, np.array([tokens - 1]),
        key=INT4, value=INT4, key_rotation=rotations[0], key_codebook=centroids,
        value_rotation=rotations[1], value_codebook=centroids, scale=size**-0.5, causal=True,
    )  # fmt: skip
    assert np.abs(many - expected).max() < 1e-5


@both_sizes
def test_float16_queries(coded: Kernels, size: int) -> None:
    assert _attend(coded, (2, 2, 2, 3, size), 70, dtype="float16") < 1e-5


@both_sizes
def test_keys_of_the_future_may_be_anything(kernels: Kernels, size: int) -> None:
    query = np.random.default_rng(8).standard_normal((1, 4, 3, size)).astype(np.float32)
    rotations = (rotation_of(size), rotation_of(size, 1))
    keys, values = (_rows(size, 2, 70, layer)[:, :, :70].copy() for layer in (0, 1))
    outputs = []
    for _ in range(2):
        outputs.append(kernels.attention(query, keys, values, 67, rotations, scale=0.1))
        keys[:, :, 69] = values[:, :, 69] = 0xFF
    assert not kernels.hazards, kernels.messages()
    assert np.array_equal(outputs[0][:, :, :2], outputs[1][:, :, :2])
    assert np.isnan(outputs[1][:, :, 2]).all()


@pytest.mark.parametrize("group", [3, 12, 16])
def test_other_groups(coded: Kernels, group: int) -> None:
    assert _attend(coded, (1, 1, group, 3, 64), 65) < 1e-5


def test_a_vector_instruction_takes_many_tokens(coded: Kernels) -> None:
    """A tile of 64 tokens costs fewer instructions than it has tokens, for one query."""
    counts = []
    for past in (63, 64 + 63):
        coded.reset()
        _attend(coded, (1, 1, 1, 1, 128), past, cores=1)
        counts.append(coded.vector_instructions)
    assert 0 < counts[1] - counts[0] < 64


@pytest.mark.cann
def test_everything_fits_either_architecture(libraries: Mapping[int, Kernels]) -> None:
    for kernels in libraries.values():
        _attend(kernels, (1, 1, 1, 1, 128), 0, dtype="float16")
        _encode(kernels, np.ones((1, 1, 1, 128), np.float16), 0)
        assert 0 < kernels.ub_bytes <= 192 * 1024


@pytest.mark.cann
def test_each_synchronisation_is_missed(
    libraries: Mapping[int, Kernels], measured: Measured
) -> None:
    result = mutations.gate(libraries)
    measured("mutations_caught", result["mutations_caught"])
    measured("mutations_total", result["mutations_total"])
    assert not result["missed"]
    assert result["mutations_caught"] == result["mutations_total"] > 200


@pytest.mark.cann
@both_sizes
@pytest.mark.parametrize("arch", ARCHITECTURES)
class TestEveryLength:
    """Up to 320; vectors that do not see each other at every length up to two tiles only."""

    def test_encode(self, libraries: Mapping[int, Kernels], arch: int, size: int) -> None:
        kernels = libraries[arch]
        kernels.reset()
        vectors = np.random.default_rng(7).standard_normal((1, 1, LONGEST, size))
        for new in (*range(1, 2 * TILE_ROWS), *range(2 * TILE_ROWS, LONGEST + 1, 37)):
            _encode(kernels, vectors[:, :, :new].astype(np.float32), past=new % 5)

    def test_decode(self, libraries: Mapping[int, Kernels], arch: int, size: int) -> None:
        kernels = libraries[arch]
        kernels.reset()
        # In turn: as five and 64 have no common divisor, each group meets every end of a tile.
        for total in range(1, LONGEST + 1):
            group = GROUPS[total % len(GROUPS)]
            assert _attend(kernels, (1, 1, group, 1, size), total - 1) < 1e-5

    def test_prefill(self, libraries: Mapping[int, Kernels], arch: int, size: int) -> None:
        kernels = libraries[arch]
        kernels.reset()
        for new in range(1, LONGEST + 1, 37):
            group = GROUPS[new % len(GROUPS)]
            assert _attend(kernels, (1, 1, group, new, size), 0) < 1e-5
