"""Valid inputs of both operators, small enough to be varied one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.native.single_node import Array
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, RAW, RAW_BITS, Codec, row_layout

Feeds = dict[str, Array]


def codec_of(bits: int) -> Codec:
    """The codec that has so many bits: ``raw`` from 16 on."""
    return Codec(RAW if bits in RAW_BITS else LLOYD_MAX, bits)


def tables(bits: int, head_size: int, layer: int) -> tuple[Array, Array, Array]:
    """Rotation, centroids and boundaries; of ``raw`` something that nobody may read."""
    if codec_of(bits).is_raw:
        return (np.zeros(0, np.float32),) * 3
    book = lloyd_max(bits, head_size)
    return make_rotation("qr", head_size, layer), book.centroids, book.boundaries


def rows(shape: tuple[int, ...], bits: int, head_size: int, seed: int) -> npt.NDArray[np.uint8]:
    """Arbitrary codes with scales around one, or vectors as float32; shape ``[*shape, W]``."""
    rng = np.random.default_rng(seed)
    if codec_of(bits).is_raw:
        return rng.standard_normal((*shape, head_size)).astype("<f4").view(np.uint8)
    layout = row_layout(Codec(LLOYD_MAX, bits), head_size)
    cache = rng.integers(0, 256, (*shape, layout.row_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 12.0, (*shape, 1)).astype("<f2")
    cache[..., layout.scale_offset :] = scales.view(np.uint8)
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
        bits: int = 4,
        dtype: str = "float32",
    ) -> Feeds:
        rng = np.random.default_rng(1)
        rotation, centroids, boundaries = tables(bits, size, 0)
        return {
            "vectors": rng.standard_normal((batch, heads, tokens, size)).astype(dtype),
            "past": rows((batch, heads, slots), bits, size, 2),
            "past_length": np.array([4], np.int64),
            "rotation": rotation,
            "centroids": centroids,
            "boundaries": boundaries,
        }

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
        bits: int = 4,
        value_bits: int | None = None,
        past: int = 4,
        bias: bool = False,
        sink: bool = False,
    ) -> Feeds:
        rng = np.random.default_rng(3)
        value_bits = value_bits or bits
        key_rotation, key_centroids, _ = tables(bits, size, 0)
        value_rotation, value_centroids, _ = tables(value_bits, size, 1)
        feeds: Feeds = {
            "query": rng.standard_normal((batch, heads * group, tokens, size)).astype(np.float32),
            "key_cache": rows((batch, heads, slots), bits, size, 4),
            "value_cache": rows((batch, heads, slots), value_bits, size, 5),
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
        return feeds

    return make
