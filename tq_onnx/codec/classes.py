"""Rows whose coordinates have classes: more bits where scores and outputs need them.

The oracle of a form of rows that no operator has yet. With x a vector of KV head n, T_n and P_n its
matrices ``[D, D]``, and n_1 + n_2 = D the sizes of the classes:

    y = (x / |x|) T_n,  y = (y_1, y_2),  u_k = y_k / |y_k|
    codes of u_k    as ``lloyd_max`` has them, with a codebook for n_k coordinates, gains, and for
                    keys error feedback inside the class (``tq_onnx.codec.search``)
    scale           s_k = |x| |y_k| <u_k, u_k> / <u_k, c_k>, unbiased, stored as a byte:
                    i = round(32 log2 s_k) + 128 within 1 .. 255, 0 for s_k = 0
    x'              = (s_1 c_1, s_2 c_2) P_n^T,  P_n = T_n^-T,  so that queries take P_n:
                    <q, x'> = <q P_n, (s_1 c_1, s_2 c_2)>, and outputs P_n^T

What the classes are is a matter of the matrices, which come from statistics:

    keys      T = diag(d) Perm blockdiag(R_1, R_2) S,  d_i = (E q_i^2 / Var k_i)^(1/4), coordinates
              in the order of falling Var(k_i) E q_i^2: what errors of a coordinate do to scores
    values    T = U blockdiag(R_1, R_2) S,  U the eigenvectors of the covariance, largest first
    S         one number per class, so that the scale of a usual row is stored as 128

A class is a plain row of its own: the planes of the first class, those of the second, then both
scales. A row of D = 128 has 38 or 42 bytes, one of D = 64 has 20 or 22. Scales that fall off the
grid are clamped, and ``Rows.clamped`` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.bitpack import pack, unpack
from tq_onnx.codec.codebook import Codebook, lloyd_max
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.codec.kind import UNBIASED, Codes, Float32, Float64, finite_rows
from tq_onnx.codec.rotated import LLOYD_MAX, rotate
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.search import Search, gain_table
from tq_onnx.codec.spec import HEAD_SIZE_MULTIPLE, Codec, RowLayout, row_layout

Bytes = npt.NDArray[np.uint8]

STEPS_PER_OCTAVE: Final = 32
"""Steps of a stored scale; 16 cost a tenth of the divergence that classes of keys have."""

USUAL_SCALE: Final = 128
"""The stored scale of 1: four octaves up and down are left."""

_LARGEST_SCALE: Final = 255
_SECOND_BITS: Final = 2
_EIGHTHS: Final = 8
_SMALLEST_SHARE: Final = 1e-6
"""Of the largest energy or variance: what float32 leaves of one that is zero."""


@dataclass(frozen=True)
class Classes:
    """How coordinates are shared out.

    Attributes:
        first_bits: bits of a code of the first class; those of the second have 2.
        eighths: how many of 8 coordinates are in the first class.
    """

    first_bits: int
    eighths: int

    def sizes(self, head_size: int) -> tuple[int, int]:
        """Return the coordinates of both classes, each a multiple of 8.

        Raises:
            ValueError: a class would have none.
        """
        units = head_size // HEAD_SIZE_MULTIPLE
        first = -(-units * self.eighths // _EIGHTHS) * HEAD_SIZE_MULTIPLE
        if head_size % HEAD_SIZE_MULTIPLE or not 0 < first < head_size:
            raise ValueError(
                f"a head size of {head_size} cannot be shared out: it is no multiple of "
                f"{HEAD_SIZE_MULTIPLE}, or leaves a class without coordinates"
            )
        return first, head_size - first

    def parts(self, head_size: int) -> tuple[Part, Part]:
        """Return both classes of rows of so many coordinates."""
        first, second = self.sizes(head_size)
        planes = row_layout(Codec(LLOYD_MAX, self.first_bits), first)
        behind = row_layout(Codec(LLOYD_MAX, _SECOND_BITS), second)
        return (
            Part(slice(0, first), planes, 0),
            Part(slice(first, head_size), behind, planes.code_bytes),
        )

    def row_bytes(self, head_size: int) -> int:
        """Return the bytes of a row: codes, and a byte per scale."""
        parts = self.parts(head_size)
        return sum(part.layout.code_bytes for part in parts) + len(parts)


@dataclass(frozen=True)
class Part:
    """A class of coordinates in a row.

    Attributes:
        coordinates: which they are.
        layout: of their codes; its scale is not stored.
        offset: the first byte of their planes.
    """

    coordinates: slice
    layout: RowLayout
    offset: int

    @property
    def codebook(self) -> Codebook:
        """The centroids and boundaries of the class."""
        return lloyd_max(self.layout.codec.bits, self.layout.head_size)

    @property
    def planes(self) -> slice:
        """The bytes of the codes."""
        return slice(self.offset, self.offset + self.layout.code_bytes)


KEYS_2_5: Final = Classes(4, 1)
KEYS_2_75: Final = Classes(4, 2)
VALUES_2_5: Final = Classes(3, 2)
VALUES_2_75: Final = Classes(3, 4)
"""The forms by the bits of a value at D = 64, scales included."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of one cache.

    Attributes:
        encode: T, what vectors are multiplied with before they are coded, float32 ``[N, D, D]``.
        read: P, what queries are multiplied with, and outputs with its transpose, likewise.
        order: for keys, the coordinates of a head by falling weight, int64 ``[N, D]``; the first
            ones have the bits. None for values, whose first class is no set of coordinates.
    """

    encode: Float32
    read: Float32
    order: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors in codes.

    Attributes:
        codes: uint8 ``[..., D]``.
        scales: stored scales of both classes, uint8 ``[..., 2]``.
        clamped: which of the scales lie off the grid, bool ``[..., 2]``.
    """

    codes: Codes
    scales: Bytes
    clamped: npt.NDArray[np.bool_]


