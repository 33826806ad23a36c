"""Decide whether rows of a backend are correct: the only place with tolerances for rows.

A backend computes in float32, the reference in float64. So a code may differ where what it codes
lies on the boundary between two codes, to within the rounding of float32 (a tie), and a field may
differ by a step of its type. Everything else is wrong, and so is a byte behind a row that is not
zero. What follows from a code (norm correction, the residual of ``prod``) is expected of the code
that the row has, so that one tie is not counted as several.

The vectors that were encoded may be known approximately only: function bodies of 16-bit models may
see them unrounded, and offsets are subtracted in float32. That moves every coordinate by at most a
known amount, and widens what counts as a tie by as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.kind import (
    CHOICE,
    COORDINATE,
    MAX_HALF,
    SIGN,
    STEP,
    Float64,
    Judged,
    Tables,
    Written,
    finite_rows,
)
from tq_onnx.codec.spec import Codec, row_layout

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

TIE_DISTANCE: Final[Mapping[str, float]] = {
    # Rotating in float32 rounds each of D products and sums. Measured, where coordinates are put
    # on boundaries: 1e-8.
    COORDINATE: 1e-7,
    # A sign is that of a projection of x - x', which loses digits twice: in the difference, and in
    # a sum over D normal numbers. Measured in 23 million signs of head sizes 64 to 256: a quarter.
    SIGN: 2e-7,
    # Each of subtraction, range, scale and division rounds to 2^-24 of the code: together 2^-22.
    STEP: 2.3e-7,
    # Both sums that codes are chosen by are chains of D products in float32: each may be off by
    # some 2^-24 sqrt(D). Measured, in 131,072 codes of the bundled model: 2.5e-6.
    CHOICE: 3e-6,
}
"""How far from the interval of its code a number may lie, in units of its kind of distance; for a
choice, by how much codes may be worse than the best."""

UNROUNDED_TIE_DISTANCE: Final = {"float32": 0.0, "float16": 1.5e-4, "bfloat16": 1.2e-3}
"""The least of the above for coordinates and signs where a backend may have seen the elements of
vectors unrounded, by the model's element type. ONNX Runtime computes 16-bit nodes in float32 on the
CPU and leaves out roundings between them, so that a function body may see vectors before they are
rounded to the values that a kernel, and the graph's own output, see."""

