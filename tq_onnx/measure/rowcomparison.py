"""Rows that a backend wrote against those of the reference: which differ, and whether they may.

A backend computes in float32, the reference in float64. So a code may differ where what it codes
lies on the boundary between two codes, to within the rounding of float32 (a tie), and a field may
differ by a step of its type. Everything else is wrong, and so is a byte behind a row that is not
zero.

What vectors look like before they are encoded may be known to a certain degree only: function
bodies of 16-bit models may see them unrounded, and offsets are taken away in float32. That moves
every coordinate by a known amount, hence widens what counts as a tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import fp8, reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.kind import Fields
from tq_onnx.codec.quantise import coordinates, quantise
from tq_onnx.codec.rotated import PROD, rotate
from tq_onnx.codec.spec import Field, RowLayout, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK
from tq_onnx.measure.probe import EncodeNames

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ELEMENTS: Final = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
"""Element types as the codec names them, by the names in plans."""

TIE_DISTANCE: Final = 5e-7
"""A coordinate of a unit vector nearer than this to a boundary may fall on either side: rotating
in float32 rounds each of D products and sums, which gives up to some 1e-7."""

BODY_TIE_DISTANCE: Final = {"FLOAT": TIE_DISTANCE, "FLOAT16": 1.5e-4, "BFLOAT16": 1.2e-3}
"""The same for function bodies, by the model's element type. ONNX Runtime computes 16-bit nodes in
float32 on the CPU and leaves out roundings between them, so that a body may see vectors before
they are rounded to the values that a kernel, and the graph's own output, see."""

BODY_ROUNDING: Final = {"FLOAT": 0.0, "FLOAT16": 2.0**-11, "BFLOAT16": 2.0**-8}
"""How far, relatively, an element may so be from what the graph shows."""

_SINGLE: Final = 2.0**-23
_FIELD_STEP: Final = 2.0**-20
"""Relative step that fields of float32 are counted in: sums of D squares are no better."""


@dataclass(frozen=True)
class RowFigures:
    """Rows of one cache against the reference.

    Attributes:
        codes: codes compared.
        differing: codes that differ.
        wrong: those among them that are no ties, and bytes behind the rows that are not zero.
        steps: largest distance of a field, in steps of its type, over rows of equal codes.
    """

    codes: int
    differing: int
    wrong: int
    steps: int


def compare_rows(
    rows: Array,
    vectors: Array,
    names: EncodeNames,
    past_length: npt.NDArray[np.int64],
    dtype: str,
    *,
    body: bool,
) -> RowFigures:
    """Compares new rows with what the reference makes of the vectors.

    Args:
        rows: uint8 ``[B, N, T, W]``.
        vectors: floats ``[B, N, T, D]``.
        names: how they were encoded.
        past_length: tokens in front of them, int64 ``[B]`` or ``[1]``.
        dtype: the model's element type.
        body: whether a function body made the rows.
    """
    codec = names.codec
    layout = row_layout(codec, vectors.shape[-1])
    x = names.centered(vectors, past_length)
    behind = int(np.count_nonzero(rows[..., layout.row_bytes :]))
    if codec.is_raw:
        wanted = reference.encode(x, codec, None, None, element=ELEMENTS[dtype])
        differing = int((rows[..., : layout.row_bytes] != wanted).sum())
        return RowFigures(vectors.size, differing, differing + behind, 0)
    expected, wanted_fields = quantise(
        x, codec, names.rotation, names.codebook, names.norm_correction
    )
    codes, fields = unpack(rows, layout), reference.fields_of(rows, layout)
    given = vectors.astype(np.float64)
    if codec.is_rotated:
        tie = BODY_TIE_DISTANCE[dtype] if body else TIE_DISTANCE
        tied = _rotated_ties(x, codes, fields, names, tie * _growth(given, x))
    else:
        moved = (BODY_ROUNDING[dtype] if body else 0.0) * np.abs(given)
        if names.offset is not None:
            moved = moved + _SINGLE * (np.abs(given) + np.abs(given - x))
        tied = _ties(x, codes, names, moved)
    differs = codes != expected
    steps = max(
        (
            _steps(fields, wanted_fields, field, _comparable(differs, field, layout))
            for field in layout.fields
        ),
        default=0,
    )
    wrong = int((differs & ~tied).sum())
    return RowFigures(vectors.size, int(differs.sum()), wrong + behind, steps)


