"""Codecs with two classes of coordinates: sizes, matrices, scales on a grid, and what they gain."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec.classmatrices import (
    Matrices,
    class_feedback,
    first_coordinates,
    key_matrices,
    value_matrices,
)
from tq_onnx.codec.codebook import BookVersion, codebook_of, lloyd_max
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.quantise import quantise
from tq_onnx.codec.reference import decode, encode
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import CODECS, Codec, row_layout
from tq_onnx.codec.split import (
    SPLIT_EIGHTH,
    SPLIT_HALF,
    SPLIT_QUARTER,
    STEPS_PER_OCTAVE,
    scale_of,
)

HEADS, TOKENS, SIZE = 2, 96, 64
HOW = {"layer": 3, "seed": 42, "kind": "qr"}
KEYS, KEYS_MORE = Codec(SPLIT_EIGHTH, 4), Codec(SPLIT_QUARTER, 4)
VALUES, VALUES_MORE = Codec(SPLIT_QUARTER, 3), Codec(SPLIT_HALF, 3)
SPLIT = [codec for codec in CODECS if codec.is_split]


def moments(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.swapaxes(-1, -2) @ x / x.shape[-2])


def layer(tokens: int = TOKENS, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Keys and the queries that read them: each strong in coordinates of its own."""
    rng = np.random.default_rng(seed)
    strong_keys, strong_queries = (
        rng.permuted(np.tile(np.geomspace(8, 0.1, SIZE), (HEADS, 1)), axis=1)[:, None]
        for _ in range(2)
    )
    shape = (HEADS, tokens, SIZE)
    queries = rng.standard_normal(shape) @ np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0]
    return rng.standard_normal(shape) * strong_keys, queries * strong_queries


def of_keys(codec: Codec = KEYS) -> Matrices:
    keys, queries = layer(4000)
    return key_matrices(keys.var(axis=1), (queries**2).mean(axis=1), codec, **HOW)


def of_values(codec: Codec = VALUES) -> Matrices:
    return value_matrices(moments(layer(4000)[0]), codec, **HOW)


def rows_of(
    x: np.ndarray, codec: Codec, matrices: Matrices, feedback: np.ndarray | None = None
) -> np.ndarray:
    book = codebook_of(codec, x.shape[-1])
    how = {"gains": gain_table(), "feedback": feedback}
    return encode(x, codec, matrices.encode, book, UNBIASED, **how)


def decoded(rows: np.ndarray, codec: Codec, matrices: Matrices) -> np.ndarray:
    return decode(rows, codec, matrices.read, codebook_of(codec, matrices.read.shape[-1]))


def score_error(found: np.ndarray) -> float:
    keys, queries = layer()
    lost = queries @ (found - keys).swapaxes(-1, -2)
    return float((lost**2).mean() / ((queries @ keys.swapaxes(-1, -2)) ** 2).mean())


@pytest.mark.parametrize(
    ("codec", "bytes_64", "bytes_128"),
    [(KEYS, 20, 38), (VALUES, 20, 38), (KEYS_MORE, 22, 42), (VALUES_MORE, 22, 42)],
)
def test_rows_have_the_bytes_that_the_names_say(
    codec: Codec, bytes_64: int, bytes_128: int
) -> None:
    assert [row_layout(codec, size).row_bytes for size in (64, 128)] == [bytes_64, bytes_128]
    for size in (16, 64, 80, 96, 128, 256, 512):
        layout = row_layout(codec, size)
        first, second = codec.class_sizes(size)
        assert first + second == size
        assert 0 < first <= second
        ends = [plane.offset + plane.size for plane in layout.planes]
        assert [0, *ends] == [*(plane.offset for plane in layout.planes), layout.code_bytes]
        assert [field.offset for field in layout.fields] == [ends[-1], ends[-1] + 1]
        assert {plane.coordinates.stop for plane in layout.planes} == {first, size}


@pytest.mark.parametrize("size", [8, 0, 60])
def test_a_head_without_two_classes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="head size"):
        row_layout(KEYS, size)


@pytest.mark.parametrize("made", [of_keys, of_values])
def test_queries_and_outputs_take_the_transposed_inverse(made) -> None:  # type: ignore[no-untyped-def]
    matrices = made()
    product = matrices.encode.astype(np.float64) @ matrices.read.swapaxes(-1, -2)
    assert np.abs(product - np.eye(SIZE)).max() < 1e-5


@pytest.mark.parametrize("codec", [KEYS, KEYS_MORE])
def test_the_first_class_of_keys_has_what_scores_need(codec: Codec) -> None:
    keys, queries = layer(4000)
    weight = keys.var(axis=1) * (queries**2).mean(axis=1)
    first = first_coordinates(of_keys(codec).encode, codec)
    assert (first.sum(axis=1) == codec.class_sizes(SIZE)[0]).all()
    for own, weights in zip(first, weight, strict=True):
        assert weights[own].min() >= weights[~own].max()


@pytest.mark.parametrize(("made", "codec"), [(of_keys, KEYS), (of_values, VALUES)])
def test_a_usual_row_has_the_usual_scale(made, codec: Codec) -> None:  # type: ignore[no-untyped-def]
    fields = quantise(
        layer()[0], codec, made().encode, codebook_of(codec, SIZE), UNBIASED, gains=gain_table()
    )[1]
    for stored in fields.values():
        assert abs(stored.mean() - 128) < STEPS_PER_OCTAVE / 2
        assert ((stored > 1) & (stored < 255)).all()


def test_the_first_class_of_values_has_most_of_them() -> None:
    turned = layer(4000)[0] @ of_values().read
    size = VALUES.class_sizes(SIZE)[0]
    energy = (turned**2).sum(axis=1)
    assert (energy[:, :size].sum(axis=1) > 0.7 * energy.sum(axis=1)).all()


