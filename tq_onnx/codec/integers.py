"""The integers of codebooks: those that the converter chooses, and those that kernels find.

Kernels multiply codes as int8: a centroid is an integer k_i times a unit. On processors that add
products in 16 bits, small integers leave room in the sums (custom_ops/core/lane_sums.h).

``chosen_integers`` are those of the least squared error of a quantiser whose centroids are k_i step
and whose boundaries are midway between them, with the best step for each candidate, among all
roundings of the Lloyd-Max centroids to multiples of a step. The largest is at most 64 up to 4 bits,
which two sums in a lane allow, and at most 127 for 5 bits. Of those within 1e-5 of the least error
the smallest are taken. tests/codec/test_integers.py searches them anew.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

LARGEST_INTEGER: Final = 127
"""The largest int8 whose negative is one too."""

LARGEST_SMALL_INTEGER: Final = 64
"""Up to here kernels add two sums in a lane of 16 bits."""

SMALL_BITS: Final = 4
"""Up to so many bits of an index the largest integer is at most ``LARGEST_SMALL_INTEGER``."""

_CHOSEN: Final[dict[int, dict[int, tuple[int, ...]]]] = {
    2: {
        8: (5, 16),
        16: (11, 36),
        24: (7, 23),
        32: (10, 33),
        40: (10, 33),
        48: (13, 43),
        56: (13, 43),
        64: (3, 10),
    },
    3: {
        8: (5, 15, 26, 39),
        16: (7, 21, 37, 57),
        24: (7, 21, 37, 58),
        32: (7, 21, 37, 58),
        40: (7, 22, 39, 62),
        48: (7, 22, 39, 62),
        56: (7, 22, 39, 62),
        64: (7, 22, 39, 62),
    },
    4: {
        8: (3, 9, 15, 21, 28, 35, 43, 53),
        16: (3, 9, 15, 21, 28, 36, 45, 57),
        24: (3, 9, 15, 21, 28, 36, 45, 58),
        32: (3, 9, 15, 22, 29, 37, 47, 61),
        40: (3, 9, 15, 21, 28, 36, 46, 60),
        48: (3, 9, 15, 21, 28, 36, 46, 60),
        56: (3, 9, 15, 21, 28, 36, 46, 60),
        64: (3, 9, 15, 21, 28, 36, 46, 61),
    },
    5: {
        8: (3, 9, 15, 21, 27, 33, 39, 45, 52, 59, 66, 74, 82, 91, 101, 114),
        16: (3, 9, 15, 21, 27, 33, 39, 46, 53, 60, 68, 76, 85, 96, 109, 127),
        24: (2, 7, 12, 17, 22, 27, 32, 37, 43, 49, 55, 62, 70, 79, 90, 106),
        32: (2, 7, 12, 17, 22, 27, 32, 37, 43, 49, 56, 63, 71, 80, 92, 109),
        40: (2, 6, 10, 14, 18, 22, 26, 30, 35, 40, 45, 51, 58, 66, 76, 90),
        48: (2, 6, 10, 14, 18, 22, 26, 30, 35, 40, 45, 51, 58, 66, 76, 91),
        56: (2, 6, 10, 14, 18, 22, 26, 30, 35, 40, 45, 51, 58, 66, 76, 91),
        64: (2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97),
    },
}
"""By bits and head size; those of 64 hold for the normal distribution, that is from there on."""

_SAME: Final = 1e-6
"""Of the largest centroid: what float32 leaves of a product."""

_LEAST_GAP: Final = 1 / 28
"""The closest neighbours of a codebook that kernels round, in shares of its largest centroid."""

_ROUNDED_LEVELS: Final = 32
"""Of fewer levels kernels multiply no centroids as integers that are none."""


def chosen_integers(bits: int, head_size: int) -> tuple[int, ...]:
    """Return the positive integers ``[2^(bits - 1)]`` of the codebooks that conversions get."""
    if bits == 1:
        return (1,)
    return _CHOSEN[bits][min(head_size, max(_CHOSEN[bits]))]


def kernel_integers(
    centroids: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], float] | None:
    """Return what kernels multiply in place of centroids, as custom_ops/core/row_format.h finds it.

    These are the least integers that the centroids are multiples of a unit by. Centroids of 32
    levels that are no such multiples are rounded to those of a unit between their largest over 112
    and over 127, that of the least squared error, unless two are closer than a 28th of the largest.

    Returns:
        integers ``[L]`` within +-127 and their unit; None where kernels multiply the centroids.
    """
    exact = centroids.astype(np.float64)
    largest = np.abs(exact).max()
    if not (np.isfinite(largest) and largest > 0):
        return None
    for top in range(len(exact), LARGEST_INTEGER + 1):
        integers = np.rint(exact * (top / largest))
        if np.abs(integers * (largest / top) - exact).max() <= _SAME * largest:
            return integers.astype(np.int64), largest / top
    if len(exact) < _ROUNDED_LEVELS or np.diff(exact).min() < largest * _LEAST_GAP:
        return None
    units = largest / np.arange(LARGEST_INTEGER, LARGEST_INTEGER - 16, -1)
    books = np.rint(exact / units[:, None])
    best = np.square(books * units[:, None] - exact).sum(axis=1).argmin()
    return books[best].astype(np.int64), float(units[best])
