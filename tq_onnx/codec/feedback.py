"""Error feedback for keys: the effect of errors of a key on scores, as a matrix.

A score loses <q, e> by the error e of a key, so that what an error costs is e H e^T, with H the
second moment of the queries in the space that the keys are quantised in:

    H = E[q'^T q'] / mean of its diagonal + 0.01 I = L diag(h) L^T,  L unit lower triangular

The coordinates of a key are then quantised from the last to the first, and each makes up for the
errors of those that are done (``tq_onnx.codec.search``): (e L)_j is the rounding error of step j
alone (as in GPTQ, Frantar et al. 2022). One matrix holds both factors, L below the diagonal and h
on it; what is above the diagonal is zero and not read.

An encoder takes each column of L below the diagonal in 127ths of its largest number, rounded in
float32, and H as that L and h make it. With the centroids of up to 4 bits, which are whole numbers
up to 127 times one, its sums are then whole numbers below 2^24 up to D = 512: exact in float32, in
any order, and sums of products of bytes where a processor has such. Measured on the queries and
keys of SmolLM2-135M, this changes e H e^T by less than 0.03 %.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.kind import Float32, Float64

DAMPING: Final = 0.01
"""Weight of all directions alike, next to a mean of 1: a text shows no query of every direction."""

STEPS: Final = 127
"""Steps of a column of L that its largest number is: with a sign, those of a byte."""


def feedback_of(
    covariance: npt.NDArray[np.floating],
    rotation: npt.NDArray[np.floating],
    scales: npt.NDArray[np.floating] | None = None,
) -> Float32:
    """Return the matrices that error feedback takes.

    Args:
        covariance: second moments of the queries of each KV head, ``[N, D, D]``.
        rotation: what turns queries as the keys are turned, ``[D, D]``.
        scales: what keys are divided by and queries multiplied with, ``[N, D]``; None for nothing.

    Returns:
        float32 ``[N, D, D]``; the identity for a head whose queries are all zero.

    Raises:
        ValueError: the moments are not finite, or are none of real queries.
    """
    turn = np.asarray(rotation, np.float64)
    moments = np.asarray(covariance, np.float64)
    if not np.isfinite(moments).all():
        raise ValueError("the covariance of the queries is not finite")
    if scales is not None:
        wide = np.asarray(scales, np.float64)
        moments = wide[:, :, None] * moments * wide[:, None, :]
    moments = turn.T @ moments @ turn
    moments = (moments + moments.swapaxes(-1, -2)) / 2
    size = moments.shape[-1]
    mean = np.trace(moments, axis1=-2, axis2=-1)[:, None, None] / size
    identity = np.eye(size)
    damped = np.where(mean > 0, moments / np.where(mean > 0, mean, 1), (1 - DAMPING) * identity)
    try:
        lower = np.linalg.cholesky(damped + DAMPING * identity)
    except np.linalg.LinAlgError as error:
        raise ValueError("the covariance of the queries is not that of any queries") from error
    diagonal = np.diagonal(lower, axis1=-2, axis2=-1)
    matrices: Float32 = np.tril(lower / diagonal[:, None, :], -1).astype(np.float32)
    index = np.arange(size)
    matrices[:, index, index] = diagonal**2
    return matrices


def factors(feedback: Float32) -> tuple[Float64, Float64]:
    """Return L ``[N, D, D]`` as an encoder takes it and h ``[N, D]`` of matrices ``[N, D, D]``."""
    below = np.tril(np.asarray(feedback, np.float32), -1)
    steps = np.abs(below).max(axis=-2, keepdims=True) / np.float32(STEPS)
    whole = np.divide(below, steps, out=np.zeros_like(below), where=steps > 0)
    rounded = np.clip(np.rint(whole), -STEPS, STEPS).astype(np.float64) * steps
    lower: Float64 = rounded + np.eye(below.shape[-1])
    return lower, np.diagonal(np.asarray(feedback, np.float64), axis1=-2, axis2=-1)
