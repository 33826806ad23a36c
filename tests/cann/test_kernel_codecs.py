"""The kernels of encode and attention with every codec and option that they have, in the shim.

``test_kernels.py`` has sizes, lengths and cores, with the codec of 4 bits; here are the others, the
search over gains, what scales make up for, and the offsets of a calibration.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from simulated_kernels import (
    CODECS,
    INT4,
    Kernels,
    has_kernels,
    rotation_of,
    row_bytes,
)
from tests.parity.compare import check_rows
from tq_onnx.codec import reference
from tq_onnx.codec.acceptance import SEARCHED_TIE_SHARE, TIE_SHARE
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import NORM_CORRECTIONS, NORM_KEPT, UNBIASED
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann

NOISE = np.random.default_rng(5)

both_sizes = pytest.mark.parametrize("size", (64, 128))
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def skip_without(kernels: Kernels, codec: Codec, size: int) -> None:
    if not has_kernels(kernels.arch, codec, size):
        pytest.skip("2002 moves no rows of fewer than 32 bytes")


def gains_of(codec: Codec) -> np.ndarray:
    return gain_table(is_signed=codec.is_signed)


def encode(
    kernels: Kernels,
    vectors: np.ndarray,
    codec: Codec,
    past: int,
    *,
    norm_correction: int = NORM_KEPT,
    gains: np.ndarray | None = None,
    offset: np.ndarray | None = None,
) -> None:
    """Encodes into a cache of noise: the rows of the oracle, and nothing else is touched."""
    batch, heads, new, size = vectors.shape
    shape = (batch, heads, past + new + 1, row_bytes(size, codec))
    before = NOISE.integers(0, 256, shape, dtype=np.uint8)
    after = kernels.encode(
        vectors, before, past, rotation_of(size),
        codec=codec, norm_correction=norm_correction, gains=gains, offset=offset,
    )  # fmt: skip
    assert not kernels.hazards, kernels.messages()
    rows = after[:, :, past : past + new].copy()
    after[:, :, past : past + new] = before[:, :, past : past + new]
    assert np.array_equal(after, before)
    given = vectors
    if offset is not None:
        lengths = np.full(batch, past)
        given = vectors - reference.offset_rows(offset, lengths, batch, new).astype(np.float32)
    check_rows(
        rows, given, codec, rotation_of(size),
        norm_correction=norm_correction, gains=gains,
        tie_rate=TIE_SHARE if gains is None else SEARCHED_TIE_SHARE["float32"],
    )  # fmt: skip


@both_sizes
@each_codec
def test_rows_of_every_codec(kernels: Kernels, codec: Codec, size: int) -> None:
    skip_without(kernels, codec, size)
    for new, past in ((1, 3), (9, 0)):
        encode(kernels, NOISE.standard_normal((2, 2, new, size)).astype(np.float32), codec, past)


@both_sizes
@each_codec
@pytest.mark.parametrize("norm_correction", NORM_CORRECTIONS)
def test_rows_of_an_encoder_that_searches(
    kernels: Kernels, codec: Codec, size: int, norm_correction: int
) -> None:
    skip_without(kernels, codec, size)
    vectors = NOISE.standard_normal((1, 2, 9, size)).astype(np.float32)
    vectors[0, 0, 1] = 0
    vectors[0, 1, 2, 3] = np.inf
    with np.errstate(invalid="ignore"):
        encode(kernels, vectors, codec, 2, norm_correction=norm_correction, gains=gains_of(codec))


def test_most_rows_are_those_of_the_oracle_to_the_byte(kernels: Kernels) -> None:
    """Of the default preset: what differs is a tie, and few are."""
    vectors = NOISE.standard_normal((1, 4, 64, 128)).astype(np.float32)
    cache = np.zeros((1, 4, 64, row_bytes(128)), np.uint8)
    rows = kernels.encode(
        vectors, cache, 0, rotation_of(128), norm_correction=UNBIASED, gains=gain_table()
    )
    expected = reference.encode(
        vectors, INT4, rotation_of(128), codebook_of(INT4, 128),
        norm_correction=UNBIASED, gains=gain_table(),
    )  # fmt: skip
    same = (rows == expected).all(axis=-1)
    assert same.mean() > 0.98


def test_one_gain_is_no_search(kernels: Kernels) -> None:
    vectors = NOISE.standard_normal((1, 1, 8, 64)).astype(np.float32)
    cache = np.zeros((1, 1, 8, row_bytes(64)), np.uint8)
    rows = [
        kernels.encode(vectors, cache, 0, rotation_of(64), gains=gains)
        for gains in (None, gain_table(1))
    ]
    assert np.array_equal(*rows)


@both_sizes
@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("past", [0, 2, 70])
def test_offsets_are_taken_from_vectors(kernels: Kernels, size: int, count: int, past: int) -> None:
    offset = NOISE.standard_normal((count, 2, size)).astype(np.float32)
    vectors = NOISE.standard_normal((2, 2, 9, size)).astype(np.float32)
    encode(kernels, vectors, INT4, past, offset=offset)


def attend(
    kernels: Kernels,
    codecs: tuple[Codec, Codec],
    size: int,
    past: int,
    new: int,
    *,
    offsets: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
    part_tokens: int | None = None,
    dtype: str = "float32",
) -> float:
    """The largest error of attention over two KV heads of two sequences, two queries each."""
    rotations = (rotation_of(size), rotation_of(size, 1))
    caches = [
        reference.encode(
            NOISE.standard_normal((2, 2, past + new, size)), codec, rotation,
            codebook_of(codec, size), gains=gains_of(codec),
        )
        for codec, rotation in zip(codecs, rotations, strict=True)
    ]  # fmt: skip
    query = NOISE.standard_normal((2, 4, new, size)).astype(dtype)
    output = kernels.attention(
        query, *caches, past, rotations,
        scale=size**-0.5, codecs=codecs, offsets=offsets, part_tokens=part_tokens,
    )  # fmt: skip
    assert not kernels.hazards, kernels.messages()
    books = [codebook_of(codec, size).centroids for codec in codecs]
    expected = reference.attention(
        query, *caches, np.array([past]),
        key=codecs[0], value=codecs[1], key_rotation=rotations[0], key_codebook=books[0],
        value_rotation=rotations[1], value_codebook=books[1], scale=size**-0.5, causal=True,
        key_offset=offsets[0], value_offset=offsets[1],
    )  # fmt: skip
    rounding = 2.0**-11 * np.abs(expected) if dtype == "float16" else 0
    return float((np.abs(output - expected) - rounding).max())


PAIRS = [*zip(CODECS, CODECS, strict=True), (CODECS[4], CODECS[2]), (CODECS[3], CODECS[1])]


@both_sizes
@pytest.mark.parametrize("codecs", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_attention_over_every_codec(
    kernels: Kernels, codecs: tuple[Codec, Codec], size: int
) -> None:
    for codec in codecs:
        skip_without(kernels, codec, size)
    for past, new in ((0, 1), (63, 1), (70, 5)):
        assert attend(kernels, codecs, size, past, new) < 1e-5
    assert attend(kernels, codecs, size, 150, 1, part_tokens=64) < 1e-5


@both_sizes
@pytest.mark.parametrize("count", [1, 2, 10, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_offsets_are_added_in_attention(
    kernels: Kernels, size: int, count: int, dtype: str
) -> None:
    shape = (count, 2, size)
    offsets = tuple(NOISE.standard_normal(shape).astype(np.float32) for _ in range(2))
    for (past, new), part_tokens in itertools.product(((0, 1), (5, 9), (150, 1)), (None, 64)):
        error = attend(
            kernels, (INT4, INT4), size, past, new,
            offsets=offsets, part_tokens=part_tokens, dtype=dtype,
        )  # fmt: skip
        assert error < 1e-5
