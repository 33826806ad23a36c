"""Codebooks against the published table, against scipy and against the exact law.

What Lloyd and Max say holds of codebooks that are not rounded; those of integers have
test_integers.py.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, special, stats

from tests.codec.theory import error_under, unit_coordinate, unrounded
from tq_onnx.codec.codebook import codebook_of, lloyd_max
from tq_onnx.codec.prior import with_prior
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM

# Unit variance: positive centroids, positive boundaries, error per unit energy.
TABLE = {
    1: ([0.7978845608], [], 0.3633802276),
    2: ([0.4527800346, 1.5104176085], [0.9815988216], 0.1174818478),
    3: (
        [0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045],
        [0.5005497301, 1.0499572799, 1.7479274915],
        0.0345477608,
    ),
    4: (
        [
            *(0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565),
            *(1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
        ],
        [
            *(0.2582216647, 0.5224037090, 0.7995497875, 1.0992858269),
            *(1.4371387917, 1.8435318063, 2.4008033988),
        ],
        0.0095010080,
    ),
}
# Total squared error of a unit vector under the exact law, by the quantiser made for that law.
EXACT_LAW = {
    (64, 1): 0.358387,
    (64, 2): 0.114526,
    (64, 3): 0.033391,
    (64, 4): 0.009132,
    (128, 1): 0.360889,
    (128, 2): 0.116000,
    (128, 3): 0.033966,
    (128, 4): 0.009315,
}
ALL_BITS = KINDS[LLOYD_MAX].bits
"""One bit is the codebook of no kind; the theory has it."""

SMALL_HEAD_SIZES = (8, 16, 24, 40, 56)


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", TABLE)
def test_table(bits: int, head_size: int) -> None:
    centroids, boundaries, mse = TABLE[bits]
    book = unrounded(bits, head_size)
    half = book.centroids.size // 2
    root = math.sqrt(head_size)
    # What is stored is the table rounded to float32, to the last bit.
    np.testing.assert_allclose(book.centroids[half:], np.array(centroids) / root, rtol=6.1e-8)
    np.testing.assert_allclose(book.boundaries[half:], np.array(boundaries) / root, rtol=6.1e-8)
    assert book.mse == pytest.approx(mse, abs=1e-10)


@pytest.mark.parametrize("head_size", [*SMALL_HEAD_SIZES, 64, 128])
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_antisymmetric_to_the_bit(bits: int, head_size: int) -> None:
    book = lloyd_max(bits, head_size)
    assert book.centroids.dtype == book.boundaries.dtype == np.float32
    assert book.centroids.shape == (2**bits,)
    assert book.boundaries.shape == (2**bits - 1,)
    assert np.array_equal(book.centroids, -book.centroids[::-1])
    assert np.array_equal(book.boundaries, -book.boundaries[::-1])
    middle = book.boundaries[len(book.boundaries) // 2]
    assert middle.tobytes() == np.float32(0).tobytes()  # +0, not -0
    interleaved = np.empty(2 ** (bits + 1) - 1, np.float32)
    interleaved[::2], interleaved[1::2] = book.centroids, book.boundaries
    assert (np.diff(interleaved) > 0).all()


@pytest.mark.parametrize("head_size", SMALL_HEAD_SIZES)
@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_small_head_sizes_are_optimal_for_the_exact_law(bits: int, head_size: int) -> None:
    law = unit_coordinate(head_size)
    book = unrounded(bits, head_size)
    edges = [-1.0, *book.boundaries.tolist(), 1.0]
    for (low, high), centroid in zip(pairwise(edges), book.centroids.tolist(), strict=True):
        moment, mass = (
            integrate.fixed_quad(lambda x, n=n: x**n * law.pdf(x), low, high, n=60)[0]
            for n in (1, 0)
        )
        assert centroid == pytest.approx(moment / mass, abs=3e-7)
    middles = (book.centroids[1:].astype(float) + book.centroids[:-1]) / 2
    np.testing.assert_allclose(book.boundaries, middles, atol=1e-7)
    for each in (book, lloyd_max(bits, head_size)):
        assert each.mse == pytest.approx(error_under(law, each, head_size), rel=1e-6)


@pytest.mark.parametrize("bits", KINDS[LLOYD_MAX].bits)
def test_gaussian_against_scipy(bits: int) -> None:
    book = unrounded(bits, 64)
    edges = np.array([-np.inf, *book.boundaries.tolist(), np.inf]) * 8
    mass = np.diff(special.ndtr(edges))
    means = -np.diff(stats.norm.pdf(edges)) / mass / 8
    np.testing.assert_allclose(book.centroids, means, atol=2e-7)
    for each in (book, lloyd_max(bits, 64)):
        error = error_under(stats.norm(scale=1 / 8), each, 64)
        assert each.mse == pytest.approx(error, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_gaussian_stands_in_for_the_exact_law(
    bits: int, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The codebook for N(0, 1/d), applied to real unit vectors, comes within 0.5 % of the optimum
    # (at 5 bits, whose outer levels sit in tails that a sphere hardly has, within 1 %).
    law = unit_coordinate(head_size)
    error = error_under(law, unrounded(bits, head_size), head_size)
    monkeypatch.setattr("tq_onnx.codec.codebook.GAUSSIAN_FROM_HEAD_SIZE", head_size + 1)
    book = unrounded(bits, head_size)
    optimum = error_under(law, book, head_size)
    assert optimum - 1e-9 <= error <= (1.005 if bits < 5 else 1.01) * optimum
    assert optimum == pytest.approx(EXACT_LAW.get((head_size, bits), optimum), abs=1e-6)


@pytest.mark.parametrize(("head_size", "bits"), EXACT_LAW)
def test_exact_law_total_error(head_size: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The closed forms of the exact law also hold where the Gaussian is used instead.
    monkeypatch.setattr("tq_onnx.codec.codebook.GAUSSIAN_FROM_HEAD_SIZE", head_size + 1)
    book = unrounded(bits, head_size)
    assert book.mse == pytest.approx(EXACT_LAW[head_size, bits], abs=6e-7)


def test_shared_and_read_only() -> None:
    book = lloyd_max(4, 128)
    assert lloyd_max(4, 128) is book
    with pytest.raises(ValueError, match="read-only"):
        book.centroids[0] = 0


@pytest.mark.parametrize(("bits", "head_size"), [(0, 128), (6, 128), (4, 100), (4, 0)])
def test_refuses_what_does_not_exist(bits: int, head_size: int) -> None:
    with pytest.raises(ValueError, match=rf"no codebook of {bits} bits|head size {head_size}"):
        lloyd_max(bits, head_size)


def test_codebooks_of_codecs() -> None:
    assert codebook_of(Codec(LLOYD_MAX, 5), 64) is lloyd_max(5, 64)
    assert codebook_of(Codec(U8, 4), 64) is lloyd_max(4, 64)
    # One of the bits of prod is the sign.
    assert codebook_of(Codec(PROD, 4), 64) is lloyd_max(3, 64)
    assert codebook_of(Codec(PROD, 3), 64) is lloyd_max(2, 64)


@pytest.mark.parametrize(
    "codec", [Codec(UNIFORM, 4), Codec(FP8, 8), Codec(Q8_0, 8), Codec(RAW, 16)]
)
def test_others_have_none(codec: Codec) -> None:
    with pytest.raises(ValueError, match=f"{codec} has no codebook"):
        codebook_of(codec, 64)


# Covariances of few tokens: what is added to them, and what that is worth.


N, D = 2, 32


def covariance(vectors: np.ndarray) -> np.ndarray:
    return (vectors.swapaxes(-1, -2) @ vectors / vectors.shape[-2]).astype(np.float32)


def vectors(tokens: int, seed: int = 0) -> np.ndarray:
    scale = np.geomspace(4, 0.25, D)
    return np.random.default_rng(seed).standard_normal((N, tokens, D)) * scale


@pytest.mark.parametrize("tokens", [D // 2, 4 * D, 16384])
def test_it_weighs_as_much_as_a_token_for_each_coordinate(tokens: int) -> None:
    given = covariance(vectors(tokens))
    found = with_prior(given, tokens)
    mean = np.trace(given, axis1=1, axis2=2)[:, None, None] / D
    wanted = (tokens * given + D * mean * np.eye(D)) / (tokens + D)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.trace(found, axis1=1, axis2=2), np.trace(given, axis1=1, axis2=2), rtol=1e-6
    )


def test_padding_stays_zero() -> None:
    given = vectors(500)
    given[..., D // 2 :] = 0
    found = with_prior(covariance(given), 500)
    assert not found[:, D // 2 :].any()
    assert not found[..., D // 2 :].any()
    assert (np.diagonal(found, axis1=1, axis2=2)[:, : D // 2] > 0).all()
    assert not with_prior(np.zeros((N, D, D)), 500).any()
