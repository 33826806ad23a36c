"""Code a vector with several gains, and keep the best codes.

With u a rotated unit vector, c_g the centroids that the codes of g u mean, and H the identity, or
what ``tq_onnx.codec.feedback`` says of the queries:

    codes of g     code_j = #{i : g a_j >= t_i},  a_j = u_j - sum over i > j of L_ij e_i,
                   e_i = c_i / g - u_i;  a = u where there is no feedback
    the best       the largest <u, c>^2 / <c, c> (0 where <u, c> is not positive), which is what is
                   left of the error after the best scale; ties go to the first gain
                   (``uniform_signed``: of either sign)
    scale          gamma <u, u> / <u, c>             unbiased: <u, x'> = <u, x>
                   gamma sqrt(<u, u> / <c, c>)       the norm is kept
                   gamma                             neither

with <a, b> = a H b^T. Where <u, c> is not positive the unbiased scale is 0: such codes say nothing.
Scales of ``uniform_signed`` have the sign of <u, c>, and are 0 only where that is.
The scale of the least squares, gamma <u, c> / <c, c>, is never used: it shortens every vector, and
attention with 3 bits is then worse than without any search.

Everything here is the plain formulas in float64. Kernels never make H: <u, c> and <c, c> are sums
of h_j (u L)_j (c L)_j and h_j (c L)_j^2, and (c L)_j = g ((u L)_j + c_j / g - a_j).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.feedback import factors
from tq_onnx.codec.kind import NORM_KEPT, UNBIASED, Codes, Float32, Float64

MAX_GAINS: Final = 16
"""Gains that an encoder can try: the lanes of the widest registers."""

_LOWEST_GAIN: Final = 0.7
_HIGHEST_GAIN: Final = 1.5


SIGNED_GAINS: Final = 10
"""Gains of presets with codes of either sign: five steps."""

_HIGHEST_SIGNED_GAIN: Final = 1.18
"""The largest gain of codes of either sign; the lowest is its inverse."""


def gain_table(count: int = MAX_GAINS, *, is_signed: bool = False) -> Float32:
    """Return gains in their order of preference: nearest to 1 first, the smaller of two.

    Args:
        count: how many, in equal ratios between 0.7 and 1.5; 1 is the gain 1.
        is_signed: whether scales may be negative: half as many between 1 / 1.18 and 1.18, each
            before its negative.

    Returns:
        float32 ``[count]``.

    Raises:
        ValueError: there is no table of so many.
    """
    if not 1 <= count <= MAX_GAINS:
        raise ValueError(f"there is no table of {count} gains, only of 1 to {MAX_GAINS}")
    if count == 1:
        return np.ones(1, np.float32)
    if is_signed and count % 2:
        raise ValueError(f"there is no table of {count} gains of both signs, only of even numbers")
    if is_signed:
        gains = _HIGHEST_SIGNED_GAIN ** np.linspace(-1, 1, count // 2)
        sorted_gains = sorted(gains, key=lambda g: (abs(g - 1), g))
        return np.array([sign * g for g in sorted_gains for sign in (1, -1)], np.float32)
    ratio = _HIGHEST_GAIN / _LOWEST_GAIN
    gains = _LOWEST_GAIN * ratio ** (np.arange(count) / (count - 1))
    ordered: Float32 = np.array(sorted(gains, key=lambda g: (abs(g - 1), g)), np.float32)
    return ordered


@dataclass(frozen=True, eq=False)
class Attempts:
    """What every gain makes of vectors."""

    codes: Codes  #: uint8 ``[G, ..., D]``
    #: the numbers that were compared with the boundaries, over the gain: ``[G, ..., D]``
    numbers: Float64
    worth: Float64  #: what the best is chosen by, ``[G, ...]``

    @property
    def chosen(self) -> npt.NDArray[np.intp]:
        """The gain of each vector, ``[...]``."""
        chosen: npt.NDArray[np.intp] = self.worth.argmax(axis=0)
        return chosen

    @property
    def best(self) -> Codes:
        """The codes that stay, ``[..., D]``."""
        index = self.chosen[None, ..., None]
        found: Codes = np.take_along_axis(self.codes, index, axis=0)[0]
        return found


class Search:
    """The encoder of one cache, with its tables in float64.

    Args:
        centroids: ``[L]``.
        boundaries: ``[L - 1]``.
        gains: ``[G]`` in the order of preference.
        feedback: matrices of error feedback ``[N, D, D]``, for vectors ``[..., N, T, D]``; None
            for none.
    """

    def __init__(
        self,
        centroids: npt.NDArray[np.floating],
        boundaries: npt.NDArray[np.floating],
        gains: npt.NDArray[np.floating],
        feedback: Float32 | None = None,
        *,
        is_signed: bool = False,
    ) -> None:
        self._is_signed = is_signed
        self.gains = np.asarray(gains, np.float64)
        self._centroids = np.asarray(centroids, np.float64)
        self._boundaries = np.asarray(boundaries, np.float64)
        self._lower: Float64 | None = None
        self._moments: Float64 | None = None
        if feedback is not None:
            self._lower, weights = factors(feedback)
            self._moments = (self._lower * weights[:, None, :]) @ self._lower.swapaxes(-1, -2)

    def attempts(self, y: Float64) -> Attempts:
        """Code rotated unit vectors ``[..., D]`` with every gain."""
        numbers, codes = zip(*(self._coded(y, gain) for gain in self.gains), strict=True)
        all_codes = np.stack(codes)
        return Attempts(all_codes, np.stack(numbers), self.worth(y, all_codes))

    def numbers_behind(self, y: Float64, codes: Codes) -> Float64:
        """Return the numbers, over the gain, that codes of someone else come from.

        Errors that are fed back are those of these very codes, so that each number depends on the
        vector and on codes, and on no other rounding.

        Args:
            y: ``[..., D]``.
            codes: ``[..., D]``.

        Returns:
            ``[G, ..., D]``, by the gain that the codes would have been made with.
        """
        if self._lower is None:
            return np.broadcast_to(y, (len(self.gains), *y.shape))
        strict = np.tril(self._lower, -1)
        quantised = self._centroids[codes]
        return np.stack([y - (quantised / gain - y) @ strict for gain in self.gains])

    def growth(self) -> Float64:
        """Return how much larger an error of the numbers is than one of the vectors: ``[..., D]``.

        Errors of the coordinates behind come in by L, each with a sign of its own.
        """
        if self._lower is None:
            return np.ones(1)
        grown: Float64 = np.sqrt((self._lower**2).sum(axis=-2))[:, None, :]
        return grown

    def worth(self, y: Float64, codes: Codes) -> Float64:
        """Return <u, c>^2 / <c, c> of codes ``[..., D]``; 0 where <u, c> is not positive.

        Where scales may be negative, so may <u, c>.
        """
        quantised = self._centroids[codes]
        product = self._product(y, quantised)
        if not self._is_signed:
            product = np.maximum(product, 0)
        square = self._product(quantised, quantised)
        worth: Float64 = np.where(square > 0, product**2 / np.where(square > 0, square, 1), 0)
        return worth

    def scale(self, y: Float64, codes: Codes, norm_correction: int) -> Float64:
        """Return the factor on the centroids of unit vectors: ``[...]``."""
        quantised = self._centroids[codes]
        own = np.ones(y.shape[:-1]) if self._moments is None else self._product(y, y)
        product = self._product(y, quantised)
        if norm_correction == UNBIASED:
            usable = product != 0 if self._is_signed else product > 0
            unbiased: Float64 = np.where(usable, own / np.where(usable, product, 1), 0)
            return unbiased
        sign = np.where(self._is_signed & (product < 0), -1.0, 1.0)
        if norm_correction == NORM_KEPT:
            square = self._product(quantised, quantised)
            kept: Float64 = sign * np.sqrt(own / np.where(square > 0, square, 1))
            return kept
        return sign

    def _coded(self, y: Float64, gain: float) -> tuple[Float64, Codes]:
        if self._lower is None:
            return y, self._codes(gain * y)
        size = y.shape[-1]
        numbers = np.empty_like(y)
        errors = np.zeros_like(y)
        codes = np.empty(y.shape, np.uint8)
        for j in reversed(range(size)):
            behind = self._lower[:, j + 1 :, j, None]
            numbers[..., j] = y[..., j] - (errors[..., j + 1 :] @ behind)[..., 0]
            codes[..., j] = self._codes(gain * numbers[..., j])
            errors[..., j] = self._centroids[codes[..., j]] / gain - y[..., j]
        return numbers, codes

    def _codes(self, numbers: Float64) -> Codes:
        return np.searchsorted(self._boundaries, numbers, side="right").astype(np.uint8)

    def _product(self, a: Float64, b: Float64) -> Float64:
        """Return a H b^T of vectors ``[..., D]``."""
        turned = a if self._moments is None else a @ self._moments
        product: Float64 = (turned * b).sum(axis=-1)
        return product
