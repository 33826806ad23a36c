"""Valid inputs of both operators, small enough to be varied one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.native.single_node import Array
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, Codec, row_layout

Feeds = dict[str, Array]


def rows(shape: tuple[int, ...], bits: int, head_size: int, seed: int) -> npt.NDArray[np.uint8]:
    """Arbitrary codes with scales around one, shape ``[*shape, W]``."""
    rng = np.random.default_rng(seed)
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
        book = lloyd_max(bits, size)
        return {
            "vectors": rng.standard_normal((batch, heads, tokens, size)).astype(dtype),
            "past": rows((batch, heads, slots), bits, size, 2),
            "past_length": np.array([4], np.int64),
            "rotation": make_rotation("qr", size, 0),
            "centroids": book.centroids,
            "boundaries": book.boundaries,
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
        past: int = 4,
        bias: bool = False,
    ) -> Feeds:
        rng = np.random.default_rng(3)
        book = lloyd_max(bits, size)
        feeds: Feeds = {
            "query": rng.standard_normal((batch, heads * group, tokens, size)).astype(np.float32),
            "key_cache": rows((batch, heads, slots), bits, size, 4),
            "value_cache": rows((batch, heads, slots), bits, size, 5),
            "past_length": np.array([past], np.int64),
            "key_rotation": make_rotation("qr", size, 0),
            "key_centroids": book.centroids,
            "value_rotation": make_rotation("qr", size, 1),
            "value_centroids": book.centroids,
        }
        if bias:
            feeds["attention_bias"] = np.zeros((batch, 1, tokens, past + tokens), np.float32)
        return feeds

    return make
