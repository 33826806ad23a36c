"""Errors that theory predicts, integrated with scipy; from the codec come the codebooks alone.

The law is that of one coordinate of a random unit vector in d dimensions, a beta law on [-1, 1].
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from scipy import integrate, special, stats

from tq_onnx.codec import codebook
from tq_onnx.codec.codebook import Codebook, lloyd_max

CONVERGED = 1e-12
"""Moves of a centroid below this many standard deviations may be rounding noise."""


def converge(law: codebook._Law, count: int) -> list[float]:
    """Return the positive centroids of the best symmetric quantiser of ``2 * count`` levels."""
    spacing = 3 * law.deviation / count
    centroids = [(index + 0.5) * spacing for index in range(count)]
    previous = np.inf
    while True:
        edges = codebook._edges(law, centroids)
        moved = [
            law.moment(low, high) / law.probability(low, high) for low, high in pairwise(edges)
        ]
        step = max(abs(new - old) for new, old in zip(moved, centroids, strict=True))
        centroids = moved
        # Convergence is linear, so a small step alone says little; one that has stopped shrinking
        # says that only rounding is left.
        if previous <= step < CONVERGED * law.deviation or step == 0:
            return centroids
        previous = step


def unrounded(bits: int, head_size: int) -> Codebook:
    """The codebook of Lloyd and Max itself, whose centroids are no integers."""
    law = codebook._law(head_size)
    return codebook._codebook(law, head_size, converge(law, 1 << (bits - 1)), None)


def unit_coordinate(head_size: int) -> stats.rv_continuous:
    shape = (head_size - 1) / 2
    return stats.beta(shape, shape, loc=-1, scale=2)


def error_under(law: stats.rv_continuous, book: Codebook, head_size: int) -> float:
    """d * E[(x - q(x))^2] by quadrature."""
    lowest, highest = law.support()
    edges = [max(lowest, -1.0), *book.boundaries.tolist(), min(highest, 1.0)]
    return head_size * sum(
        integrate.fixed_quad(lambda x, c=c: (x - c) ** 2 * law.pdf(x), low, high, n=60)[0]
        for (low, high), c in zip(pairwise(edges), book.centroids.tolist(), strict=True)
    )


@cache
def plain_error(bits: int, head_size: int, *, exact: bool = False) -> float:
    """E ||y - c[y]||^2 of a random unit vector y: d times the integral over one coordinate."""
    book = unrounded(bits, head_size) if exact else lloyd_max(bits, head_size)
    return error_under(unit_coordinate(head_size), book, head_size)


@cache
def corrected_error(bits: int, head_size: int, *, exact: bool = False) -> float:
    """E ||y - yhat / ||yhat|| ||^2 = 2 - 2 E[A / sqrt(B)], A = <y, yhat>, B = ||yhat||^2.

    Both are sums over coordinates that depend on each other a little, as the law of one given
    another is that of d - 1 dimensions on a smaller sphere. With means a and b, to second order,

        E[A / sqrt(B)] = a / sqrt(b) (1 - cov(A, B) / (2 a b) + 3 var(B) / (8 b^2))

    whose next terms are of the order of 1/d^2.
    """
    d = head_size
    book = unrounded(bits, d) if exact else lloyd_max(bits, d)
    centroids = book.centroids.astype(float)
    edges = np.array([-1.0, *book.boundaries.tolist(), 1.0])
    points, weights = special.roots_legendre(60)
    # Nodes in every cell; the outer cells end where the density is gone.
    ends = np.clip(edges, -14 / np.sqrt(d), 14 / np.sqrt(d)).clip(-1, 1)
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    y = (middle[:, None] + half[:, None] * points).ravel()
    mass = (half[:, None] * weights).ravel() * unit_coordinate(d).pdf(y)
    q = np.repeat(centroids, len(points))

    def given(sign_law: stats.rv_continuous, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E[y2 c[y2]] and E[c[y2]^2] for a second coordinate that is ``radius`` times the law."""
        cut = np.clip(edges / radius[:, None], -1, 1)
        probability = np.diff(sign_law.cdf(cut), axis=-1)
        # x f(x) of the beta law integrates in closed form: the density is a power of 1 - x^2.
        n = d - 1
        top = np.exp(special.gammaln(n / 2) - special.gammaln((n - 1) / 2)) / np.sqrt(np.pi)
        moment = -np.diff((1 - cut**2) ** ((n - 1) / 2), axis=-1) * top / (n - 1)
        return (radius[:, None] * moment) @ centroids, probability @ centroids**2

    pair_a, pair_b = given(unit_coordinate(d - 1), np.sqrt(1 - y**2))
    f_a, f_b = y * q, q**2
    a, b = d * mass @ f_a, d * mass @ f_b

    def covariance(f: np.ndarray, g: np.ndarray, pair: np.ndarray, means: float) -> float:
        return float(d * mass @ (f * g) + d * (d - 1) * mass @ (f * pair) - means)

    cov_ab = covariance(f_b, f_a, pair_a, a * b)
    var_b = covariance(f_b, f_b, pair_b, b * b)
    cosine = a / np.sqrt(b) * (1 - cov_ab / (2 * a * b) + 3 * var_b / (8 * b * b))
    return float(2 - 2 * cosine)


def sketch_factor(head_size: int) -> float:
    """What the signs of a square Gaussian projection leave of a residual's energy.

    r' = sqrt(pi/2)/d ||r|| S^T sign(S r) is r on average, and ||S^T sign(S r)||^2 is d^2 from each
    row with itself and d (d - 1) 2/pi from rows with each other: E||r - r'||^2 = pi/2 - 1/d.
    """
    return np.pi / 2 - 1 / head_size
