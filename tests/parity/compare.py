"""Comparison with the oracle, and the record of what was measured.

Differences in codes are accepted only at boundaries; scales within one step of float16; attention
by the norm of the difference, overall and per query.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tests.parity import tolerances
from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.spec import MAX_SCALE, Codec, row_layout


@dataclass
class Measured:
    """The worst of one backend so far."""

    coordinates: int = 0
    ties: int = 0
    rows: int = 0
    scale_steps: int = 0
    tie_distance: float = 0.0


MEASURED: dict[str, Measured] = defaultdict(Measured)
ERRORS: dict[tuple[str, str], float] = defaultdict(float)
"""Largest relative attention error by backend and element type."""


def check_rows(
    backend: str,
    rows: np.ndarray,
    vectors: np.ndarray,
    codec: Codec,
    rotation: np.ndarray,
    *,
    norm_correction: bool = True,
    tie_rate: float = tolerances.TIE_RATE,
) -> int:
    """Asserts that ``rows`` are what the oracle makes of ``vectors``, up to boundary ties.

    Returns the number of ties.
    """
    head_size = vectors.shape[-1]
    layout, book = row_layout(codec, head_size), lloyd_max(codec.bits, head_size)
    expected = reference.encode(vectors, codec, rotation, book, norm_correction)
    assert rows.shape == expected.shape
    codes, wanted = unpack(rows, layout), unpack(expected, layout)
    norms, y = reference.rotate(vectors, rotation)
    off = np.argwhere(codes != wanted)
    record = MEASURED[backend]
    record.coordinates += codes.size
    record.ties += len(off)
    record.rows += codes.size // head_size
    for place in map(tuple, off):
        low, high = sorted((int(codes[place]), int(wanted[place])))
        assert high == low + 1, f"codes {low} and {high} at {place} are not neighbours"
        distance = abs(float(y[place]) - float(book.boundaries[low]))
        record.tie_distance = max(record.tie_distance, distance)
        assert distance <= tolerances.TIE_DISTANCE, f"{distance} from a boundary at {place}"
    assert len(off) <= max(1, tie_rate * codes.size)
    # What the oracle would store with these very codes, so that a tie is not counted twice.
    lengths = np.linalg.norm(book.centroids.astype(np.float64)[codes], axis=-1)
    scales = np.minimum(norms / lengths if norm_correction else norms, MAX_SCALE)
    steps = scales.astype(np.float32).astype("<f2").view("<u2").astype(int)
    own = np.ascontiguousarray(rows[..., layout.scale_offset :]).view("<u2")[..., 0].astype(int)
    difference = np.abs(own - steps)
    record.scale_steps = max(record.scale_steps, int(difference.max(initial=0)))
    assert difference.max(initial=0) <= tolerances.SCALE_STEPS
    return len(off)


def check_attention(backend: str, dtype: str, output: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that an output is the oracle's; queries that see nothing must give exact zeros."""
    output = output.astype(np.float64)
    assert output.shape == expected.shape
    assert np.array_equal(np.isnan(output), np.isnan(expected))
    finite = ~np.isnan(expected).any(axis=-1)
    output, expected = output[finite], expected[finite]
    limit = tolerances.ATTENTION[dtype]
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(output - expected, axis=-1)
    assert not output[norms == 0].any()
    overall = float(np.linalg.norm(errors) / max(float(np.linalg.norm(norms)), 1e-30))
    ERRORS[backend, dtype] = max(ERRORS[backend, dtype], overall)
    assert overall <= limit
    assert (errors <= tolerances.PER_QUERY_FACTOR * limit * norms).all()
