"""``verify`` finds every damage, and passes whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.measure.damages import (
    OF_ALL,
    OF_CALIBRATION,
    OF_GRAPHS,
    PLACES,
    REFUSED,
    Damage,
    NothingToDamageError,
    a_shorter_window,
)
from tests.runtime.models import DYNAMO, GENAI, converted, ids, original
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, VerificationError
from tq_onnx.measure.calibrate import calibrate
from tq_onnx.measure.verify import VerifyReport, verify

LLAMA, GEMMA = "dynamo-llama", "dynamo-gemma2"
FEW = 61
"""Tokens that the smallest models know."""
TEXT = ids(32, seed=7)[0] % FEW


def check(before: Path, after: Path) -> VerifyReport:
    return verify(before, after, TEXT, source="", new_tokens=2, context=32, threads=1)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with offsets, and scales as nodes."""
    folder = tmp_path_factory.mktemp("calibrated")
    text = np.random.default_rng(1).integers(0, FEW, 400)
    statistics = calibrate(original(LLAMA), text, context=100)
    write_calibration(folder / "statistics", statistics, overwrite=False)
    options = Options(calibration=folder / "statistics")
    convert(original(LLAMA), folder / "model.onnx", options=options)
    return folder / "model.onnx"


def assert_found(before: Path, whole: Path, damage: Damage, path: Path) -> None:
    model = onnx.load(whole)
    content = model.SerializeToString()
    try:
        damage(model)
    except NothingToDamageError:
        pytest.skip("the model has no such part")
    assert model.SerializeToString() != content
    onnx.save(model, path)
    if damage in REFUSED:
        with pytest.raises(UnsupportedModelError, match=r"layout|past_length"):
            check(before, path)
        return
    try:
        report = check(before, path)
    except VerificationError as error:
        assert "layer" in str(error)
    else:
        assert not report.holds
        lost = [entry for entry in report.checks if entry.holds is False]
        details = "; ".join(entry.detail for entry in lost)
        assert PLACES.get(damage, "") in details


def test_whole_models_pass(calibrated: Path) -> None:
    for name, after in (
        (DYNAMO, converted(DYNAMO)),
        (GENAI, converted(GENAI)),
        (LLAMA, calibrated),
        (GEMMA, converted(GEMMA)),
    ):
        report = check(original(name), after)
        assert report.holds, [entry for entry in report.checks if not entry.holds]


CASES = [
    *((name, damage) for name in (DYNAMO, GENAI) for damage in OF_GRAPHS),
    *((DYNAMO, damage) for damage in OF_ALL),
]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=lambda it: getattr(it, "__name__", it))
def test_a_damage_is_found(tmp_path: Path, name: str, damage: Damage) -> None:
    assert_found(original(name), converted(name), damage, tmp_path / "damaged.onnx")


@pytest.mark.parametrize("damage", OF_CALIBRATION, ids=lambda damage: damage.__name__)
def test_a_damage_to_scales_is_found(tmp_path: Path, calibrated: Path, damage: Damage) -> None:
    assert_found(original(LLAMA), calibrated, damage, tmp_path / "damaged.onnx")


def test_a_shorter_window_is_found(tmp_path: Path) -> None:
    assert_found(original(GEMMA), converted(GEMMA), a_shorter_window, tmp_path / "damaged.onnx")
