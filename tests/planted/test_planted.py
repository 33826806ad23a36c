"""Faults of real models in every export: no loss, a check that fails, or a refusal; never silence.

pytest tests/planted                     each fault and each export once
TQ_ALL_PLANTED=1 pytest tests/planted    all combinations
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import tq_onnx
from tests.conversion.test_biases import FIXTURES, FORMS
from tests.planted.faults import FAULTS, plant
from tq_onnx.errors import TqOnnxError
from tq_onnx.verification.checks import failed

LOSS: Final = 3.0
"""Of the KL divergence of the export without faults."""
SMALL: Final = 0.05
"""What two healthy codecs of 4 bits differ by with random weights, at least."""

RUNNING = [form for form in FORMS if form not in {"genai-cpu-fp16", "hf-static-prefill"}]
"""Without those whose original onnxruntime does not run here, or which takes 6 tokens."""
HALF = frozenset({"dynamo-op18-sdpa-hd128-fp16", "genai-dml-fp16"})
"""Whose originals hold no values beyond float16."""
JOINED = frozenset({"genai-cpu-int4", "genai09-cpu-fp32", "genai-dml-fp16"})
"""Whose keys have heads and tokens on one axis."""
COMBINATIONS = [
    (form, fault)
    for form in RUNNING
    for fault in FAULTS
    if not (form in HALF and "beyond float16" in fault)
    if not (form in JOINED and "huge keys" in fault)
]
PART = [*COMBINATIONS[:: len(FAULTS) - 1], COMBINATIONS[-1]]
ALL = "TQ_ALL_PLANTED" in os.environ


def outcome(original: Path, converted: Path) -> tuple[str, float]:
    """Convert and verify; return how it ended, and the KL divergence."""
    try:
        tq_onnx.convert(original, output=converted, overwrite=True)
    except TqOnnxError as error:
        return f"refused: {error}", 0.0
    report = tq_onnx.verify(original, converted, quick=True)
    loss = report.loss
    lost = ", ".join(f"{check.name}: {check.detail}" for check in failed(report.checks))
    return f"failed: {lost}" if lost else "", loss.predictions.kl_mean if loss else 0.0


@cache
def loss_of(form: str, folder: Path) -> float:
    ended, loss = outcome(FIXTURES / f"{form}.onnx", folder / f"{form}.int4.onnx")
    assert not ended
    return loss


@pytest.mark.parametrize(("form", "fault"), COMBINATIONS if ALL else PART)
def test_a_fault_is_no_silent_loss(
    form: str, fault: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plant(FIXTURES / f"{form}.onnx", fault, tmp_path / "planted.onnx")
    ended, loss = outcome(tmp_path / "planted.onnx", tmp_path / "converted.onnx")
    assert ended or loss <= LOSS * loss_of(form, tmp_path_factory.getbasetemp()) + SMALL
