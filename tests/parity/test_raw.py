"""TurboQuantEncode with the codec ``raw``: every backend stores the vectors to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.backends import BEST_LEVEL, LEVELS, run
from tests.parity.compare import check_rows
from tests.parity.graphs import (
    KEY_LAYER,
    VALUE_LAYER,
    Attention,
    codec_of,
    encode_model,
    rotation,
    step_model,
)
from tests.parity.test_encode import SLOTS, as_dtype, vectors
from tq_onnx.codec import reference
from tq_onnx.codec.spec import row_layout

# The evaluator computes in numpy, which warns where signs of zeros are looked for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

ELEMENTS = {"float32": 32, "float16": 16, "bfloat16": 16}


def encode(
    backend: str, x: np.ndarray, dtype: str, *, past: np.ndarray, length: tuple[int, ...]
) -> np.ndarray:
    model = encode_model("key", ELEMENTS[dtype], x.shape[-1], dtype)
    feeds = {"key": x, "past_key": past, "past_length": np.array(length, np.int64)}
    return run(backend, model, feeds)[0]


def cache(x: np.ndarray, dtype: str, slots: int) -> np.ndarray:
    row_bytes = row_layout(codec_of(ELEMENTS[dtype]), x.shape[-1]).row_bytes
    random = np.random.RandomState(1)
    return random.randint(0, 256, (*x.shape[:2], slots, row_bytes), np.uint8)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    return reference.encode(x, codec_of(ELEMENTS[dtype]), None, None, element=dtype)


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("head_size", [8, 80, 128, 512])
def test_vectors_of_any_magnitude(head_size: int, dtype: str, backend: str) -> None:
    x = vectors(2, 2, 40, head_size) * 10.0 ** np.linspace(-45, 36, 40)[:, None]
    with np.errstate(over="ignore"):
        x = as_dtype(x.astype(np.float32), dtype)
    x[0, 0, 0] = 0
    x[0, 1, 0] = -0.0
    x[1, 1, 1, 3:5] = (np.inf, -np.inf)
    rows = encode(backend, x, dtype, past=cache(x, dtype, 0), length=(0,))
    assert np.array_equal(rows, stored(x, dtype))


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("name", SLOTS)
def test_slots(name: str, dtype: str, backend: str) -> None:
    slots = SLOTS[name]
    x = as_dtype(vectors(slots.batch, 2, slots.new, 64), dtype)
    past = cache(x, dtype, slots.capacity)
    present = encode(backend, x, dtype, past=past, length=slots.past)
    expected = reference.append(past, stored(x, dtype), np.array(slots.past))
    assert np.array_equal(present, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_keep_the_bits_of_nan(level: str) -> None:
    bits = np.random.RandomState(0).randint(0x7F800001, 0x80000000, (1, 1, 3, 64))
    bits[0, 0, 1] |= 0x80000000
    x = bits.astype(np.uint32).view(np.float32)
    rows = encode(level, x, "float32", past=cache(x, "float32", 0), length=(0,))
    assert np.array_equal(rows.view("<u4"), bits)


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("bits", [(32, 4), (3, 32)])
def test_one_of_two_caches(bits: tuple[int, int], backend: str) -> None:
    graph = Attention(64, *bits)
    x = {
        side: vectors(1, 2, 5, 64, seed=layer).astype(np.float32)
        for side, layer in (("key", KEY_LAYER), ("value", VALUE_LAYER))
    }
    feeds = x | {
        "query": vectors(1, 4, 5, 64, seed=7).astype(np.float32),
        "past_length": np.array([0]),
        "past_key": np.zeros((1, 2, 0, row_layout(graph.key, 64).row_bytes), np.uint8),
        "past_value": np.zeros((1, 2, 0, row_layout(graph.value, 64).row_bytes), np.uint8),
    }
    _, *presents = run(backend, step_model(graph), feeds)
    sides = (("key", graph.key, KEY_LAYER), ("value", graph.value, VALUE_LAYER))
    for present, (side, codec, layer) in zip(presents, sides, strict=True):
        if codec.is_raw:
            assert np.array_equal(present, stored(x[side], "float32"))
        else:
            check_rows(backend, present, x[side], codec, rotation(64, layer))


def test_a_wrong_backend_would_be_noticed() -> None:
    x = vectors(1, 1, 4, 64).astype(np.float32)
    rows = encode("body", x, "float32", past=cache(x, "float32", 0), length=(0,))
    assert not np.array_equal(rows, stored(np.nextafter(x, np.float32(np.inf)), "float32"))
