"""Comparison with the oracle, and the record of what was measured.

Differences in codes are accepted only at boundaries (see ``ties``); fields within one step of
float16; attention by the norm of the difference, overall and per query.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tests.parity import ties, tolerances
from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.spec import Codec, row_layout


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
    rotation: np.ndarray | None,
    *,
    norm_correction: bool = True,
    tie_rate: float = tolerances.TIE_RATE,
    element: str = "float32",
) -> int:
    """Asserts that ``rows`` are what the oracle makes of ``vectors``, up to ties.

    Returns the number of ties.
    """
    head_size = vectors.shape[-1]
    layout = row_layout(codec, head_size)
    assert rows.shape == (*vectors.shape[:-1], rows.shape[-1])
    assert not rows[..., layout.row_bytes :].any(), "bytes behind a row are not zero"
    rows = rows[..., : layout.row_bytes]
    if codec.is_raw:
        assert np.array_equal(rows, reference.encode(vectors, codec, None, None, element=element))
        return 0
    expected = ties.expect(vectors, rows, codec, rotation, norm_correction)
    off = expected.codes != unpack(rows, layout)
    record = MEASURED[backend]
    record.coordinates += off.size
    record.ties += int(off.sum())
    record.rows += off.size // head_size
    distance = float(expected.distances[off].max(initial=0))
    record.tie_distance = max(record.tie_distance, distance)
    place = np.unravel_index(np.argmax(np.where(off, expected.distances, -1)), off.shape)
    limit = tolerances.TIE_DISTANCES[codec.kind]
    assert distance <= limit, f"{codec}: {distance} from a boundary at {place}"
    assert off.sum() <= max(1, tie_rate * off.size)
    for field in layout.fields:
        own = reference.fields_of(rows, layout)[field.name]
        wanted = expected.fields[field.name]
        if field.size == 4:
            np.testing.assert_allclose(own, wanted, rtol=tolerances.FLOAT32_FIELD)
            continue
        steps = ties.half_steps(own, wanted)
        record.scale_steps = max(record.scale_steps, int(steps.max(initial=0)))
        assert steps.max(initial=0) <= tolerances.SCALE_STEPS, field.name
    return int(off.sum())


INTEGER_LEVELS = ("avx512vnni", "avx2", "neon", "neondot")
"""Where products with codes are taken with integers; not avx512, which has no fast form of them."""


def check_attention(backend: str, dtype: str, output: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that an output is the oracle's; queries that see nothing must give exact zeros."""
    output = output.astype(np.float64)
    assert output.shape == expected.shape
    assert np.array_equal(np.isnan(output), np.isnan(expected))
    finite = ~np.isnan(expected).any(axis=-1)
    output, expected = output[finite], expected[finite]
    limit = tolerances.ATTENTION[dtype]
    norms = np.linalg.norm(expected, axis=-1)
    sizes = norms
    if re.split("[-,]", backend)[0] in INTEGER_LEVELS:
        limit = max(limit, tolerances.INTEGERS)
        sizes = np.full_like(norms, norms.max(initial=0))
    errors = np.linalg.norm(output - expected, axis=-1)
    assert not output[norms == 0].any()
    overall = float(np.linalg.norm(errors) / max(float(np.linalg.norm(norms)), 1e-30))
    ERRORS[backend, dtype] = max(ERRORS[backend, dtype], overall)
    assert overall <= limit
    assert (errors <= tolerances.PER_QUERY_FACTOR * limit * sizes).all()
