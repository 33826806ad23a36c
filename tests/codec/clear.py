"""Vectors whose rows are the same in whatever order a sum is taken."""

from __future__ import annotations

import numpy as np

from tq_onnx.codec.acceptance import TIE_DISTANCE
from tq_onnx.codec.kind import COORDINATE, Tables, Written, finite_rows
from tq_onnx.codec.spec import Codec

CLEAR_TIES = 100.0
"""Multiples of a tie's distance that nothing in float32 reaches."""
CLEAR_STEPS = 5e-3
"""The same for fields of float16: steps from the middle between two numbers."""


def is_clear(vectors: np.ndarray, codec: Codec, tables: Tables) -> np.ndarray:
    """Vectors of which no code is near a tie, and no field of float16 near one of its own."""
    record = codec.record
    assert record.judge is not None
    assert record.quantise is not None
    x = finite_rows(vectors)
    codes, fields = record.quantise(x, codec.bits, tables)
    tie = np.full((*x.shape[:-1], 1), TIE_DISTANCE[COORDINATE])
    judged = record.judge(Written(x, codes, fields, codec.bits, np.zeros_like(x), tie), tables)
    clear = np.ones(x.shape[:-1], np.bool_)
    for unit, distance in judged.clearance.items():
        clear &= (distance >= CLEAR_TIES * TIE_DISTANCE[unit]).all(axis=-1)
    for form in record.fields:
        if form.size == np.dtype(np.float16).itemsize:
            wanted = judged.fields[form.name]
            halves = wanted.astype(np.float16)
            unit_steps = np.spacing(halves).astype(np.float64)
            steps = np.abs(wanted - halves.astype(np.float64)) / np.abs(unit_steps)
            clear &= (np.abs(steps - 0.5) >= CLEAR_STEPS).all(axis=-1)
    return clear
