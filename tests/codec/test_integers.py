"""Codebooks of integers: a search of its own, what they cost, and what kernels find in them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from tests.codec.theory import unrounded
from tq_onnx.codec.codebook import codebook_of, lloyd_max
from tq_onnx.codec.integers import (
    LARGEST_INTEGER,
    LARGEST_SMALL_INTEGER,
    SMALL_BITS,
    chosen_integers,
    kernel_integers,
)
from tq_onnx.codec.presets import PRESETS

SMALL_SIZES = (8, 16, 24, 32, 40, 48, 56)
SIZES = (*SMALL_SIZES, 64, 80, 128, 256)
ALL_BITS = (1, 2, 3, 4, 5)
STEPS_PER_INTEGER = 32
SAME_ERROR = 1e-5
HALVINGS = 40

COST = {1: 0.0, 2: 6e-7, 3: 3.94e-4, 4: 2.211e-3, 5: 5.791e-3}
"""What integers add to the error of Lloyd-Max, of it."""


class Law:
    """Probability and first moment up to a point, of arrays of points >= 0."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size
        self.end = np.inf if head_size >= 64 else 1.0
        self.power = (head_size - 1) / 2
        logarithm = special.gammaln(head_size / 2) - special.gammaln(self.power)
        self.density = np.exp(logarithm) / np.sqrt(np.pi)

    def probability(self, x: np.ndarray) -> np.ndarray:
        if self.end > 1:
            return np.asarray(special.ndtr(x * np.sqrt(self.head_size)))
        return np.asarray(special.betainc(self.power, self.power, (1 + x) / 2))

    def moment(self, x: np.ndarray) -> np.ndarray:
        if self.end > 1:
            scale = np.sqrt(2 * np.pi * self.head_size)
            return np.asarray(-np.exp(-0.5 * self.head_size * x * x) / scale)
        return -self.density * np.maximum(1 - x * x, 0) ** self.power / (self.head_size - 1)

    def cells(self, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities and moments ``[n, L / 2]`` of quantisers with these positive levels."""
        middles = (upper[:, 1:] + upper[:, :-1]) / 2
        ends = np.zeros((len(upper), 1)), np.full((len(upper), 1), self.end)
        edges = np.concatenate([ends[0], middles, ends[1]], axis=1)
        return np.diff(self.probability(edges)), np.diff(self.moment(edges))


def search(bits: int, head_size: int, most: int) -> tuple[int, ...]:
    """All roundings of Lloyd-Max to multiples of a step up to ``most``, each with its best step."""
    law = Law(head_size)
    optimum = unrounded(bits, head_size)
    levels = optimum.centroids[1 << (bits - 1) :].astype(np.float64)
    tops = np.arange(len(levels) - 0.5, most + 0.5, 1 / STEPS_PER_INTEGER)
    books = np.unique(np.rint(levels * (tops[:, None] / levels[-1])), axis=0)
    books = books[(books[:, 0] > 0) & (np.diff(books) > 0).all(axis=1) & (books[:, -1] <= most)]
    low, high = (share * levels[-1] / books[:, -1] for share in (0.8, 1.2))
    for _ in range(HALVINGS):
        steps = (low + high) / 2
        mass, moment = law.cells(books * steps[:, None])
        is_below = (books * moment).sum(axis=1) > steps * (books**2 * mass).sum(axis=1)
        low, high = np.where(is_below, steps, low), np.where(is_below, high, steps)
    mass, _ = law.cells(books * steps[:, None])
    costs = (1 - 2 * head_size * steps**2 * (books**2 * mass).sum(axis=1)) / optimum.mse
    best = books[costs <= costs.min() + SAME_ERROR]
    return tuple(best[best[:, -1].argmin()].astype(int).tolist())


@pytest.mark.parametrize(
    ("bits", "head_size"),
    # At 5 bits a small size takes seconds: the smallest stands for them.
    [(bits, size) for bits in (1, 2, 3, 4) for size in (*SMALL_SIZES, 64)] + [(5, 8), (5, 64)],
)
def test_a_search_finds_the_same_integers(bits: int, head_size: int) -> None:
    most = LARGEST_SMALL_INTEGER if bits <= SMALL_BITS else LARGEST_INTEGER
    assert search(bits, head_size, most) == chosen_integers(bits, head_size)


@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_centroids_are_multiples_of_a_step(bits: int, head_size: int) -> None:
    book, upper = lloyd_max(bits, head_size), np.array(chosen_integers(bits, head_size))
    integers = np.concatenate([-upper[::-1], upper])
    assert book.step is not None
    assert book.step == float(np.float32(book.step))
    # Each is such a product, rounded once, and boundaries are midway ...
    assert np.array_equal(book.centroids, (integers * book.step).astype(np.float32))
    middles = ((integers[1:] + integers[:-1]) / 2 * book.step).astype(np.float32)
    assert np.array_equal(book.boundaries, middles)
    # ... and who has the centroids alone finds the integers; of one bit those of two levels.
    found, unit = kernel_integers(book.centroids) or ((), 0.0)
    factor = 2 if bits == 1 else 1
    assert np.array_equal(found, factor * integers)
    assert factor * unit == pytest.approx(book.step, rel=1e-7)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_what_integers_cost(bits: int, head_size: int) -> None:
    optimum, book = unrounded(bits, head_size), lloyd_max(bits, head_size)
    assert book.mse / optimum.mse - 1 == pytest.approx(COST[bits], rel=5e-3, abs=1e-7)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_no_other_step_is_better(bits: int) -> None:
    law, levels = Law(24), np.array(chosen_integers(bits, 24))
    book = lloyd_max(bits, 24)
    assert book.step is not None
    upper = levels * np.array([0.999, 1, 1.001])[:, None] * book.step
    mass, moment = law.cells(upper)
    errors = 1 + 24 * 2 * (upper * (upper * mass - 2 * moment)).sum(axis=1)
    assert errors.argmin() == 1
    assert errors[1] == pytest.approx(book.mse, rel=1e-6)


def test_unrounded_centroids_are_no_multiples() -> None:
    # The negative twin: kernels multiply them, and of 32 levels the nearest integers.
    assert unrounded(4, 128).step is None
    assert kernel_integers(unrounded(4, 128).centroids) is None
    assert kernel_integers(np.zeros(16, np.float32)) is None
    assert kernel_integers(np.full(16, np.nan, np.float32)) is None


@pytest.mark.parametrize("head_size", [8, 40, 64, 128])
def test_kernels_multiply_the_nearest_integers_of_32_levels(head_size: int) -> None:
    book = unrounded(5, head_size)
    assert book.step is None
    integers, unit = kernel_integers(book.centroids) or (np.zeros(32, int), 1.0)
    assert 112 <= integers[-1] <= LARGEST_INTEGER
    assert np.abs(integers * unit - book.centroids).max() <= unit / 2
    if head_size >= 64:
        assert integers[-1] == 118
    # Neighbours that are too close stay as they are.
    assert kernel_integers(np.linspace(-1, 1, 32, dtype=np.float32) ** 3) is None


def test_presets_have_small_integers() -> None:
    """Every preset, at the head sizes of models."""
    for preset in PRESETS.values():
        for codec in (preset.key, preset.value):
            if not codec.is_rotated:
                continue
            for size in (64, 80, 96, 128, 256):
                centroids = codebook_of(codec, size).centroids
                found, _ = kernel_integers(centroids) or (np.array([1000]), 0.0)
                is_small = codec.index_bits <= SMALL_BITS
                limit = LARGEST_SMALL_INTEGER if is_small else LARGEST_INTEGER
                assert found.max() <= limit, (codec, size)
