"""The check "quality": codes that ruin a layer fail it, and it says which, and what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tq_onnx
from tests.conversion.test_biases import plant
from tests.runtime.models import DYNAMO, original
from tq_onnx.codec.extremes import Extremes
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.biases import NO_BIASES
from tq_onnx.measure.divergence import Sums
from tq_onnx.measure.loss import LOSS_TOKENS, LayerLoss, LossFigures, written_text
from tq_onnx.runtime.opening import open_original
from tq_onnx.verification.checks import PropertyCheck
from tq_onnx.verification.loss import quality_advice, quality_check


def test_the_original_writes_the_same_text_every_time() -> None:
    opened = open_original(original(DYNAMO))
    texts = [written_text(opened, 3, LOSS_TOKENS) for _ in range(2)]
    assert texts[0] is not None and np.array_equal(*texts)
    assert len(texts[0]) == LOSS_TOKENS and len(np.unique(texts[0])) > 40


def figures(*layers: LayerLoss) -> LossFigures:
    sums, logits = Sums(), np.zeros((2, 4))
    sums.add(logits, logits, np.zeros(2, np.int64), np.arange(2))
    return LossFigures("the text", 2, sums.figures(2, 2), layers)


@pytest.mark.parametrize(("noise", "error"), [(1.1, 0.1), (0.1, 0.6), (np.nan, 0.1), (0.1, np.nan)])
def test_a_layer_that_is_lost_is_named(noise: float, error: float) -> None:
    lost = figures(LayerLoss(0, (4, 4), 0.1, 0.1, ()), LayerLoss(1, (4, 4), noise, error, ()))
    check = quality_check(lost)
    assert check.holds is False and "the codes ruin layer 1: " in check.detail
    assert quality_advice(lost, is_calibrated=False) == (
        'convert again with `calibrate`, or with `preset="int5"`, or leave layer 1 uncompressed '
        "with `layers`"
    )
    assert quality_check(figures(LayerLoss(0, (3, 3), 1.9, 0.8, ()))).holds
    assert quality_check(figures(LayerLoss(0, (4, 4), 0.9, 0.4, ()))).holds


def test_values_beyond_float16_are_lost() -> None:
    clamped = figures(LayerLoss(0, (4, 4), 0.1, 0.1, (Extremes(0, "value", 9, clamped=2),)))
    check = quality_check(clamped)
    assert check.holds is False and "layer 0 values (2 too large and clamped, of 9)" in check.detail
    assert "uncompressed" in quality_advice(clamped, is_calibrated=True)


def test_keys_that_codes_ruin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "find_biases", lambda *_: NO_BIASES)
    path, _ = plant("dynamo-llama", tmp_path)
    tq_onnx.convert(path, output=tmp_path / "left.onnx")
    report = tq_onnx.verify(path, tmp_path / "left.onnx", quick=True)
    (check,) = (one for one in report.checks if one.name == "quality")
    assert isinstance(check, PropertyCheck) and check.holds is False, check
