"""Matrices that put the coordinates which decide a score, or an output, into the first class.

T ``[N, D, D]`` is what vectors are multiplied with before they are coded, P = T^-T what queries are
multiplied with, and outputs with P^T (``tq_onnx.codec.split``). They come from statistics of a
text, for each KV head:

    keys      T = diag(d) Perm blockdiag(R_1, R_2) S,  d_i = (E q_i^2 / Var k_i)^(1/4), coordinates
              in the order of falling Var(k_i) E q_i^2: what errors of a coordinate do to scores
    values    T = U blockdiag(R_1, R_2) S,  U the eigenvectors of the covariance, largest first
    R_1, R_2  rotations within the classes
    S         one number for each class, so that the scale of a usual row is stored as 128
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.feedback import feedback_of
from tq_onnx.codec.kind import Float32, Float64
from tq_onnx.codec.rotation import within_classes
from tq_onnx.codec.spec import Codec

_SMALLEST_SHARE: Final = 1e-6
"""Of the largest energy or variance: what float32 leaves of one that is zero."""


INVERSION: Final = 1e-4
"""Largest entry of ``T P^T - I``; both are rounded to float32, and their entries may be large."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of one cache.

    Attributes:
        encode: T, float32 ``[N, D, D]``.
        read: P, likewise.
    """

    encode: Float32
    read: Float32


def key_matrices(
    variances: Float64, energies: Float64, codec: Codec, *, layer: int, seed: int, kind: str
) -> Matrices:
    """Return the matrices of keys.

    Args:
        variances: of the keys about their offsets, ``[N, D]``.
        energies: squares of the queries that read a head, their mean, ``[N, D]``.
        codec: one with two classes.
        layer: index of the layer, which chooses rotations.
        seed: likewise.
        kind: likewise, see ``make_rotation``.
    """
    k, q = (_positive(each) for each in (variances, energies))
    order = np.argsort(-(k * q), axis=-1, kind="stable")
    factors = (q / k) ** 0.25
    permuted = np.eye(k.shape[-1])[order].swapaxes(-1, -2)
    # What is left of a coordinate: Var k_i d_i^2.
    energy = np.take_along_axis(k * factors**2, order, axis=-1)
    blocks, steps = _blocks(energy, codec, layer=layer, seed=seed, kind=kind)
    return Matrices(
        (factors[..., None] * (permuted @ blocks) * steps).astype(np.float32),
        (1 / factors[..., None] * (permuted @ blocks) / steps).astype(np.float32),
    )


def value_matrices(
    covariance: npt.NDArray[np.floating], codec: Codec, *, layer: int, seed: int, kind: str
) -> Matrices:
    """Return the matrices of values of a centered covariance ``[N, D, D]``; see ``key_matrices``.

    Raises:
        ValueError: the covariance is not finite.
    """
    wide = np.asarray(covariance, np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("the covariance of the values is not finite")
    found, vectors = np.linalg.eigh((wide + wide.swapaxes(-1, -2)) / 2)
    # The sign of an eigenvector is any: the largest entry is positive.
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=-2)[:, None], axis=-2)
    largest_first = (vectors * np.where(largest < 0, -1, 1))[..., ::-1]
    energy = _positive(found[..., ::-1])
    blocks, steps = _blocks(energy, codec, layer=layer, seed=seed, kind=kind)
    turned = largest_first @ blocks
    return Matrices((turned * steps).astype(np.float32), (turned / steps).astype(np.float32))


def class_feedback(
    covariance: npt.NDArray[np.floating],
    read: Float32,
    codec: Codec,
    scales: npt.NDArray[np.floating] | None = None,
) -> Float32:
    """Return the matrices of error feedback inside the classes of keys, block diagonal.

    Args:
        covariance: see ``feedback_of``.
        read: P of the keys, ``[N, D, D]``.
        codec: theirs.
        scales: see ``feedback_of``.

    Returns:
        float32 ``[N, D, D]``.
    """
    matrices = np.zeros(read.shape, np.float32)
    for own in codec.class_slices(read.shape[-1]):
        matrices[:, own, own] = feedback_of(covariance, read[..., own], scales)
    return matrices


def inversion_error(encode: Float32, read: Float32) -> float:
    """Return the largest entry of ``T P^T - I``; NaN where a matrix is not finite."""
    products = encode.astype(np.float64) @ read.astype(np.float64).swapaxes(-1, -2)
    return float(np.abs(products - np.eye(encode.shape[-1])).max())


def first_coordinates(encode: Float32, codec: Codec) -> npt.NDArray[np.bool_]:
    """Tell which coordinates of a head have a part in the first class: ``[N, D]``.

    Args:
        encode: T of keys or values.
        codec: theirs.
    """
    own = codec.class_slices(encode.shape[-1])[0]
    found: npt.NDArray[np.bool_] = (encode[..., own] != 0).any(axis=-1)
    return found


def _positive(numbers: Float64) -> Float64:
    """Return energies ``[N, D]`` without zeros, which are of dead coordinates."""
    wide = np.asarray(numbers, np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    least = np.where(largest > 0, _SMALLEST_SHARE * largest, 1)
    return np.maximum(wide, least)


def _blocks(
    energy: Float64, codec: Codec, *, layer: int, seed: int, kind: str
) -> tuple[Float64, Float64]:
    """Return blockdiag(R_1, R_2) ``[D, D]`` and the diagonal of S ``[N, 1, D]``.

    Args:
        energy: squares of the coordinates before R, ``[N, D]``.
        codec: one with two classes.
        layer: see ``make_rotation``.
        seed: likewise.
        kind: likewise.
    """
    heads, size = energy.shape
    blocks = within_classes(codec.class_sizes(size), kind, layer, seed).astype(np.float64)
    steps = np.ones((heads, 1, size))
    for own in codec.class_slices(size):
        steps[..., own] = energy[:, own].sum(axis=-1)[:, None, None] ** -0.5
    return blocks, steps
