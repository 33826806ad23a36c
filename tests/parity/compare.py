"""Comparison with the oracle.

Rows are judged by ``codec.acceptance``; attention by the norm of the difference, overall and per
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ops.site import Arrays, Site
from tests.tolerances import bounds
from tq_onnx.codec.acceptance import FIELD_STEPS, TIE_SHARE, judge_rows
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import NORM_KEPT, Tables
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.spec import Codec, row_layout

ATTENTION = bounds("attention")


def assert_rows(
    rows: np.ndarray,
    vectors: np.ndarray,
    codec: Codec,
    tables: Tables,
    *,
    tie_rate: float = TIE_SHARE,
    element: str = "float32",
) -> int:
    """Asserts that ``rows`` are what the oracle makes of ``vectors``, up to ties.

    Returns the number of ties.
    """
    assert rows.shape == (*vectors.shape[:-1], rows.shape[-1])
    row_bytes = row_layout(codec, vectors.shape[-1]).row_bytes
    assert not rows[..., row_bytes:].any(), "bytes behind a row are not zero"
    found = judge_rows(rows, vectors, codec, tables, element=element)
    assert found.wrong == 0, f"{codec}: {found}"
    assert found.differing <= max(1, tie_rate * found.codes), f"{codec}: {found}"
    assert found.steps <= FIELD_STEPS, f"{codec}: {found}"
    return found.differing


def check_rows(
    rows: np.ndarray,
    vectors: np.ndarray,
    codec: Codec,
    rotation: np.ndarray,
    *,
    norm_correction: int = NORM_KEPT,
    gains: np.ndarray | None = None,
    tie_rate: float = TIE_SHARE,
) -> None:
    """The same of a codec that rotates, from its rotation."""
    book = codebook_of(codec, vectors.shape[-1])
    tables = tables_of(codec, rotation, book, norm_correction, gains=gains)
    assert_rows(rows, vectors, codec, tables, tie_rate=tie_rate)


def assert_same_rows(
    site: Site, feeds: Arrays, presents: Sequence[Any], *, tie_rate: float = TIE_SHARE
) -> None:
    """New rows are good, and all others are the same bytes."""
    for present, wanted, side in zip(
        presents, site.expected_presents(feeds), ("key", "value"), strict=True
    ):
        assert present.shape == wanted.shape
        codec = site.key if side == "key" else site.value
        rest = present.copy()
        # An offset is taken away in float32, as in the bodies.
        vectors = site.centered(feeds, side).astype(np.float32)
        for b, length in enumerate(np.broadcast_to(feeds["past_length"], len(present))):
            new = slice(length, length + vectors.shape[2])
            rows, own = present[b, :, new], vectors[b]
            assert_rows(
                rows, own, codec, site.tables(side), tie_rate=tie_rate, element=site.element
            )
            rest[b, :, new] = wanted[b, :, new]
        np.testing.assert_array_equal(rest, wanted)


def check_attention(dtype: str, output: np.ndarray, expected: np.ndarray) -> None:
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
    assert overall <= limit
    assert (errors <= ATTENTION["per_query_factor"] * limit * norms).all()
