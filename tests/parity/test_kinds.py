"""Rows and bytes out of the ordinary, for every codec kind on every backend."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.vectors import KINDS
from tests.parity.backends import BEST_AND_BODY, BEST_LEVEL, LEVELS, LEVELS_AND_BODY, run
from tests.parity.compare import check_attention, check_rows
from tests.parity.graphs import KEY_LAYER, VALUE_LAYER, Attention, attention_model, encode_model
from tests.parity.graphs import tables as tables_of
from tests.parity.test_encode import vectors
from tq_onnx.codec import fp8, reference
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, UNIFORM

# The evaluator computes in numpy, which warns where the operators mean to overflow.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

D = 80
"""Not a power of two, and with a last block of 16 for q8_0."""

BAD = (np.nan, np.inf, -np.inf)


def encode(backend: str, codec: Codec, x: np.ndarray) -> np.ndarray:
    row_bytes = row_layout(codec, x.shape[-1]).row_bytes
    model = encode_model("key", codec, x.shape[-1], str(x.dtype))
    past = np.zeros((*x.shape[:2], 0, row_bytes), np.uint8)
    feeds = {"key": x, "past_key": past, "past_length": np.array([0], np.int64)}
    return run(backend, model, feeds)[0]


def special_rows() -> np.ndarray:
    """``[1, 1, T, 80]``: zeros, constants, single spikes, magnitudes, steps and halves of steps."""
    x = vectors(1, 1, 60, D)[0, 0]
    # Below, squares are subnormal in float32: codes are any, and scales round to zero.
    x[:30] *= (10.0 ** np.linspace(-14, 12, 30))[:, None]
    spikes = np.zeros((4, D))
    spikes[0, 0], spikes[1, 79], spikes[2, 40], spikes[3, 64:] = 1, -3, 1e4, 0.25
    constants = np.repeat([[0.0], [-0.0], [1.0], [-2.5], [1e5], [-1e7]], D, axis=1)
    ramp = np.arange(D) % 16
    steps = np.stack([ramp, ramp / 2, ramp - 7.5, (np.arange(D) % 4) * 1.0, np.arange(D) - 40.0])
    # Halves between two E4M3 numbers, and beyond the largest.
    positive = fp8.VALUES[:127].astype(float)
    halves = np.resize((positive[1:] + positive[:-1]) / 2, (2, D))
    large = np.resize([447.9, 448, 463, 464, 465, 1e6, -448, -470], (1, D))
    rows = [spikes, constants, steps, halves, -halves, large, x]
    return np.concatenate(rows)[None, None].astype(np.float32)


@pytest.mark.parametrize("backend", BEST_AND_BODY)
@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_special_rows(codec: Codec, backend: str) -> None:
    x = special_rows()
    rows = encode(backend, codec, x)
    turn, book = tables_of(codec, D, KEY_LAYER)
    check_rows(f"{backend}, special", rows, x, codec, turn, tie_rate=0.2)
    zero = reference.encode(np.zeros(D), codec, turn, book)
    assert np.array_equal(rows[0, 0, 4], zero)
    # Rows that are not finite are zero vectors, and leave the others alone.
    bad = x.copy()
    for place, value in enumerate(BAD):
        bad[0, 0, 20 + 2 * place, 7 * place] = value
    spoilt = encode(backend, codec, bad)
    for place in range(3):
        assert np.array_equal(spoilt[0, 0, 20 + 2 * place], zero)
    others = np.setdiff1d(np.arange(x.shape[2]), [20, 22, 24])
    assert np.array_equal(spoilt[:, :, others], rows[:, :, others])


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize(
    "codec", [codec for codec in KINDS if codec.kind in (UNIFORM, Q8_0)], ids=str
)
def test_coordinates_half_a_step_away(codec: Codec, backend: str) -> None:
    # Half a step up to float32 rounding; either code will do, but no other.
    random = np.random.RandomState(codec.bits)
    top = 2**codec.bits - 1 if codec.kind == UNIFORM else 127
    steps = random.randint(0, top, (1, 1, 200, D)) + 0.5
    steps[..., ::32] = top  # of every block
    if codec.kind == UNIFORM:
        steps[..., 1] = 0
    scale = 10 ** random.uniform(-3, 3, (1, 1, 200, 1))
    low = scale * random.uniform(-top, 0, (1, 1, 200, 1)) * (codec.kind == UNIFORM)
    x = (steps * scale + low).astype(np.float32)
    rows, name = encode(backend, codec, x), f"{backend}, on halves"
    assert check_rows(name, rows, x, codec, None, tie_rate=0.5) > 0


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_largest_floats(codec: Codec, backend: str) -> None:
    # Squares and differences of these are not finite in float32. Zero is not halfway.
    x = np.zeros((1, 1, 4, D), np.float32)
    x[0, 0, 0, :2] = 1e25, -2e25
    x[0, 0, 1, :2] = 3.4e38, 1.0
    x[0, 0, 2, :2] = 3e38, -2e38
    x[0, 0, 3] = 2.0
    turn, book = tables_of(codec, D, KEY_LAYER)
    rows = encode(backend, codec, x)
    assert np.array_equal(rows, reference.encode(x, codec, turn, book))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_levels_give_the_same_bytes(codec: Codec, level: str) -> None:
    for head_size in (D, 128):
        x = vectors(1, 1, 200, head_size).astype(np.float32)
        scalar, own = (encode(backend, codec, x) for backend in ("scalar", level))
        assert np.array_equal(scalar, own)


@pytest.mark.parametrize("backend", LEVELS_AND_BODY)
@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_attention_over_any_codes(codec: Codec, backend: str) -> None:
    # Codes that no encoder writes (NaN of E4M3, -128, upper bits of u8) mean the same everywhere.
    layout = row_layout(codec, D)
    random = np.random.RandomState(0)
    caches = []
    for layer in (KEY_LAYER, VALUE_LAYER):
        turn, book = tables_of(codec, D, layer)
        x = random.standard_normal((1, 2, 40, D))
        rows = reference.encode(x, codec, turn, book)
        codes = random.randint(0, 256, (1, 2, 40, layout.code_bytes), np.uint8)
        if codec.kind == FP8:
            # Not the large ones, whose scores would leave one key alone.
            codes = np.where(codes & 0x7F < 0x48, codes, 0xFF - (codes & 0x80)).astype(np.uint8)
            assert {0x7F, 0xFF} <= set(codes.ravel().tolist())
        rows[..., : layout.code_bytes] = codes
        caches.append(rows)
    query = random.standard_normal((1, 4, 2, D)).astype(np.float32)
    graph = Attention(D, codec, codec, scale=D**-0.5)
    feeds = dict(zip(("key_cache", "value_cache"), caches, strict=True))
    feeds |= {"query": query, "past_length": np.array([38])}
    output = run(backend, attention_model(graph), feeds)[0]
    turns = [tables_of(codec, D, layer) for layer in (KEY_LAYER, VALUE_LAYER)]
    centroids = [None if book is None else book.centroids for _, book in turns]
    expected = reference.attention(
        query,
        *caches,
        np.array([38]),
        key=codec,
        value=codec,
        key_rotation=turns[0][0],
        key_codebook=centroids[0],
        value_rotation=turns[1][0],
        value_codebook=centroids[1],
        scale=graph.scale,
        causal=True,
    )
    assert np.isfinite(expected).all()
    check_attention(f"{backend}, any codes", "float32", output, expected)