def key_matrices(
    variances: Float64, energies: Float64, classes: Classes, *, layer: int, seed: int, kind: str
) -> Matrices:
    """Return the matrices of keys.

    Args:
        variances: of the keys about their offsets, ``[N, D]``.
        energies: squares of the queries that read a head, their mean, ``[N, D]``.
        classes: how coordinates are shared out.
        layer: index of the layer, which chooses rotations.
        seed: likewise.
        kind: likewise, see ``make_rotation``.
    """
    k, q = (_positive(each) for each in (variances, energies))
    order = np.argsort(-(k * q), axis=-1, kind="stable")
    factors = (q / k) ** 0.25
    size = k.shape[-1]
    permuted = np.eye(size)[order].swapaxes(-1, -2)
    # What is left of a coordinate: Var k_i d_i^2.
    energy = np.take_along_axis(k * factors**2, order, axis=-1)
    blocks, steps = _blocks(energy, classes, layer=layer, seed=seed, kind=kind)
    return Matrices(
        (factors[..., None] * (permuted @ blocks) * steps).astype(np.float32),
        (1 / factors[..., None] * (permuted @ blocks) / steps).astype(np.float32),
        order.astype(np.int64),
    )


def value_matrices(
    covariance: Float64, classes: Classes, *, layer: int, seed: int, kind: str
) -> Matrices:
    """Return the matrices of values of a centred covariance ``[N, D, D]``; see ``key_matrices``."""
    found, vectors = np.linalg.eigh(np.asarray(covariance, np.float64))
    largest_first = vectors[..., ::-1]
    energy = _positive(found[..., ::-1])
    blocks, steps = _blocks(energy, classes, layer=layer, seed=seed, kind=kind)
    turned = largest_first @ blocks
    return Matrices((turned * steps).astype(np.float32), (turned / steps).astype(np.float32))


def class_feedback(
    covariance: npt.NDArray[np.floating], matrices: Matrices, classes: Classes
) -> tuple[Float32, Float32]:
    """Return matrices of error feedback ``[N, n_k, n_k]`` of both classes of keys.

    Args:
        covariance: second moments of the queries of each KV head, ``[N, D, D]``.
        matrices: of the keys.
        classes: how coordinates are shared out.
    """
    size = matrices.read.shape[-1]
    first, second = (
        feedback_of(covariance, matrices.read[..., part.coordinates])
        for part in classes.parts(size)
    )
    return first, second


