"""TurboQuantEncode: every backend writes the oracle's rows, into the right slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.parity.backends import BEST_LEVEL, LEVELS, run
from tests.parity.compare import check_rows
from tests.parity.graphs import KEY_LAYER, VALUE_LAYER, encode_model, rotation
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import KINDS, Codec, row_layout

# The evaluator computes in numpy, which warns where the operators mean to overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

HEAD_SIZES = (24, 64, 80, 128, 256)


@dataclass(frozen=True)
class Slots:
    """Where new rows go."""

    batch: int
    new: int
    capacity: int
    past: tuple[int, ...]


SLOTS = {
    "first-token": Slots(1, 1, 0, (0,)),
    "prompt": Slots(2, 128, 0, (0,)),
    "growing": Slots(1, 2, 9, (9,)),
    "growing-17": Slots(2, 17, 5, (5, 5)),
    "fixed": Slots(1, 1, 32, (7,)),
    "fixed-full": Slots(1, 2, 8, (6,)),
    "own-lengths": Slots(3, 2, 16, (14, 0, 5)),
    "own-lengths-growing": Slots(3, 17, 9, (9, 0, 5)),
    "partly-growing": Slots(1, 3, 8, (6,)),
}


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to the type; in float32 where that is what the graph takes."""
    if dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return x.astype(dtype)


def vectors(batch: int, heads: int, new: int, head_size: int, seed: int = 0) -> np.ndarray:
    """Rows of very different norms."""
    random = np.random.RandomState(seed)
    x = random.standard_normal((batch, heads, new, head_size))
    return x * 10 ** random.uniform(-3, 2, (batch, heads, new, 1))


def encode(
    backend: str, side: str, bits: int, x: np.ndarray, *, past: np.ndarray, length: list[int]
) -> np.ndarray:
    dtype = "bfloat16" if side.endswith("bf16") else str(x.dtype)
    side = side.removesuffix("-bf16")
    model = encode_model(side, bits, x.shape[-1], dtype)
    feeds = {side: x, f"past_{side}": past, "past_length": np.array(length, np.int64)}
    return run(backend, model, feeds)[0]


def empty(x: np.ndarray, bits: int) -> np.ndarray:
    row_bytes = row_layout(Codec(LLOYD_MAX, bits), x.shape[-1]).row_bytes
    return np.zeros((*x.shape[:2], 0, row_bytes), np.uint8)


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_many_rows(bits: int, head_size: int, backend: str) -> None:
    x = vectors(2, 2, 150, head_size).astype(np.float32)
    rows = encode(backend, "key", bits, x, past=empty(x, bits), length=[0])
    check_rows(backend, rows, x, Codec(LLOYD_MAX, bits), rotation(head_size, KEY_LAYER))


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_without_norm_correction(bits: int, backend: str) -> None:
    x = vectors(1, 2, 100, 64).astype(np.float32)
    model = encode_model("key", bits, 64, "float32", norm_correction=False)
    feeds = {"key": x, "past_key": empty(x, bits), "past_length": np.array([0])}
    rows = run(backend, model, feeds)[0]
    codec, turn = Codec(LLOYD_MAX, bits), rotation(64, KEY_LAYER)
    check_rows(backend, rows, x, codec, turn, norm_correction=False)


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_coordinates_on_boundaries(bits: int, backend: str) -> None:
    # Most coordinates lie on a boundary up to float32 rounding; either side will do, but no other.
    boundaries = lloyd_max(bits, 128).boundaries.astype(np.float64)
    y = np.random.RandomState(bits).choice(boundaries, (1, 1, 200, 128))
    y[..., 64:] = np.sqrt((1 - np.sum(y[..., :64] ** 2, -1, keepdims=True)).clip(0) / 64)
    turn = rotation(128, KEY_LAYER)
    x = (y @ np.linalg.inv(turn.astype(np.float64))).astype(np.float32)
    rows = encode(backend, "key", bits, x, past=empty(x, bits), length=[0])
    codec = Codec(LLOYD_MAX, bits)
    assert check_rows(f"{backend}, on boundaries", rows, x, codec, turn, tie_rate=0.3) > 0


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_narrow_types(bits: int, dtype: str, backend: str) -> None:
    x = as_dtype(vectors(1, 2, 100, 128), dtype)
    side = "value-bf16" if dtype == "bfloat16" else "value"
    rows = encode(backend, side, bits, x, past=empty(x, bits), length=[0])
    check_rows(backend, rows, x, Codec(LLOYD_MAX, bits), rotation(128, VALUE_LAYER))


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("name", SLOTS)
def test_slots(name: str, backend: str) -> None:
    slots = SLOTS[name]
    x = vectors(slots.batch, 2, slots.new, 64).astype(np.float32)
    past = np.random.RandomState(1).randint(0, 256, (slots.batch, 2, slots.capacity, 34), np.uint8)
    before = past.copy()
    present = encode(backend, "key", 4, x, past=past, length=list(slots.past))
    assert np.array_equal(past, before)
    codec = Codec(LLOYD_MAX, 4)
    own = reference.encode(x, codec, rotation(64, KEY_LAYER), lloyd_max(4, 64))
    expected = reference.append(past, own, np.array(slots.past))
    assert present.shape == expected.shape
    for b in range(slots.batch):
        first = slots.past[b % len(slots.past)]
        rows = slice(first, first + slots.new)
        check_rows(backend, present[b, :, rows], x[b], codec, rotation(64, KEY_LAYER))
        expected[b, :, rows] = present[b, :, rows]
    assert np.array_equal(present, expected)


