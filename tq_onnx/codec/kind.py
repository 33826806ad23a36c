"""The record of one codec kind: everything that the package asks about a kind, answered in one row.

The records stand in ``tq_onnx.codec.rotated`` and ``tq_onnx.codec.unrotated``, beside the functions
that they name; ``tq_onnx.codec.spec.KINDS`` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
Fields = dict[str, Float64]
"""Name of a field to its floats ``[..., count]``."""

MAX_HALF: Final = 65504.0
"""Fields of float16 are clamped to the largest finite one."""

COORDINATE: Final = "coordinate"
"""Unit of a distance from a boundary: a coordinate of the rotated unit vector."""

SIGN: Final = "sign"
"""The same of signs: a projection of what is left of the unit vector, over sqrt(D)."""

STEP: Final = "step"
"""The same of equal steps: the whole range of the codes."""

CHOICE: Final = "choice"
"""Unit of how much worse codes are than the best: a share of what the best are chosen by."""

NOT_CORRECTED: Final = 0
NORM_KEPT: Final = 1
UNBIASED: Final = 2
NORM_CORRECTIONS: Final = (NOT_CORRECTED, NORM_KEPT, UNBIASED)
"""What a scale makes up for: nothing; the length that quantisation changes; what it takes of the
product with the vector itself."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables that rows are made with; None for a kind without."""

    rotation: Float32 | None = None  #: float32 ``[D, C]``, C = ``Codec.coordinates(D)``
    centroids: Float32 | None = None  #: float32 ``[L]``
    boundaries: Float32 | None = None  #: float32 ``[L - 1]``
    norm_correction: int = NORM_KEPT  #: what scales make up for, one of ``NORM_CORRECTIONS``
    #: float32 ``[G]``: the gains that the encoder tries, see ``tq_onnx.codec.search``; None for one
    #: that does not search
    gains: Float32 | None = None
    #: float32 ``[N, D, D]``: matrices of error feedback, see ``tq_onnx.codec.feedback``; None for
    #: none
    feedback: Float32 | None = None

    @property
    def searches(self) -> bool:
        """True if vectors are coded in more ways than one."""
        return self.gains is not None or self.feedback is not None


@dataclass(frozen=True)
class FieldForm:
    """A field of a kind's rows."""

    name: str  #: ``scale``, ``zero`` or ``residual_norm``
    size: int  #: bytes of one number: 2 (float16) or 4 (float32)
    block: int = 0  #: coordinates that share a float; 0 where all of a row do

    def count(self, head_size: int) -> int:
        """Return the floats of the field in a row."""
        return -(-head_size // self.block) if self.block else 1


@dataclass(frozen=True, eq=False)
class Written:
    """The rows that a backend made of vectors."""

    vectors: Float64  #: float64 ``[..., D]``, rows that are not finite as zeros
    codes: Codes  #: uint8 ``[..., D]``
    fields: Fields
    bits: int  #: bits per coordinate
    #: how far each coordinate may have been from ``vectors`` when the backend saw it
    moved: Float64
    #: how far a rotated coordinate of the unit vector may be from where the backend saw it,
    #: ``[..., 1]``
    tie: Float64


@dataclass(frozen=True, eq=False)
class Judged:
    """Codes of a backend next to the reference.

    What follows from a code (a scale, the signs of a residual) is that of the code which the row
    has, so that one code on the other side of its boundary is not counted as several.
    """

    codes: Codes  #: uint8 ``[..., D]``, the codes of the reference
    #: by unit, how far each coordinate lies outside the interval of the code that the row has: 0
    #: within it, infinite for a code that no coordinate has; ``[..., D]``
    distances: Mapping[str, Float64]
    #: by unit, how far each coordinate is from where the code of the reference ends
    clearance: Mapping[str, Float64]
    fields: Fields  #: the fields before they are rounded for storing


Quantise = Callable[[Float64, int, Tables], tuple[Codes, Fields]]
"""Vectors ``[..., D]``, bits and tables to codes ``[..., D]`` and fields, in float64."""

Coordinates = Callable[[Codes, Fields, int, Float32 | None], Float64]
"""Codes, fields, bits and centroids to what they mean, in the space that the rotation leads to."""

Judge = Callable[[Written, Tables], Judged]
"""The rows of a backend, and the tables that it had."""

StepError = Callable[[Float64, int], Float64]
"""Vectors ``[n, D]`` and bits to the largest error of each coordinate that the steps allow."""


@dataclass(frozen=True, eq=False)
class CodecKind:
    """A way to store vectors.

    Attributes:
        name: name of the kind in plans, in attributes of operators and in messages.
        number: place among all kinds, in lists and in C++; a new kind takes the next one.
        planes: bits per coordinate, of each form of the kind, to the bit widths of its planes,
            low-order bits first; no planes where rows hold elements.
        formula: meaning of the numbers in a row, as the layout digest has it.
        fields: the metadata of a row, in byte order.
        is_rotated: whether vectors are rotated and quantised with a codebook.
        has_sketch: whether the top bit of a code is a sign of a random projection (QJL), beside
            the index into the codebook. The projection lies beside the rotation.
        is_signed: whether a code is an integer, stored as two's complement, that the scale, of
            either sign, multiplies. Encoders count codes from the lowest one; the bit of the sign
            is the other way round in a row.
        corrects_norm: whether the scale can make up for the norm that quantisation loses.
        searches: whether an encoder may choose among codes of several gains.
        quantise: the encoder; None where rows hold the elements as they are.
        coordinates: the decoder, likewise.
        judge: which codes may differ from the reference, likewise.
        step_error: the largest error of a coordinate; None where it does not follow from steps.
    """

    name: str
    number: int
    planes: Mapping[int, tuple[int, ...]]
    formula: Any
    fields: tuple[FieldForm, ...] = ()
    is_rotated: bool = False
    has_sketch: bool = False
    is_signed: bool = False
    corrects_norm: bool = False
    searches: bool = False
    quantise: Quantise | None = None
    coordinates: Coordinates | None = None
    judge: Judge | None = None
    step_error: StepError | None = None

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits per coordinate that the kind has; with a sketch they count the sign."""
        return tuple(self.planes)

    @property
    def is_raw(self) -> bool:
        """True if rows hold the elements as they are."""
        return self.quantise is None


def half(values: Float64) -> Float64:
    """Round to float16 through float32, as the backends round; clamped to the finite ones."""
    clamped = np.clip(values, -MAX_HALF, MAX_HALF).astype(np.float32)
    return clamped.astype(np.float16).astype(np.float64)


def finite_rows(vectors: npt.NDArray[np.generic]) -> Float64:
    """Return vectors ``[..., D]`` in float64, rows with an element that is not finite as zeros."""
    x = np.asarray(vectors, np.float64)
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0)
