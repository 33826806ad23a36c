"""Encode, append and decode of the oracle: identities, special rows, predicted errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import LLOYD_MAX, rotate
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import KINDS, Codec, row_layout

CODECS = [Codec(LLOYD_MAX, bits) for bits in KINDS[LLOYD_MAX].bits]
HALF = 2.0**-11  # relative rounding of a normal float16


def round_trip(
    x: np.ndarray, codec: Codec, kind: str = QR, norm_correction: bool = True
) -> np.ndarray:
    rotation, book = make_rotation(kind, x.shape[-1], 0), lloyd_max(codec.bits, x.shape[-1])
    rows = reference.encode(x, codec, rotation, book, norm_correction)
    return reference.decode(rows, codec, rotation, book)


def unit_vectors(count: int, head_size: int, seed: int = 0) -> np.ndarray:
    x = np.random.RandomState(seed).standard_normal((count, head_size))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-3, 4))
def test_norm_correction_keeps_the_norm(codec: Codec, seed: int, exponent: int) -> None:
    # Identity 1: the decoder multiplies by one stored number and the norm is right.
    x = unit_vectors(4, 64, seed) * 10.0**exponent
    norms = np.linalg.norm(round_trip(x, codec), axis=-1)
    np.testing.assert_allclose(norms, 10.0**exponent, rtol=HALF + 1e-6, atol=2.0**-25 * 2)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_folded_scale_is_the_formula(codec: Codec) -> None:
    # Identity 1: s c R^T equals gamma yhat / ||yhat|| R^T.
    x = np.random.RandomState(3).standard_normal((50, 128))
    rotation, book = make_rotation(QR, 128, 0), lloyd_max(codec.bits, 128)
    rows = reference.encode(x, codec, rotation, book)
    yhat = book.centroids.astype(float)[unpack(rows, row_layout(codec, 128))]
    gamma = np.linalg.norm(x, axis=-1, keepdims=True)
    formula = gamma * yhat / np.linalg.norm(yhat, axis=-1, keepdims=True) @ rotation.T.astype(float)
    np.testing.assert_allclose(
        reference.decode(rows, codec, rotation, book), formula, rtol=HALF * 1.01, atol=1e-12
    )


def test_ties_go_up() -> None:
    # An identity rotation and a vector whose first coordinates are boundaries of its direction.
    codec, book = Codec(LLOYD_MAX, 4), lloyd_max(4, 64)
    below = np.nextafter(book.boundaries, -1)
    for values, expected in ((book.boundaries, np.arange(1, 16)), (below, np.arange(15))):
        x = np.zeros(64)
        x[:15] = values
        x[15] = np.sqrt(1 - np.sum(x**2))
        norm, y = rotate(x, np.eye(64, dtype=np.float32))
        assert norm == pytest.approx(1, abs=1e-15)
        y[:15] = values  # undo the rounding of x / norm
        codes = np.searchsorted(book.boundaries.astype(float), y[:15], side="right")
        assert np.array_equal(codes, expected)
    # Exactly representable: zeros lie on the middle boundary.
    rows = reference.encode(np.eye(64)[:1], codec, np.eye(64, dtype=np.float32), book)
    assert (unpack(rows, row_layout(codec, 64))[0, 1:] == 8).all()


@pytest.mark.parametrize("norm", [65504.0, 1e6, 1e18])
def test_scale_is_clamped(norm: float) -> None:
    codec, rotation, book = CODECS[-1], make_rotation(QR, 64, 0), lloyd_max(4, 64)
    x = unit_vectors(4, 64) * norm
    scales = reference.scales_of(reference.encode(x * 2, codec, rotation, book), codec, 64)
    assert (scales == MAX_HALF).all()


def test_tiny_rows_use_subnormal_scales() -> None:
    codec, rotation, book = CODECS[-1], make_rotation(QR, 64, 0), lloyd_max(4, 64)
    x = unit_vectors(4, 64) * 1e-6
    scales = reference.scales_of(reference.encode(x, codec, rotation, book), codec, 64)
    assert (scales > 0).all()
    assert (np.abs(scales - 1e-6) < 1e-7).all()
    gone = reference.encode(x * 1e-6, codec, rotation, book)
    assert not reference.decode(gone, codec, rotation, book).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_input_types_agree(dtype: type) -> None:
    x = np.random.RandomState(2).standard_normal((5, 64)).astype(np.float16)
    codec, rotation, book = CODECS[0], make_rotation(QR, 64, 0), lloyd_max(2, 64)
    assert np.array_equal(
        reference.encode(x.astype(dtype), codec, rotation, book),
        reference.encode(x, codec, rotation, book),
    )


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 3, 64), (1, 2, 3, 64)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    codec, rotation, book = Codec(LLOYD_MAX, 3), make_rotation(QR, 64, 0), lloyd_max(3, 64)
    rows = reference.encode(np.ones(shape), codec, rotation, book)
    assert rows.shape == (*shape[:-1], 26)
    assert reference.decode(rows, codec, rotation, book).shape == shape


class TestAppend:
    past = np.arange(2 * 1 * 4 * 3, dtype=np.uint8).reshape(2, 1, 4, 3) + 1
    rows = np.full((2, 1, 2, 3), 200, np.uint8) + np.arange(2, dtype=np.uint8)[None, None, :, None]

    def test_grows(self) -> None:
        present = reference.append(self.past, self.rows, np.array([4]))
        assert present.shape == (2, 1, 6, 3)
        assert np.array_equal(present[:, :, :4], self.past)
        assert np.array_equal(present[:, :, 4:], self.rows)

    def test_fixed_capacity(self) -> None:
        present = reference.append(self.past, self.rows, np.array([1]))
        assert present.shape == self.past.shape
        assert np.array_equal(present[:, :, 1:3], self.rows)
        assert np.array_equal(present[:, :, [0, 3]], self.past[:, :, [0, 3]])

    def test_lengths_of_their_own(self) -> None:
        present = reference.append(self.past, self.rows, np.array([0, 3]))
        assert present.shape == (2, 1, 5, 3)
        assert np.array_equal(present[0, :, :2], self.rows[0])
        assert np.array_equal(present[1, :, 3:], self.rows[1])
        assert np.array_equal(present[0, :, 2:4], self.past[0, :, 2:4])
        assert not present[0, :, 4:].any()

    def test_negative_length(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            reference.append(self.past, self.rows, np.array([-1]))