def special_rows(head_size: int) -> np.ndarray:
    """Zero, bad, huge, tiny, sparse and constant rows between ordinary ones."""
    x = vectors(1, 1, 24, head_size).astype(np.float32)[0, 0]
    x[1] = 0
    x[3, 5] = np.nan
    x[5, 0] = np.inf
    x[7, -1] = -np.inf
    x[9, 2] = 1e25  # the squared norm overflows float32
    x[11] = 3e38
    x[13] = np.float32(1e-7) * np.sign(x[12])  # subnormal scale
    x[15] = np.float32(1e-12) * np.sign(x[12])  # scale rounds to zero
    x[17] = 0
    x[17, 3] = -2.5
    x[19] = 1.0
    x[21] = x[20] * 1e6  # the scale is clamped
    return x[None, None]


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_special_rows(bits: int, head_size: int, backend: str) -> None:
    x = special_rows(head_size)
    rows = encode(backend, "key", bits, x, past=empty(x, bits), length=[0])
    check_rows(backend, rows, x, Codec(LLOYD_MAX, bits), rotation(head_size, KEY_LAYER))
    for bad in (3, 5, 7, 9, 11):
        assert np.array_equal(rows[0, 0, bad], rows[0, 0, 1])


@pytest.mark.parametrize("backend", BEST_LEVEL)
def test_every_float16_scale(backend: str) -> None:
    # Norms that sweep the exponents of float16, subnormal ones included, at and beside its ties.
    norms = np.concatenate(
        [
            np.arange(1, 40) * 2.0**-25,
            2.0 ** np.arange(-24, 17) * (1 + 2.0**-11),
            2.0 ** np.arange(-24, 17) * (1 + 3 * 2.0**-11),
            [65503.0, 65504.0, 65519.9, 65520.0, 65536.0, 1e9],
        ]
    )
    x = vectors(1, 1, len(norms), 64)
    x *= norms[:, None] / np.linalg.norm(x, axis=-1, keepdims=True)
    x = x.astype(np.float32)
    rows = encode(backend, "key", 4, x, past=empty(x, 4), length=[0])
    check_rows(backend, rows, x, Codec(LLOYD_MAX, 4), rotation(64, KEY_LAYER))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_levels_give_the_same_bytes(bits: int, head_size: int, level: str) -> None:
    x = np.concatenate(
        [special_rows(head_size), vectors(1, 1, 500, head_size).astype(np.float32)], axis=2
    )
    scalar, own = (
        encode(b, "key", bits, x, past=empty(x, bits), length=[0]) for b in ("scalar", level)
    )
    assert np.array_equal(scalar, own)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_levels_give_the_same_bytes_for_narrow_types(dtype: str, level: str) -> None:
    x = as_dtype(vectors(1, 2, 300, 128), dtype)
    side = "key-bf16" if dtype == "bfloat16" else "key"
    scalar, own = (encode(b, side, 4, x, past=empty(x, 4), length=[0]) for b in ("scalar", level))
    assert np.array_equal(scalar, own)


def test_a_wrong_backend_would_be_noticed() -> None:
    x = vectors(1, 1, 4, 64).astype(np.float32)
    rows = encode("body", "key", 4, x, past=empty(x, 4), length=[0])
    with pytest.raises(AssertionError):
        check_rows("negative", rows, x, Codec(LLOYD_MAX, 4), rotation(64, VALUE_LAYER))
    rows[0, 0, 2, -2] += 2
    with pytest.raises(AssertionError):
        check_rows("negative", rows, x, Codec(LLOYD_MAX, 4), rotation(64, KEY_LAYER))
