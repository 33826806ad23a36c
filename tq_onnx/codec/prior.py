"""What few tokens tell of a covariance, and what stands in for the rest.

Matrices of error feedback are made for the directions that a text shows. A text of one paragraph
shows fewer directions than a head has, or each of them only once; in the others a covariance is
zero, and nothing would hold back errors that queries of another text see. So a covariance C
``[D, D]`` of n tokens is taken as if some more had been read whose energy is the same in every
direction:

    C' = (n C + D (tr(C) / D) I) / (n + D)

the mean of the posterior under an inverse Wishart prior whose mean is (tr(C) / D) I and which
weighs as much as D tokens. 16,000 tokens outweigh it; it decides where there are few, or the same
ones again and again. Coordinates that are zero in every token stay zero: they are padding.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_NOISE: Final = 1e-5
"""Of the largest: what float32 leaves of an eigenvalue, or of an energy, that is zero."""

Float64 = npt.NDArray[np.float64]
Covariance = npt.NDArray[np.floating[Any]]


def with_prior(covariance: Covariance, tokens: int) -> Float64:
    """Return covariances as they would be if tokens of no direction had been read, too.

    Args:
        covariance: of the vectors of some tokens, ``[N, D, D]``.

    Returns:
        float64 ``[N, D, D]``.
    """
    wide = np.asarray(covariance, np.float64)
    live = _live(wide)
    size = np.maximum(live.sum(axis=-1), 1)
    mean = np.trace(wide, axis1=-2, axis2=-1) / size
    isotropic = mean[:, None, None] * live[:, :, None] * np.eye(wide.shape[-1])
    weight = (size / (size + tokens))[:, None, None]
    shrunk: Float64 = (1 - weight) * wide + weight * isotropic
    return shrunk


def _live(covariance: Float64) -> npt.NDArray[np.bool_]:
    return _above_noise(np.diagonal(covariance, axis1=-2, axis2=-1))


def _above_noise(values: Float64) -> npt.NDArray[np.bool_]:
    above: npt.NDArray[np.bool_] = values > _NOISE * values.max(axis=-1, keepdims=True)
    return above
