"""``prod`` estimates inner products without bias, which ``lloyd_max`` of few bits does not.

Statistics over seeds, of the rotation and of the projection, which are independent of each other.
Each seed gives one number, its mean over many pairs of vectors, so that samples are independent;
bounds are in standard errors of those samples: a number of a right codec is beyond 4.5 of them
once in 150,000 times. Seeds are fixed, so that what passes once passes always.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.theory import plain_error, sketch_factor
from tests.codec.vectors import PRODS, unit_vectors
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation, make_sketch, rotation_of
from tq_onnx.codec.spec import Codec

D = 64
SEEDS = 300
CONFIDENCE = 4.5
COSINE = 0.6
"""Between the vectors of a pair; a bias that shrinks inner products shows in large ones."""

X = unit_vectors(40, D, seed=11)
_OTHER = unit_vectors(40, D, seed=12)
_ORTHOGONAL = _OTHER - np.sum(_OTHER * X, -1, keepdims=True) * X
Y = COSINE * X + 0.8 * _ORTHOGONAL / np.linalg.norm(_ORTHOGONAL, axis=-1, keepdims=True)


def estimates(codec: Codec, rotation: np.ndarray, *, norm_correction: bool = False) -> np.ndarray:
    """<y, x'> of every pair."""
    book = codebook_of(codec, D)
    rows = reference.encode(X, codec, rotation, book, norm_correction)
    return np.asarray(np.sum(Y * reference.decode(rows, codec, rotation, book), -1))


def bias(samples: np.ndarray) -> tuple[float, float]:
    """Relative bias of samples ``[seeds, pairs]`` of COSINE, and its standard error."""
    means = samples.mean(axis=-1) / COSINE - 1
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def over_seeds(codec: Codec, seeds: int = SEEDS, *, norm_correction: bool = False) -> np.ndarray:
    """Estimates ``[seeds, pairs]``."""
    turns = (rotation_of(codec, QR, D, 0, seed) for seed in range(seeds))
    return np.stack([estimates(codec, turn, norm_correction=norm_correction) for turn in turns])


@pytest.mark.parametrize("norm_correction", [False, True])
@pytest.mark.parametrize("codec", PRODS, ids=str)
def test_prod_is_unbiased_over_seeds(codec: Codec, norm_correction: bool) -> None:
    # Whatever the scale is, the residual is that of what it decodes to.
    found, error = bias(over_seeds(codec, norm_correction=norm_correction))
    assert error < 0.003  # of less than a third of a per cent, or the test would say nothing
    assert abs(found) < CONFIDENCE * error


@pytest.mark.parametrize("codec", PRODS, ids=str)
def test_prod_is_unbiased_over_projections_alone(codec: Codec) -> None:
    # For every single vector, not only on average over vectors: the residual of one rotation is
    # fixed, and the signs of the projection alone make up for it.
    turn = make_rotation(QR, D, 0)
    samples = np.stack(
        [
            estimates(codec, np.concatenate([turn, make_sketch(D, 0, seed).T], axis=1))
            for seed in range(SEEDS)
        ]
    )
    errors = samples.std(axis=0, ddof=1) / np.sqrt(SEEDS)
    z = (samples.mean(axis=0) - np.sum(X * Y, -1)) / errors
    assert np.abs(z).max() < CONFIDENCE
    assert np.abs(z).mean() < 1.5  # of normal numbers: 0.8
    # By Grothendieck's identity the variance of <y, r'> is pi/2 |r|^2 |y|^2 / d but for the part
    # along r; over vectors it is what the paper's bound is made of.
    coarse = plain_error(codec.index_bits, D)
    assert samples.var(axis=0, ddof=1).mean() == pytest.approx(np.pi / 2 * coarse / D, rel=0.1)


@pytest.mark.parametrize("bits", [2, 3])
def test_lloyd_max_is_biased(bits: int) -> None:
    # Centroids are conditional means: <y, x'> is short by the quantiser's error, 11.5 % at 2 bits.
    found, error = bias(over_seeds(Codec(LLOYD_MAX, bits)))
    assert found < -10 * error
    assert found == pytest.approx(-plain_error(bits, D), abs=CONFIDENCE * error + 1e-3)


def test_a_wrong_projection_would_be_noticed() -> None:
    # Read with another projection than the one that made the signs, prod is as biased as its
    # lloyd_max part.
    codec, book = PRODS[0], codebook_of(PRODS[0], D)
    samples = []
    for seed in range(SEEDS // 3):
        written, read = (rotation_of(codec, QR, D, 0, s) for s in (seed, seed + 10_000))
        read = np.concatenate([written[:, :D], read[:, D:]], axis=1)
        rows = reference.encode(X, codec, written, book, False)
        samples.append(np.sum(Y * reference.decode(rows, codec, read, book), -1))
    found, error = bias(np.stack(samples))
    assert found == pytest.approx(-plain_error(2, D), abs=CONFIDENCE * error)
    assert abs(found) > CONFIDENCE * error


@pytest.mark.parametrize("codec", PRODS, ids=str)
def test_unbiased_is_not_better(codec: Codec) -> None:
    # What the sources leave out: at equal bits the unbiased estimate is the noisier one. For pairs
    # as far apart as queries and keys are (cosine near 0), and even at a cosine of 0.6.
    own = np.mean((over_seeds(codec, 60) - COSINE) ** 2)
    plain = np.mean((over_seeds(Codec(LLOYD_MAX, codec.bits), 60) - COSINE) ** 2)
    assert own > 1.5 * plain
    assert own == pytest.approx(
        (sketch_factor(D) + 1 / D) * plain_error(codec.index_bits, D) / D, rel=0.15
    )