def _growth(given: Floats, x: Floats) -> Floats:
    """How much larger relative errors are once an offset is taken away: ``[..., 1]``."""
    lengths = [np.linalg.norm(one, axis=-1, keepdims=True) for one in (given, given - x, x)]
    growth: Floats = (lengths[0] + lengths[1]) / np.where(lengths[2] > 0, lengths[2], np.inf)
    return np.maximum(growth, 1.0)


def _rotated_ties(
    x: Floats, codes: Array, fields: Fields, names: EncodeNames, tie: Floats
) -> Bools:
    """Codes that may be what they are not in the reference, for kinds that rotate."""
    codec, rotation, codebook = names.codec, names.rotation, names.codebook
    assert rotation is not None
    assert codebook is not None  # of every such kind
    size = x.shape[-1]
    _, y = rotate(x, rotation[:, :size])
    boundaries = codebook.boundaries.astype(np.float64)
    tied: Bools = np.abs(y[..., None] - boundaries).min(axis=-1) <= tie
    if codec.kind != PROD:
        return tied
    # A sign is that of what the indices and the stored scale leave over, whatever they are; so it
    # is judged by those of the row itself.
    values = coordinates(codes, fields, codec, codebook.centroids)[..., :size]
    residual = x - values @ rotation[:, :size].astype(np.float64).T
    projected = residual @ rotation[:, size:].astype(np.float64)
    lengths = np.linalg.norm(x, axis=-1, keepdims=True)
    uncertain = np.abs(projected) <= tie * lengths * np.sqrt(size)
    signs: Bools = (projected >= 0) == (codes >> codec.index_bits).astype(bool)
    indices = np.searchsorted(boundaries, y, side="right") == (codes & (codec.levels - 1))
    ties: Bools = (indices | tied) & (signs | uncertain)
    return ties


def _ties(x: Floats, codes: Array, names: EncodeNames, moved: Floats) -> Bools:
    """The same for kinds that do not; ``moved``: how far a coordinate may be from ``x``."""
    codec = names.codec
    if codec.kind == FP8:
        low, high = (fp8.VALUES[fp8.encode(x + side * moved)] for side in (-1, 1))
        found = fp8.VALUES[codes]
        return np.asarray((low <= found) & (found <= high))
    if codec.kind == Q8_0:
        top, low = 127, np.zeros_like(x)
        blocks = [x[..., at : at + Q8_0_BLOCK] for at in range(0, x.shape[-1], Q8_0_BLOCK)]
        largest = [np.broadcast_to(np.abs(b).max(axis=-1, keepdims=True), b.shape) for b in blocks]
        scale = np.concatenate(largest, axis=-1) / top
        found = codes.view(np.int8).astype(np.float64)
    else:
        top, low = (1 << codec.bits) - 1, x.min(axis=-1, keepdims=True)
        scale = (x.max(axis=-1, keepdims=True) - low) / top
        found = codes.astype(np.float64)
    steps = np.where(scale > 0, scale, np.inf)
    slack = 2 * moved.max(axis=-1, keepdims=True) / steps + TIE_DISTANCE * top
    return np.asarray(np.abs(found - (x - low) / steps) <= 0.5 + slack)


def _comparable(differs: Bools, field: Field, layout: RowLayout) -> Bools:
    """Fields that do not follow from codes that differ: ``[..., count]``."""
    if not layout.codec.is_rotated:
        return np.ones((*differs.shape[:-1], field.count), np.bool_)
    return np.logical_not(differs.any(axis=-1, keepdims=True))


def _steps(found: Fields, wanted: Fields, field: Field, counted: Bools) -> int:
    one, other = found[field.name], wanted[field.name]
    if field.size == 2:
        unit = np.spacing(np.abs(other).astype(np.float16)).astype(np.float64)
    else:
        unit = np.maximum(np.abs(other) * _FIELD_STEP, np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        steps = np.abs(one - other) / unit
    # A field that is no number is as far away as can be.
    steps = np.where(np.isfinite(steps), steps, 2.0**31)
    return int(np.floor(steps[counted].max(initial=0) + 0.25))