def quantise_classes(
    vectors: npt.NDArray[np.generic],
    classes: Classes,
    matrices: Matrices,
    *,
    gains: Float32 | None = None,
    feedback: tuple[Float32, Float32] | None = None,
) -> Rows:
    """Code vectors ``[..., N, T, D]``; rows with elements that are not finite as zeros.

    Args:
        vectors: floats.
        classes: how coordinates are shared out.
        matrices: of the cache.
        gains: the gains to try, float32 ``[G]``; None for all that there are.
        feedback: of both classes, see ``class_feedback``; None for none.
    """
    tried = gain_table() if gains is None else gains
    norms, turned = rotate(finite_rows(vectors), matrices.encode)
    codes, scales = [], []
    for index, part in enumerate(classes.parts(np.shape(vectors)[-1])):
        y = turned[..., part.coordinates]
        lengths = np.linalg.norm(y, axis=-1)
        unit = y / np.where(lengths > 0, lengths, 1)[..., None]
        book = part.codebook
        own = None if feedback is None else feedback[index]
        search = Search(book.centroids, book.boundaries, tried, own)
        best = search.attempts(unit).best
        codes.append(best)
        scales.append(norms * lengths * search.scale(unit, best, UNBIASED))
    exact = np.stack(scales, axis=-1)
    stored = _stored(exact)
    found = np.clip(stored, 1, _LARGEST_SCALE)
    found = np.where(exact > 0, found, 0)
    clamped = (exact > 0) & (stored != found)
    return Rows(np.concatenate(codes, axis=-1), found.astype(np.uint8), clamped)


def encode_classes(
    vectors: npt.NDArray[np.generic],
    classes: Classes,
    matrices: Matrices,
    *,
    gains: Float32 | None = None,
    feedback: tuple[Float32, Float32] | None = None,
) -> Bytes:
    """Return rows ``[..., N, T, W]`` of vectors; see ``quantise_classes``."""
    rows = quantise_classes(vectors, classes, matrices, gains=gains, feedback=feedback)
    packed = [
        pack(rows.codes[..., part.coordinates], part.layout)
        for part in classes.parts(np.shape(vectors)[-1])
    ]
    return np.concatenate([*packed, rows.scales], axis=-1)


def decode_classes(rows: Bytes, classes: Classes, matrices: Matrices) -> Float64:
    """Return what rows ``[..., N, T, W]`` mean: ``[..., N, T, D]``."""
    numbers = np.concatenate([*_numbers(rows, classes, matrices.read.shape[-1])], axis=-1)
    decoded: Float64 = numbers @ matrices.read.astype(np.float64).swapaxes(-1, -2)
    return decoded


def scale_of(stored: Bytes) -> Float64:
    """Return the scales that bytes stand for."""
    exponents = (stored.astype(np.float64) - USUAL_SCALE) / STEPS_PER_OCTAVE
    return np.where(stored > 0, np.exp2(exponents), 0.0)


def _numbers(rows: Bytes, classes: Classes, size: int) -> Iterator[Float64]:
    """Yield the coordinates of each class, scale included."""
    parts = classes.parts(size)
    end = classes.row_bytes(size)
    scales = scale_of(rows[..., end - len(parts) : end])
    for index, part in enumerate(parts):
        codes = unpack(rows[..., part.planes], part.layout)
        centroids = part.codebook.centroids.astype(np.float64)
        yield scales[..., index, None] * centroids[codes]


def _stored(scales: Float64) -> Float64:
    """Return the bytes of scales before they are clamped; of zeros, 0."""
    exponents = np.log2(np.where(scales > 0, scales, 1))
    places: Float64 = np.rint(STEPS_PER_OCTAVE * exponents) + USUAL_SCALE
    return np.where(scales > 0, places, 0)


def _positive(numbers: Float64) -> Float64:
    """Return energies ``[N, D]`` without zeros, which are of dead coordinates."""
    wide = np.asarray(numbers, np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    least = np.where(largest > 0, _SMALLEST_SHARE * largest, 1)
    return np.maximum(wide, least)


def _blocks(
    energy: Float64, classes: Classes, *, layer: int, seed: int, kind: str
) -> tuple[Float64, Float64]:
    """Return blockdiag(R_1, R_2) ``[D, D]`` and the diagonal of S ``[N, 1, D]``.

    Args:
        energy: squares of the coordinates before R, ``[N, D]``.
        classes: how coordinates are shared out.
        layer: see ``make_rotation``.
        seed: likewise.
        kind: likewise.
    """
    heads, size = energy.shape
    blocks = np.zeros((size, size))
    steps = np.ones((heads, 1, size))
    for part in classes.parts(size):
        own = part.coordinates
        count = part.layout.head_size
        blocks[own, own] = make_rotation(kind, count, layer, seed)
        steps[..., own] = energy[:, own].sum(axis=-1)[:, None, None] ** -0.5
    return blocks, steps
