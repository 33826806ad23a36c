"""Valid inputs of both operators, small enough to be varied one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.native.single_node import Array
from tq_onnx.codec import spec
from tq_onnx.codec.acceptance import FIELD_STEPS, RowFigures, judge_rows
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import Tables
from tq_onnx.codec.reference import offset_rows
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, RAW

Feeds = dict[str, Array]

INT4 = Codec(LLOYD_MAX, 4)
RAW32 = Codec(RAW, 32)
CODECS = [codec for codec in spec.CODECS if codec.bits != 16]
"""Those that a model of float32 has."""


def tables(codec: Codec, head_size: int, layer: int, kind: str = "qr") -> tuple[Array, ...]:
    """Rotation, centroids and boundaries; of a codec without something that nobody may read."""
    if not codec.is_rotated:
        return (np.zeros(0, np.float32),) * 3
    book = codebook_of(codec, head_size)
    return rotation_of(codec, kind, head_size, layer), book.centroids, book.boundaries


def encoded_vectors(feeds: Feeds) -> npt.NDArray[np.float32]:
    """What is encoded of the feeds; an offset is taken away in float32, as in the kernels."""
    vectors: npt.NDArray[np.float32] = feeds["vectors"].astype(np.float32)
    if "offset" not in feeds:
        return vectors
    batch, _, new, _ = vectors.shape
    offset = offset_rows(feeds["offset"], feeds["past_length"], batch, new)
    return vectors - offset.astype(np.float32)


def judged_rows(
    rows: Array, vectors: npt.NDArray[np.float32], codec: Codec, feeds: Feeds
) -> RowFigures:
    """Rows of vectors, by the judge of the product."""
    names = ("rotation", "centroids", "boundaries")
    tables = [feeds[name].astype(np.float32) for name in names]
    norm_correction = codec.corrects_norm
    own = Tables(*tables, norm_correction) if codec.is_rotated else Tables()
    found = judge_rows(rows, vectors, codec, own)
    assert found.wrong == 0, f"{codec}: {found}"
    assert found.steps <= FIELD_STEPS, f"{codec}: {found}"
    return found


def rows(
    shape: tuple[int, ...], codec: Codec, head_size: int, seed: int, padding: int = 0
) -> npt.NDArray[np.uint8]:
    """Arbitrary codes with fields around one, or vectors as float32; shape ``[*shape, W]``."""
    rng = np.random.default_rng(seed)
    layout = row_layout(codec, head_size)
    cache = rng.integers(0, 256, (*shape, layout.row_bytes + padding), dtype=np.uint8)
    if codec.is_raw:
        vectors = rng.standard_normal((*shape, head_size)).astype("<f4")
        cache[..., : layout.row_bytes] = vectors.view(np.uint8)
    elif codec.kind == FP8:
        cache &= 0xBF  # smaller than 2
    for field in layout.fields:
        values = rng.uniform(0.5, 12.0, (*shape, field.count))
        if field.size == 1:  # a step of a grid, whose middle is 1
            values = (128 + 32 * np.log2(values)).astype(np.uint8)
        else:
            values = values.astype(f"<f{field.size}")
        if codec.kind == "q8_0":
            values /= 100
        if codec.is_signed:  # rows as long as those of codebooks, with scales of either sign
            values /= 0.29 * 2**codec.bits * head_size**0.5
            values *= rng.choice([-1, 1], values.shape)
        end = field.offset + field.count * field.size
        cache[..., field.offset : end] = values.view(np.uint8)
    return cache


@pytest.fixture(scope="session")
def encode_feeds() -> Callable[..., Feeds]:
    def make(
        *,
        batch: int = 2,
        heads: int = 2,
        tokens: int = 3,
        slots: int = 8,
        size: int = 16,
        codec: Codec = INT4,
        padding: int = 0,
        offsets: int = 0,
        dtype: str = "float32",
    ) -> Feeds:
        rng = np.random.default_rng(1)
        rotation, centroids, boundaries = tables(codec, size, 0)
        feeds: Feeds = {
            "vectors": rng.standard_normal((batch, heads, tokens, size)).astype(dtype),
            "past": rows((batch, heads, slots), codec, size, 2, padding),
            "past_length": np.array([4], np.int64),
            "rotation": rotation,
            "centroids": centroids,
            "boundaries": boundaries,
        }
        if offsets:
            feeds["offset"] = rng.standard_normal((offsets, heads, size)).astype(np.float32)
        return feeds

    return make


@pytest.fixture(scope="session")
def attention_feeds() -> Callable[..., Feeds]:
    def make(
        *,
        batch: int = 2,
        heads: int = 2,
        group: int = 2,
        tokens: int = 3,
        slots: int = 8,
        size: int = 16,
        key: Codec = INT4,
        value: Codec = INT4,
        padding: int = 0,
        offsets: int = 0,
        past: int = 4,
        bias: bool = False,
        sink: bool = False,
    ) -> Feeds:
        rng = np.random.default_rng(3)
        key_rotation, key_centroids, _ = tables(key, size, 0)
        value_rotation, value_centroids, _ = tables(value, size, 1)
        feeds: Feeds = {
            "query": rng.standard_normal((batch, heads * group, tokens, size)).astype(np.float32),
            "key_cache": rows((batch, heads, slots), key, size, 4, padding),
            "value_cache": rows((batch, heads, slots), value, size, 5, padding),
            "past_length": np.array([past], np.int64),
            "key_rotation": key_rotation,
            "key_centroids": key_centroids,
            "value_rotation": value_rotation,
            "value_centroids": value_centroids,
        }
        if bias:
            feeds["attention_bias"] = np.zeros((batch, 1, tokens, past + tokens), np.float32)
        if sink:
            feeds["head_sink"] = rng.standard_normal(heads * group).astype(np.float32)
        for name in ("key_offset", "value_offset") if offsets else ():
            feeds[name] = rng.standard_normal((offsets, heads, size)).astype(np.float32)
        return feeds

    return make
