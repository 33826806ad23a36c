"""Rows whose coordinates have classes: sizes, matrices, scales on a grid, and what they gain."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec.calibration import Float64
from tq_onnx.codec.classes import (
    KEYS_2_5,
    KEYS_2_75,
    STEPS_PER_OCTAVE,
    VALUES_2_5,
    VALUES_2_75,
    Classes,
    Matrices,
    class_feedback,
    decode_classes,
    encode_classes,
    key_matrices,
    quantise_classes,
    scale_of,
    value_matrices,
)
from tq_onnx.codec.codebook import lloyd_max

HEADS, TOKENS, SIZE = 2, 96, 64
HOW = {"layer": 3, "seed": 42, "kind": "qr"}
FORMS = [KEYS_2_5, KEYS_2_75, VALUES_2_5, VALUES_2_75]


def moments(x: np.ndarray) -> Float64:
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


def of_keys(form: Classes = KEYS_2_5) -> Matrices:
    keys, queries = layer(4000)
    return key_matrices(keys.var(axis=1), (queries**2).mean(axis=1), form, **HOW)


def of_values(form: Classes = VALUES_2_5) -> Matrices:
    return value_matrices(moments(layer(4000)[0]), form, **HOW)


def score_error(decoded: np.ndarray) -> float:
    keys, queries = layer()
    lost = queries @ (decoded - keys).swapaxes(-1, -2)
    return float((lost**2).mean() / ((queries @ keys.swapaxes(-1, -2)) ** 2).mean())


@pytest.mark.parametrize(
    ("form", "bytes_64", "bytes_128"),
    [(KEYS_2_5, 20, 38), (VALUES_2_5, 20, 38), (KEYS_2_75, 22, 42), (VALUES_2_75, 22, 42)],
)
def test_rows_have_the_bytes_that_the_names_say(
    form: Classes, bytes_64: int, bytes_128: int
) -> None:
    assert (form.row_bytes(64), form.row_bytes(128)) == (bytes_64, bytes_128)
    for size in (16, 64, 80, 96, 128, 256):
        first, second = form.parts(size)
        assert (first.offset, second.planes.stop + 2) == (0, form.row_bytes(size))
        assert first.planes.stop == second.planes.start
        assert first.coordinates.stop == second.coordinates.start == first.layout.head_size


@pytest.mark.parametrize("size", [0, 8, 60])
def test_a_head_without_two_classes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="head size"):
        KEYS_2_5.sizes(size)


@pytest.mark.parametrize("made", [of_keys, of_values])
def test_queries_and_outputs_take_the_transposed_inverse(made) -> None:  # type: ignore[no-untyped-def]
    matrices = made()
    product = matrices.encode.astype(np.float64) @ matrices.read.swapaxes(-1, -2)
    assert np.abs(product - np.eye(SIZE)).max() < 1e-5


def test_keys_are_in_the_order_of_what_errors_do_to_scores() -> None:
    keys, queries = layer(4000)
    weight = keys.var(axis=1) * (queries**2).mean(axis=1)
    order = of_keys().order
    assert order is not None
    assert (np.diff(np.take_along_axis(weight, order, axis=1), axis=1) <= 0).all()


@pytest.mark.parametrize(("made", "form"), [(of_keys, KEYS_2_5), (of_values, VALUES_2_5)])
def test_a_usual_row_has_the_usual_scale(made, form: Classes) -> None:  # type: ignore[no-untyped-def]
    rows = quantise_classes(layer()[0], form, made())
    assert np.abs(rows.scales.mean(axis=(0, 1)) - 128).max() < STEPS_PER_OCTAVE / 2
    assert not rows.clamped.any()


def test_the_first_class_of_values_has_most_of_them() -> None:
    turned = layer(4000)[0] @ of_values().read
    size = VALUES_2_5.sizes(SIZE)[0]
    energy = (turned**2).sum(axis=1)
    assert (energy[:, :size].sum(axis=1) > 0.7 * energy.sum(axis=1)).all()


@pytest.mark.parametrize("form", FORMS)
def test_each_class_errs_as_its_codebook_does(form: Classes) -> None:
    matrices = of_values(form)
    x = layer(2000, seed=8)[0]
    turned = x @ matrices.encode
    decoded = decode_classes(encode_classes(x, form, matrices), form, matrices) @ matrices.encode
    for part in form.parts(SIZE):
        own, its = turned[..., part.coordinates], decoded[..., part.coordinates]
        error = ((own - its) ** 2).sum(axis=-1) / (own**2).sum(axis=-1)
        expected = lloyd_max(part.layout.codec.bits, part.layout.head_size).mse
        # An unbiased scale costs as much again as the codes have lost; gains take a part of it.
        assert 0.4 * expected < error.mean() < 1.3 * expected


def test_stored_scales_are_within_half_a_step() -> None:
    grid = scale_of(np.arange(256).astype(np.uint8))
    assert (grid[0], grid[128]) == (0, 1)
    assert np.allclose(np.diff(np.log2(grid[1:])), 1 / STEPS_PER_OCTAVE)
    # Rows of equal direction have equal codes, and scales in the ratio of their lengths.
    x = layer()[0][:, :1] * np.geomspace(1, 2, 40)[:, None]
    rows = quantise_classes(x, KEYS_2_5, of_keys())
    assert (rows.codes == rows.codes[:, :1]).all()
    exact = np.log2(np.geomspace(1, 2, 40))[:, None]
    steps = rows.scales.astype(float) - rows.scales[:, :1] - STEPS_PER_OCTAVE * exact
    assert np.abs(steps).max() <= 1 + 1e-9


def test_bits_go_where_scores_need_them() -> None:
    matrices, keys = of_keys(), layer()[0]
    blind = key_matrices(np.ones((HEADS, SIZE)), np.ones((HEADS, SIZE)), KEYS_2_5, **HOW)
    errors = [
        score_error(decode_classes(encode_classes(keys, KEYS_2_5, one), KEYS_2_5, one))
        for one in (matrices, blind)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_feedback_inside_the_classes_helps_scores() -> None:
    queries, keys, matrices = layer(4000)[1], layer()[0], of_keys()
    feedback = class_feedback(moments(queries), matrices, KEYS_2_5)
    assert [each.shape for each in feedback] == [(HEADS, 8, 8), (HEADS, 56, 56)]
    errors = [
        score_error(
            decode_classes(
                encode_classes(keys, KEYS_2_5, matrices, feedback=given), KEYS_2_5, matrices
            )
        )
        for given in (feedback, None)
    ]
    assert errors[0] < errors[1]


@pytest.mark.filterwarnings("error")
def test_strange_vectors_are_clamped_counted_and_spoil_nothing() -> None:
    matrices, x = of_keys(), layer()[0].copy()
    plain = encode_classes(x, KEYS_2_5, matrices)
    strange = {1: np.nan, 2: np.inf, 3: 0.0}
    for token, number in strange.items():
        x[:, token] = number
    x[:, 4] *= 1e9
    x[:, 5] *= 1e-9
    rows = quantise_classes(x, KEYS_2_5, matrices)
    assert not rows.scales[:, [1, 2, 3]].any()
    assert (rows.scales[:, 4] == 255).all()
    assert (rows.scales[:, 5] == 1).all()
    touched = [1, 2, 3, 4, 5]
    assert rows.clamped[:, [4, 5]].all()
    assert rows.clamped.sum() == rows.clamped[:, [4, 5]].size
    encoded = encode_classes(x, KEYS_2_5, matrices)
    others = np.setdiff1d(np.arange(TOKENS), touched)
    assert (encoded[:, others] == plain[:, others]).all()
    decoded = decode_classes(encoded, KEYS_2_5, matrices)
    assert np.isfinite(decoded).all()
    assert not decoded[:, [1, 2, 3]].any()


def test_dead_coordinates_make_no_wild_matrices() -> None:
    variances = np.zeros((1, SIZE))
    variances[0, :4] = 2.0
    matrices = key_matrices(variances, np.ones((1, SIZE)), KEYS_2_5, **HOW)
    assert np.isfinite(matrices.encode).all()
    assert np.isfinite(matrices.read).all()
    silent = key_matrices(np.zeros((1, SIZE)), np.zeros((1, SIZE)), KEYS_2_5, **HOW)
    assert np.isfinite(silent.encode).all()


def test_rows_are_frozen() -> None:
    """Plane by plane, so that whoever reads rows later finds the layout here."""
    identity = np.eye(16, dtype=np.float32)[None]
    x = np.zeros((1, 1, 16))
    x[0, 0, :8] = np.linspace(-1, 1, 8)
    x[0, 0, 8:] = [-3, -1, 1, 3, -3, -1, 1, 3]
    matrices = Matrices(identity, identity)
    found = {
        form: encode_classes(x, form, matrices, gains=np.ones(1, np.float32)).tobytes().hex()
        for form in (KEYS_2_5, VALUES_2_5)
    }
    # Nibbles of the first class at 4 bits; a plane of 2 bits and one of 1 at 3. Then the codes
    # 0 1 2 3 0 1 2 3 of the second, two bits each, 0 2 0 2 in one byte and 1 3 1 3 in the next;
    # then the scales: 83 steps above 1 are 6.04, 6.32 being the length.
    assert found == {KEYS_2_5: "82a3c5d788dd9ed3", VALUES_2_5: "899df088dda0d3"}
