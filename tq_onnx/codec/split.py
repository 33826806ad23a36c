"""Kinds with two classes of coordinates: more bits where scores and outputs need them.

With x a vector of KV head n, T_n and P_n = T_n^-T matrices ``[D, D]``
(``tq_onnx.codec.classmatrices``), and D shared out into two classes of n_1 and n_2 coordinates:

    y = (x / |x|) T_n,  y = (y_1, y_2),  u_k = y_k / |y_k|
    codes of u_k    as ``lloyd_max`` has them with n_k coordinates, of ``bits`` in the first class
                    and 2 in the second; each class with gains, and feedback, of its own
    scale           s_k = |x| |y_k| times what ``tq_onnx.codec.search`` says of u_k, stored as a
                    byte: i = round(32 log2 s_k) + 128, at most 255; 1 from half of the smallest
                    scale on, which is 2^(-127/32); 0 below, which is nearer
    x'              = (s_1 c_1, s_2 c_2) P_n^T,  so that queries take P_n:
                    <q, x'> = <q P_n, (s_1 c_1, s_2 c_2)>, and outputs P_n^T

A kind is named after the share of the first class, which is rounded up to whole bytes of a plane of
one bit. With ``bits`` = 4 for keys and 3 for values, that is 38 or 42 bytes for D = 128:

    int2.5      keys split_eighth 4, values split_quarter 3
    int2.75     keys split_quarter 4, values split_half 3

A class is a row of its own: the planes of the first one, those of the second, then both scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.kind import (
    CHOICE,
    COORDINATE,
    CodecKind,
    Codes,
    FieldForm,
    Fields,
    Float32,
    Float64,
    Judged,
    Tables,
    Written,
)
from tq_onnx.codec.rotated import Directions, rotate

SPLIT_EIGHTH: Final = "split_eighth"
"""Codec kind: one of eight coordinates has more bits than the others, which have 2."""

SPLIT_QUARTER: Final = "split_quarter"
"""Codec kind: the same with two of eight."""

SPLIT_HALF: Final = "split_half"
"""Codec kind: the same with half of them."""

SECOND_BITS: Final = 2
"""Bits of the coordinates of the second class."""

STEPS_PER_OCTAVE: Final = 32
"""Steps of a stored scale; 16 cost a tenth of the divergence that classes of keys have."""

USUAL_SCALE: Final = 128
"""The stored scale of 1: four octaves up and down are left."""

LARGEST_SCALE: Final = 255

LOWEST_STEP: Final = 1 - STEPS_PER_OCTAVE
"""Steps below this one are stored as 0: the smallest scale is more than twice as large."""

_EIGHTHS: Final = 8
_MULTIPLE: Final = 8
_FIELDS: Final = (FieldForm("first_scale", 1), FieldForm("second_scale", 1))


def class_sizes(head_size: int, first_eighths: int) -> tuple[int, int]:
    """Return the coordinates of both classes, each a multiple of 8.

    Raises:
        ValueError: a class would have none.
    """
    units = head_size // _MULTIPLE
    first = -(-units * first_eighths // _EIGHTHS) * _MULTIPLE
    if not 0 < first < head_size:
        raise ValueError(
            f"head size {head_size} is too small for two classes of coordinates, which each are a "
            f"multiple of {_MULTIPLE}"
        )
    return first, head_size - first


def scale_of(stored: npt.NDArray[np.generic]) -> Float64:
    """Return the scales that stored numbers 0 .. 255 stand for."""
    steps = np.asarray(stored, np.float64)
    return np.where(steps > 0, np.exp2((steps - USUAL_SCALE) / STEPS_PER_OCTAVE), 0.0)


def step_of(scales: Float64) -> Float64:
    """Return where scales lie on the grid, neither rounded nor clamped; 0 for 0."""
    places = STEPS_PER_OCTAVE * np.log2(np.where(scales > 0, scales, 1)) + USUAL_SCALE
    return np.where(scales > 0, places, 0)


def _clamped(scales: Float64) -> Float64:
    """Return where scales lie on the grid, clamped; 0 for what is nearer to 0."""
    steps = step_of(scales)
    is_there = (scales > 0) & (np.rint(steps) >= LOWEST_STEP)
    return np.where(is_there, np.clip(steps, 1, LARGEST_SCALE), 0)


class _Class:
    """One class of the vectors of a call.

    Attributes:
        coordinates: which they are.
        directions: its tables.
        unit: its coordinates ``[..., n]`` over their length.
        length: that length times that of the vector, ``[...]``.
        growth: how much further than those of a rotation its coordinates may be off: ``[..., 1]``.
    """

    def __init__(self, begin: int, end: int, tables: Tables, x: Float64) -> None:
        assert tables.rotation is not None  # only other kinds do without
        self.coordinates = slice(begin, end)
        matrix = np.asarray(tables.rotation, np.float64)[..., self.coordinates]
        norms, y = rotate(x, matrix)
        lengths = np.linalg.norm(y, axis=-1)
        self.unit = y / np.where(lengths > 0, lengths, 1)[..., None]
        self.length = norms * lengths
        safe = np.where(norms > 0, norms, 1)[..., None]
        share = np.where(norms[..., None] > 0, x, 0) / safe
        products = np.sqrt((share**2) @ (matrix**2).sum(axis=-1)[..., None])[..., 0]
        self.growth = np.maximum(products / np.where(lengths > 0, lengths, np.inf), 1)[..., None]
        own = replace(tables, rotation=None)
        self.directions = Directions(own)

    def scales(self, codes: Codes) -> Float64:
        """Return the factors on the centroids of these codes: ``[...]``."""
        return self.directions.scales(self.length, self.unit, codes)


def _classes(x: Float64, first_eighths: int, bits: int, tables: Tables) -> tuple[_Class, _Class]:
    assert tables.centroids is not None
    assert tables.boundaries is not None
    size = x.shape[-1]
    first = class_sizes(size, first_eighths)[0]
    levels = 1 << bits
    found = []
    for begin, end, centroids, boundaries in (
        (0, first, slice(levels), slice(levels - 1)),
        (first, size, slice(levels, None), slice(levels - 1, None)),
    ):
        own = slice(begin, end)
        feedback = None if tables.feedback is None else tables.feedback[..., own, own]
        part = replace(
            tables,
            centroids=tables.centroids[centroids],
            boundaries=tables.boundaries[boundaries],
            feedback=feedback,
        )
        found.append(_Class(begin, end, part, x))
    return found[0], found[1]


def _kind(name: str, number: int, first_eighths: int) -> CodecKind:
    """Return the record of a kind."""

    def quantise(x: Float64, bits: int, tables: Tables) -> tuple[Codes, Fields]:
        codes, fields = [], {}
        for form, each in zip(_FIELDS, _classes(x, first_eighths, bits, tables), strict=True):
            best = each.directions.search.attempts(each.unit).best
            codes.append(best)
            fields[form.name] = np.rint(_clamped(each.scales(best)))[..., None]
        return np.concatenate(codes, axis=-1), fields

    def coordinates(codes: Codes, fields: Fields, bits: int, centroids: Float32 | None) -> Float64:
        assert centroids is not None  # only other kinds do without
        wide = centroids.astype(np.float64)
        first = class_sizes(codes.shape[-1], first_eighths)[0]
        scales = [scale_of(fields[form.name]) for form in _FIELDS]
        levels = 1 << bits
        return np.concatenate(
            [
                scales[0] * wide[codes[..., :first] & (levels - 1)],
                scales[1] * wide[levels + (codes[..., first:] & ((1 << SECOND_BITS) - 1))],
            ],
            axis=-1,
        )

    def judge(written: Written, tables: Tables) -> Judged:
        wanted, distances, lost, clearance, leads, fields = [], [], [], [], [], {}
        for form, each in zip(
            _FIELDS, _classes(written.vectors, first_eighths, written.bits, tables), strict=True
        ):
            own = written.codes[..., each.coordinates]
            found = each.directions.judge(each.unit, own, written.tie * each.growth)
            # Codes with a scale of 0 mean nothing: they are noise of a vector without a part in the
            # class.
            wanted.append(np.where(written.fields[form.name] == 0, own, found.wanted))
            distances.append(found.distances / each.growth)
            lost.append(found.lost)
            clearance.append(found.clearance / each.growth)
            leads.append(found.lead)
            fields[form.name] = _clamped(each.scales(found.own))[..., None]
        return Judged(
            np.concatenate(wanted, axis=-1),
            {
                COORDINATE: np.concatenate(distances, axis=-1),
                CHOICE: np.concatenate(lost, axis=-1),
            },
            {
                COORDINATE: np.concatenate(clearance, axis=-1),
                CHOICE: np.concatenate(leads, axis=-1),
            },
            fields,
        )

    return CodecKind(
        name,
        number=number,
        planes={3: (2, 1), 4: (4,)},
        formula=[
            f"{first_eighths} of 8 coordinates, then those of {SECOND_BITS} bits",
            f"a byte each: 2 ** ((byte - {USUAL_SCALE}) / {STEPS_PER_OCTAVE}), 0 for 0",
            f"0 below step {LOWEST_STEP}",
        ],
        fields=_FIELDS,
        is_rotated=True,
        first_eighths=first_eighths,
        corrects_norm=True,
        searches=True,
        quantise=quantise,
        coordinates=coordinates,
        judge=judge,
    )


KINDS: Final = (
    _kind(SPLIT_EIGHTH, 7, 1),
    _kind(SPLIT_QUARTER, 8, 2),
    _kind(SPLIT_HALF, 9, 4),
)
"""The records of this module."""
