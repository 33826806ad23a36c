"""Comparison with the oracle, and the record of what was measured.

Rows are judged by ``codec.acceptance``; attention by the norm of the difference, overall and per
query.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tests.tolerances import bounds
from tq_onnx.codec.acceptance import FIELD_STEPS, TIE_SHARE, judge_rows
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import NORM_KEPT, Tables
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.spec import Codec, row_layout


@dataclass
class Measured:
    """The worst of one backend so far."""

    coordinates: int = 0
    ties: int = 0
    rows: int = 0
    scale_steps: int = 0
    strain: float = 0.0


ATTENTION = bounds("attention")

MEASURED: dict[str, Measured] = defaultdict(Measured)
ERRORS: dict[tuple[str, str], float] = defaultdict(float)
"""Largest relative attention error by backend and element type."""


def check_rows(
    backend: str,
    rows: np.ndarray,
    vectors: np.ndarray,
    codec: Codec,
    rotation: np.ndarray | None,
    *,
    norm_correction: int = NORM_KEPT,
    gains: np.ndarray | None = None,
    feedback: np.ndarray | None = None,
    tie_rate: float = TIE_SHARE,
    element: str = "float32",
) -> int:
    """Asserts that ``rows`` are what the oracle makes of ``vectors``, up to ties.

    Returns the number of ties.
    """
    assert rows.shape == (*vectors.shape[:-1], rows.shape[-1])
    row_bytes = row_layout(codec, vectors.shape[-1]).row_bytes
    assert not rows[..., row_bytes:].any(), "bytes behind a row are not zero"
    if codec.is_raw:
        assert judge_rows(rows, vectors, codec, Tables(), element=element).wrong == 0
        return 0
    book = codebook_of(codec, vectors.shape[-1]) if codec.is_rotated else None
    tables = tables_of(codec, rotation, book, norm_correction, gains=gains, feedback=feedback)
    found = judge_rows(rows, vectors, codec, tables, element=element)
    record = MEASURED[backend]
    record.coordinates += found.codes
    record.ties += found.differing
    record.rows += found.codes // vectors.shape[-1]
    record.strain = max(record.strain, found.strain)
    record.scale_steps = max(record.scale_steps, found.steps)
    assert found.wrong == 0, f"{codec}: {found}"
    assert found.differing <= max(1, tie_rate * found.codes)
    assert found.steps <= FIELD_STEPS
    return found.differing


def check_attention(backend: str, dtype: str, output: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that an output is the oracle's; queries that see nothing must give exact zeros."""
    output = output.astype(np.float64)
    assert output.shape == expected.shape
    assert np.array_equal(np.isnan(output), np.isnan(expected))
    finite = ~np.isnan(expected).any(axis=-1)
    output, expected = output[finite], expected[finite]
    limit = ATTENTION[dtype]
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(output - expected, axis=-1)
    assert not output[norms == 0].any()
    overall = float(np.linalg.norm(errors) / max(float(np.linalg.norm(norms)), 1e-30))
    ERRORS[backend, dtype] = max(ERRORS[backend, dtype], overall)
    assert overall <= limit
    assert (errors <= ATTENTION["per_query_factor"] * limit * norms).all()
