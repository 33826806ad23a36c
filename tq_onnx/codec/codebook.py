"""Lloyd-Max codebooks for one coordinate of a random unit vector.

Input: bits b and head size d. Output: L = 2^b centroids and L - 1 boundaries, float32, ready to be
baked as initializers: antisymmetric to the bit, the middle boundary exactly 0.

The design density is N(0, 1/d) for d >= 64 and, for smaller d, the exact law of a coordinate of a
uniformly random unit vector (TurboQuant paper, Lemma 1):

    f(x) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) (1 - x^2)^((d-3)/2)   on [-1, 1]

Both have closed forms for the probability and the first moment of an interval, so that the
fixed-point iteration (Lloyd 1982, Max 1960) needs no quadrature and no scipy.

Centroids are then made integer multiples of a step, so that integer dot products have a table
without error, and boundaries are midway between these:

    centroids[i] = k_i step,    boundaries[i] = (k_i + k_(i+1)) / 2 step

``tq_onnx.codec.integers`` has the k_i and how they were found. The step is that of the least
squared error of the design density. From 64 coordinates on that adds 0.0001, 0.04, 0.22 and 0.58 %
to the error of Lloyd-Max at 2, 3, 4 and 5 bits, and nothing at 1 bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.integers import chosen_integers
from tq_onnx.codec.spec import CODECS, Codec, expect_head_size

GAUSSIAN_FROM_HEAD_SIZE: Final = 64
"""From this head size on the Gaussian stands in for the exact law."""

MAX_INDEX_BITS: Final = max(codec.index_bits for codec in CODECS)


_HALVINGS: Final = 60
"""Of an interval that has the best step: until a float64 has no more digits."""

_FARTHEST: Final = 4.0
"""Standard deviations that no largest centroid reaches."""


_SIGNED_STEPS: Final = {3: 0.585, 4: 0.33}
"""Standard deviations that a step of ``uniform_signed`` is, by bits."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """A scalar quantiser."""

    #: float32 ``[L]``, rising; ``centroids[i] == -centroids[L - 1 - i]`` to the bit
    centroids: npt.NDArray[np.float32]
    #: float32 ``[L - 1]``, rising; a value equal to a boundary belongs above it
    boundaries: npt.NDArray[np.float32]
    #: expected squared error of a unit vector (d times that of one coordinate) under the design
    #: density, without norm correction
    mse: float
    #: what every centroid is an integer multiple of, rounded to float32 once, the multiples being
    #: within +-127; a float32 number. None where the centroids are no such multiples.
    step: float | None = None


class _Law(Protocol):
    """A symmetric density: what the iteration needs to know of it."""

    @property
    def deviation(self) -> float:
        """Standard deviation."""

    @property
    def end(self) -> float:
        """Upper end of the support."""

    def probability(self, low: float, high: float) -> float:
        """Return the probability of ``[low, high]``, 0 <= low."""

    def moment(self, low: float, high: float) -> float:
        """Return the integral of x f(x) over ``[low, high]``, 0 <= low."""


@dataclass(frozen=True)
class _Gaussian:
    """N(0, 1/d), worked out in units of its standard deviation."""

    head_size: int
    end: float = math.inf

    @property
    def deviation(self) -> float:
        return 1 / math.sqrt(self.head_size)

    def probability(self, low: float, high: float) -> float:
        root = math.sqrt(self.head_size / 2)
        # erfc keeps the digits of the tail that a difference of erf would lose.
        return 0.5 * (math.erfc(low * root) - math.erfc(high * root))

    def moment(self, low: float, high: float) -> float:
        return self._tail_moment(low) - self._tail_moment(high)

    def _tail_moment(self, x: float) -> float:
        return math.exp(-0.5 * self.head_size * x * x) / math.sqrt(2 * math.pi * self.head_size)


@dataclass(frozen=True)
class _UnitSphere:
    """One coordinate of a uniformly random unit vector in d dimensions."""

    head_size: int
    end: float = 1.0

    @property
    def deviation(self) -> float:
        return 1 / math.sqrt(self.head_size)

    @property
    def _density_at_zero(self) -> float:
        d = self.head_size
        return math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)

    def probability(self, low: float, high: float) -> float:
        return self._density_at_zero * (self._cosine_power(high) - self._cosine_power(low))

    def _cosine_power(self, x: float) -> float:
        """Return the integral of cos^(d-2) from 0 to asin(x), which x = sin(a) turns f into.

        n I_n = cos^(n-1) sin + (n-1) I_(n-2): for x >= 0 a sum of positive terms, hence stable.
        """
        sine, cosine = x, math.sqrt(1 - x * x)
        even = self.head_size % 2 == 0
        integral = math.asin(x) if even else sine
        for n in range(2 if even else 3, self.head_size - 1, 2):
            integral = (cosine ** (n - 1) * sine + (n - 1) * integral) / n
        return integral

    def moment(self, low: float, high: float) -> float:
        d = self.head_size
        tails = (1 - low * low) ** ((d - 1) / 2) - (1 - high * high) ** ((d - 1) / 2)
        return float(self._density_at_zero * tails / (d - 1))


def codebook_of(codec: Codec, head_size: int) -> Codebook:
    """Return the codebook of a codec; see ``lloyd_max`` and ``uniform_signed``.

    Raises:
        ValueError: the codec has none, or there is no such head size.
    """
    if not codec.is_rotated:
        raise ValueError(f"{codec} has no codebook")
    if codec.is_signed:
        return uniform_signed(codec.bits, head_size)
    return lloyd_max(codec.index_bits, head_size)


@cache
def lloyd_max(bits: int, head_size: int) -> Codebook:
    """Return the codebook of so many bits for one head size; cached, read-only.

    Raises:
        ValueError: there is no codebook of so many bits, or no such head size.
    """
    if not 1 <= bits <= MAX_INDEX_BITS:
        raise ValueError(f"there is no codebook of {bits} bits, only of 1 to {MAX_INDEX_BITS}")
    expect_head_size(head_size)
    law = _law(head_size)
    integers = chosen_integers(bits, head_size)
    step = float(np.float32(_best_step(law, integers)))
    levels = [k * step for k in integers]
    return _codebook(law, head_size, levels, step)


def _law(head_size: int) -> _Law:
    return (_Gaussian if head_size >= GAUSSIAN_FROM_HEAD_SIZE else _UnitSphere)(head_size)


def _codebook(law: _Law, head_size: int, levels: list[float], step: float | None) -> Codebook:
    """Return the codebook of the nearest of these levels, which are the positive ones."""
    edges, upper = _edges(law, levels), np.array(levels, np.float32)
    inner = edges[1:-1]
    centroids = np.concatenate([-upper[::-1], upper])
    boundaries = np.array([-t for t in reversed(inner)] + [0.0] + inner, np.float32)
    centroids.setflags(write=False)
    boundaries.setflags(write=False)
    return Codebook(centroids, boundaries, head_size * _error(law, edges, upper.tolist()), step)


@cache
def uniform_signed(bits: int, head_size: int) -> Codebook:
    """Return the codebook of ``uniform_signed``: -2^(bits - 1) .. 2^(bits - 1) - 1 times a step.

    The step is the one in the middle of those that an encoder tries: that of the least error of
    random unit vectors of 128 coordinates with five of them and both signs.

    Raises:
        KeyError: there is no codebook of so many bits.
        ValueError: there is no such head size.
    """
    expect_head_size(head_size)
    law = _law(head_size)
    step = float(np.float32(_SIGNED_STEPS[bits] * law.deviation))
    half = 1 << (bits - 1)
    centroids = (np.arange(-half, half) * step).astype(np.float32)
    boundaries = ((np.arange(-half, half - 1) + 0.5) * step).astype(np.float32)
    centroids.setflags(write=False)
    boundaries.setflags(write=False)
    sides = ([float(c) for c in side] for side in (-centroids[:half][::-1], centroids[half + 1 :]))
    errors = (_error(law, [step / 2, *_edges(law, side)[1:]], side) for side in sides)
    mse = head_size * sum(errors) / 2
    return Codebook(centroids, boundaries, mse, step)


def _best_step(law: _Law, integers: tuple[int, ...]) -> float:
    """Return the step of the least error of the quantiser with levels k_i step.

    There the derivative of the error, 2 sum_i k_i (k_i step p_i - m_i), is zero; p_i and m_i are
    probability and moment of the cells, whose edges add nothing to it.
    """
    low, high = 0.0, min(law.end, _FARTHEST * law.deviation) / integers[-1]
    for _ in range(_HALVINGS):
        step = (low + high) / 2
        cells = pairwise(_edges(law, [k * step for k in integers]))
        slope = sum(
            k * (k * step * law.probability(*cell) - law.moment(*cell))
            for k, cell in zip(integers, cells, strict=True)
        )
        low, high = (step, high) if slope < 0 else (low, step)
    return low


def _error(law: _Law, edges: list[float], upper: list[float]) -> float:
    """Return E[(x - q)^2] = E[x^2] - 2 E[x q] + E[q^2] of one coordinate, for positive levels q."""
    return law.deviation**2 + 2 * sum(
        level * (law.probability(low, high) * level - 2 * law.moment(low, high))
        for (low, high), level in zip(pairwise(edges), upper, strict=True)
    )


def _edges(law: _Law, upper: list[float]) -> list[float]:
    middles = [(low + high) / 2 for low, high in pairwise(upper)]
    return [0.0, *middles, law.end]
