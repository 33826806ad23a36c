"""Codes and fields of vectors, and back, in float64, for any codec that quantises.

The formulas stand beside the records of the kinds: ``tq_onnx.codec.rotated``,
``tq_onnx.codec.unrotated``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED, Codes, Fields, Float64, Tables
from tq_onnx.codec.spec import Codec


def quantise(
    vectors: npt.NDArray[np.generic],
    codec: Codec,
    rotation: npt.NDArray[np.float32] | None = None,
    codebook: Codebook | None = None,
    norm_correction: int = NORM_KEPT,
    *,
    gains: npt.NDArray[np.float32] | None = None,
    feedback: npt.NDArray[np.float32] | None = None,
) -> tuple[Codes, Fields]:
    """Make codes and fields of vectors.

    Args:
        vectors: floats ``[..., D]``.
        rotation: float32 ``[D, D]``, for ``prod`` ``[D, 2 D]``; None for a kind without.
        norm_correction: what the scale makes up for, for kinds that can
            (``Codec.corrects_norm``); one of ``kind.NORM_CORRECTIONS``.
        feedback: matrices of error feedback, likewise; vectors are then ``[..., N, T, D]``.

    Returns:
        codes uint8 ``[..., D]``, and the fields as float64 values of their stored type.
    """
    of_kind = codec.record.quantise
    assert of_kind is not None  # of every kind but raw
    tables = tables_of(codec, rotation, codebook, norm_correction, gains=gains, feedback=feedback)
    return of_kind(np.asarray(vectors, np.float64), codec.bits, tables)


def coordinates(
    codes: Codes, fields: Fields, codec: Codec, centroids: npt.NDArray[np.float32] | None
) -> Float64:
    """Return what codes ``[..., D]`` and fields mean, in the space that the rotation leads to.

    Returns:
        float64 ``[..., C]``, C = ``codec.coordinates(D)``; for a kind without rotation the vectors.
    """
    of_kind = codec.record.coordinates
    assert of_kind is not None  # of every kind but raw
    # Rows that were never written may hold any bytes, hence any scale; whether one is read at all
    # is up to the caller.
    with np.errstate(invalid="ignore"):
        return of_kind(codes, fields, codec.bits, centroids)


def tables_of(
    codec: Codec,
    rotation: npt.NDArray[np.float32] | None,
    codebook: Codebook | None,
    norm_correction: int,
    *,
    gains: npt.NDArray[np.float32] | None = None,
    feedback: npt.NDArray[np.float32] | None = None,
) -> Tables:
    """Return the tables that a codec uses of those given."""
    if not codec.is_rotated:
        return Tables()
    assert codebook is not None  # only other kinds do without
    corrected = norm_correction if codec.corrects_norm else NOT_CORRECTED
    searching = (gains, feedback) if codec.searches else (None, None)
    return Tables(rotation, codebook.centroids, codebook.boundaries, corrected, *searching)