@pytest.mark.parametrize("codec", SPLIT, ids=str)
def test_each_class_errs_as_its_codebook_does(codec: Codec) -> None:
    matrices = of_values(codec)
    x = layer(1000, seed=8)[0]
    turned = x @ matrices.encode
    found = decoded(rows_of(x, codec, matrices), codec, matrices) @ matrices.encode
    first = codec.class_sizes(SIZE)[0]
    for own, bits in zip((slice(first), slice(first, SIZE)), codec.index_bits, strict=True):
        mine, its = turned[..., own], found[..., own]
        error = ((mine - its) ** 2).sum(axis=-1) / (mine**2).sum(axis=-1)
        expected = lloyd_max(bits, mine.shape[-1]).mse
        # An unbiased scale costs as much again as the codes have lost; gains take a part of it.
        assert 0.4 * expected < error.mean() < 1.3 * expected


def test_stored_scales_are_within_half_a_step() -> None:
    grid = scale_of(np.arange(256))
    assert (grid[0], grid[128]) == (0, 1)
    assert np.allclose(np.diff(np.log2(grid[1:])), 1 / STEPS_PER_OCTAVE)
    # Rows of equal direction have equal codes, and scales in the ratio of their lengths.
    x = layer()[0][:, :1] * np.geomspace(1, 2, 40)[:, None]
    rows = rows_of(x, KEYS, of_keys())
    assert (rows[..., :-2] == rows[:, :1, :-2]).all()
    exact = np.log2(np.geomspace(1, 2, 40))[:, None]
    steps = rows[..., -2:].astype(float) - rows[:, :1, -2:] - STEPS_PER_OCTAVE * exact
    assert np.abs(steps).max() <= 1 + 1e-9


def test_bits_go_where_scores_need_them() -> None:
    keys = layer()[0]
    blind = key_matrices(np.ones((HEADS, SIZE)), np.ones((HEADS, SIZE)), KEYS, **HOW)
    errors = [
        score_error(decoded(rows_of(keys, KEYS, one), KEYS, one)) for one in (of_keys(), blind)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_feedback_inside_the_classes_helps_scores() -> None:
    queries, keys, matrices = layer(4000)[1], layer()[0], of_keys()
    feedback = class_feedback(moments(queries), matrices.read, KEYS)
    first = KEYS.class_sizes(SIZE)[0]
    assert not feedback[:, :first, first:].any()
    assert not feedback[:, first:, :first].any()
    errors = [
        score_error(decoded(rows_of(keys, KEYS, matrices, given), KEYS, matrices))
        for given in (feedback, None)
    ]
    assert errors[0] < errors[1]


@pytest.mark.filterwarnings("error")
def test_strange_vectors_are_clamped_counted_and_spoil_nothing() -> None:
    matrices, x = of_keys(), layer()[0].copy()
    plain = rows_of(x, KEYS, matrices)
    strange = {1: np.nan, 2: np.inf, 3: 0.0}
    for token, number in strange.items():
        x[:, token] = number
    x[:, 4] *= 1e9
    x[:, 5] *= 1e-9
    x[:, 6] *= 1 / 24
    rows = rows_of(x, KEYS, matrices)
    assert not rows[:, [1, 2, 3], -2:].any()
    assert (rows[:, 4, -2:] == 255).all()
    assert not rows[:, 5, -2:].any()
    assert (rows[:, 6, -2:] > 0).all()
    others = np.setdiff1d(np.arange(TOKENS), [1, 2, 3, 4, 5, 6])
    assert (rows[:, others] == plain[:, others]).all()
    found = decoded(rows, KEYS, matrices)
    assert np.isfinite(found).all()
    assert not found[:, [1, 2, 3, 5]].any()


def test_dead_coordinates_make_no_wild_matrices() -> None:
    variances = np.zeros((1, SIZE))
    variances[0, :4] = 2.0
    matrices = key_matrices(variances, np.ones((1, SIZE)), KEYS, **HOW)
    assert np.isfinite(matrices.encode).all()
    assert np.isfinite(matrices.read).all()
    silent = key_matrices(np.zeros((1, SIZE)), np.zeros((1, SIZE)), KEYS, **HOW)
    assert np.isfinite(silent.encode).all()
    with pytest.raises(ValueError, match="not finite"):
        value_matrices(np.full((1, SIZE, SIZE), np.nan), VALUES, **HOW)


@pytest.mark.parametrize(
    ("version", "scale"), [(BookVersion.OF_127, "a0"), (BookVersion.INTEGERS, "9f")]
)
def test_rows_are_frozen(version: BookVersion, scale: str) -> None:
    """Plane by plane, so that whoever reads rows later finds the layout here."""
    identity = np.eye(16, dtype=np.float32)[None]
    x = np.zeros((1, 1, 16))
    x[0, 0, :8] = np.linspace(-1, 1, 8)
    x[0, 0, 8:] = [-3, -1, 1, 3, -3, -1, 1, 3]
    found = {
        codec: encode(x, codec, identity, codebook_of(codec, 16, version), UNBIASED).tobytes().hex()
        for codec in (KEYS, VALUES)
    }
    # Nibbles of the first class at 4 bits; a plane of 2 bits and one of 1 at 3. Then the codes
    # 0 1 2 3 0 1 2 3 of the second, two bits each, 0 2 0 2 in one byte and 1 3 1 3 in the next;
    # then the scales: 83 steps above 1 are 6.04, 6.32 being the length.
    assert found == {KEYS: "82a3c5d788dd9ed3", VALUES: f"899df088dd{scale}d3"}