UNROUNDED: Final = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""How far, relatively, an element may so be from what the graph shows."""

TIE_SHARE: Final = 1e-4
"""Share of the codes that may be such ties."""

UNROUNDED_TIE_SHARE: Final = {"float32": TIE_SHARE, "float16": 2e-3, "bfloat16": 2e-2}
"""The same where elements may have been seen unrounded: more lie within a wider distance."""

SEARCHED_TIE_SHARE: Final = {"float32": 1e-2, "float16": 1.0, "bfloat16": 1.0}
"""The same of encoders that search: one tie can choose another gain, or other errors to feed back,
and then all codes of its row differ. Where elements may have been seen unrounded, most rows do."""

FIELD_STEPS: Final = 1
"""Steps that a field may be off: a backend in float32 rounds twice."""

_SINGLE: Final = 2.0**-23
_SINGLE_STEPS: Final = 16
"""Steps of float32 that one step of such a field is: sums of D products are no better. Measured in
signed4 rows of the bundled model with AVX2: 9."""
_NO_NUMBER: Final = 2.0**31
"""Steps between a number and what is none."""


@dataclass(frozen=True)
class RowFigures:
    """Rows of one cache against the reference."""

    codes: int  #: codes compared
    differing: int  #: codes that differ
    #: codes that are wrong, that is no ties either, and bytes behind the rows that are not zero
    wrong: int
    steps: int  #: largest distance of a field, in steps of its type
    strain: float = 0.0  #: largest distance of a tie, over the largest that is allowed
    #: mean factor on relative errors by what offsets take away: so many more codes are ties
    growth: float = field(default=1.0, compare=False)


def judge_rows(
    rows: Array,
    vectors: Array,
    codec: Codec,
    tables: Tables,
    *,
    given: Array | None = None,
    turned: Array | None = None,
    element: str = "float32",
    unrounded: bool = False,
) -> RowFigures:
    """Compare rows with what the reference makes of vectors.

    Args:
        rows: uint8 ``[..., W]``; the bytes behind the codec's row must be zero.
        vectors: floats ``[..., D]``: what was encoded.
        codec: the codec.
        tables: its tables; what ``raw`` gets is not looked at.
        given: the vectors before an offset was taken from them; None where there was none.
        turned: the largest numbers that an offset which turns is a sum of, ``[..., D]``; None for
            an offset that does not.
        element: the model's element type, see ``codec.elements``.
        unrounded: whether the backend may have seen the elements before they were rounded to
            their type.
    """
    layout = row_layout(codec, vectors.shape[-1])
    behind = int(np.count_nonzero(rows[..., layout.row_bytes :]))
    own = rows[..., : layout.row_bytes]
    judge = codec.record.judge
    if judge is None:
        differing = int(
            (own != reference.encode(vectors, codec, None, None, element=element)).sum()
        )
        return RowFigures(vectors.size, differing, differing + behind, 0)
    x = finite_rows(vectors)
    origin = x if given is None else np.where(np.isfinite(given), given, 0).astype(np.float64)
    moved = (UNROUNDED[element] if unrounded else 0.0) * np.abs(origin)
    slack = np.zeros((*x.shape[:-1], 1))
    if given is not None:
        largest = np.abs(origin - x) if turned is None else turned
        rounded = _SINGLE * (np.abs(origin) + largest)
        moved = moved + rounded
        slack = np.linalg.norm(rounded, axis=-1, keepdims=True)
    fields = reference.fields_of(own, layout)
    codes = unpack(own, layout)
    least = UNROUNDED_TIE_DISTANCE[element] if unrounded else 0.0
    growth = _growth(origin, x)
    tie = np.maximum(TIE_DISTANCE[COORDINATE], least) * growth
    with np.errstate(invalid="ignore"):
        judged = judge(Written(x, codes, fields, codec.bits, moved, tie), tables)
    strain = _strain(judged, least, growth)
    steps = [
        _steps(stored, _nearest(stored, judged.fields[form.name], slack), form.size)
        for form in layout.fields
        for stored in [fields[form.name]]
    ]
    wrong = int(np.logical_not(strain <= 1).sum())
    return RowFigures(
        vectors.size,
        int((codes != judged.codes).sum()),
        wrong + behind,
        max(steps, default=0),
        float(strain.max(initial=0)),
        float(growth.mean()) if growth.size else 1.0,
    )


def _strain(judged: Judged, least: float, growth: Float64) -> Float64:
    """Return the distances of codes from their intervals, over the largest that is allowed."""
    strains = []
    for unit, distance in judged.distances.items():
        # How far steps moved is in their distances already.
        allowed = TIE_DISTANCE[unit] * np.ones_like(growth)
        if unit != STEP:
            allowed = np.maximum(allowed, least) * growth
        strains.append(distance / allowed)
    strain: Float64 = np.max(strains, axis=0)
    return strain


def _growth(given: Float64, x: Float64) -> Float64:
    """Return the factor on relative errors once an offset is taken away: ``[..., 1]``."""
    lengths = [np.linalg.norm(one, axis=-1, keepdims=True) for one in (given, given - x, x)]
    growth: Float64 = (lengths[0] + lengths[1]) / np.where(lengths[2] > 0, lengths[2], np.inf)
    return np.maximum(growth, 1.0)


def _nearest(field: Float64, exact: Float64, slack: Float64) -> Float64:
    """Return the fields next to those that a row has, of vectors that moved by at most ``slack``.

    A field is a length of the vector or a part of one, and moves by no more than that.
    """
    nearest: Float64 = np.clip(field, exact - slack, exact + slack)
    return nearest


def _steps(own: Float64, wanted: Float64, size: int) -> int:
    """Return the largest distance of stored floats from what should have been stored."""
    if size == np.dtype(np.float16).itemsize:
        clamped = np.clip(wanted, -MAX_HALF, MAX_HALF).astype(np.float32)
        steps = np.abs(_place(own) - _place(clamped)).astype(np.float64)
    else:
        stored = wanted.astype(np.float32)
        unit = _SINGLE_STEPS * np.spacing(np.abs(stored)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            steps = np.ceil(np.abs(own - stored.astype(np.float64)) / unit)
    # A field that is no number is as far away as can be.
    steps = np.where(np.isfinite(own), steps, _NO_NUMBER)
    return int(steps.max(initial=0))


def _place(values: Array) -> npt.NDArray[np.int64]:
    """Return the numbers of float16 counted from zero; both zeros are 0."""
    with np.errstate(invalid="ignore"):
        bits = values.astype("<f2").view("<i2").astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)
