"""``verify`` and ``report`` find every damage, and pass whole models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.run import run
from tests.runtime.models import DYNAMO, GENAI, HALF, converted, ids, original
from tests.verification.damages import (  # noqa: F401 - they fill the lists
    attention,
    calibrated,
    codecs,
    graph,
    records,
    weights,
    wiring,
)
from tests.verification.damages.editing import (
    DAMAGES,
    OF_CALIBRATION,
    Damage,
    NothingToDamageError,
    attentions,
    integer,
)
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import VerificationError
from tq_onnx.files.load import load
from tq_onnx.ops.operators import Attention
from tq_onnx.plan import plan_in
from tq_onnx.progress import silent
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.quality.report import report
from tq_onnx.targets.registry import target_of
from tq_onnx.verification import fidelity
from tq_onnx.verification.baseline import Baseline
from tq_onnx.verification.fidelity import expect_held
from tq_onnx.verification.findings import Inputs
from tq_onnx.verification.interfaces import failing, refuse_stranger
from tq_onnx.verification.planned import expect_layers
from tq_onnx.verification.steps import Steps
from tq_onnx.verification.verification import Verification

MOBIUS, LLAMA, GEMMA = "mobius-default", "dynamo-llama", "dynamo-gemma2"
FEW = 60
"""Tokens that the smallest models know, but for the last."""
TEXT = ids(32, seed=7)[0] % FEW


@cache
def baseline_of(name: str) -> Baseline:
    """An original that is read once, however many conversions of it are verified."""
    return Baseline.of(original(name), threads=1, is_kept=True)


def compared(name: str, path: Path, *, quick: bool = False) -> Verification:
    inputs = Inputs(TEXT, new_tokens=2, context=32, threads=1, quick=quick)
    return Verification(baseline_of(name), path, load(path), inputs, Steps(silent))


def expect_conversion(verification: Verification) -> None:
    """Do what ``report`` does before it measures anything."""
    path, loaded = verification.converted, verification.loaded
    refuse_stranger(verification.baseline.opened, path, loaded)
    plan = plan_in(loaded.model.metadata_props)
    assert plan is not None
    expect_layers(path, loaded.model, plan)
    with failing(path):
        found = [*verification.fidelity, verification.tables]
    expect_held(found, path)


@pytest.fixture(scope="module")
def centred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with offsets, and scales as nodes; windows are in ``test_window``."""
    folder = tmp_path_factory.mktemp("calibrated")
    text = np.random.default_rng(1).integers(0, FEW, 400)
    statistics = calibrate(original(LLAMA), text, context=100)
    write_calibration(folder / "statistics", statistics, overwrite=False)
    options = Options(calibration=folder / "statistics", residual_length=0, sink_tokens=0)
    convert(original(LLAMA), folder / "model.onnx", options=options)
    return folder / "model.onnx"


def damaged(whole: Path, change: Callable[[onnx.ModelProto], None], path: Path) -> Path:
    model = onnx.load(whole)
    content = model.SerializeToString()
    change(model)
    assert model.SerializeToString() != content
    onnx.save(model, path)
    return path


def complaint(verification: Verification) -> str:
    """What a report has against a model; nothing if it holds."""
    try:
        found = verification.report()
    except VerificationError as error:
        return str(error)
    return "; ".join(entry.detail for entry in found.checks if entry.holds is False)


def assert_found(name: str, path: Path, place: str, *, quick: bool = False) -> None:
    """``quick``: all that is checked quickly is checked at length, too, so that may be enough."""
    verification = compared(name, path, quick=quick)
    said = complaint(verification)
    if quick and (not said or place not in said):
        verification = compared(name, path)
        said = complaint(verification)
    assert said
    assert place in said
    with pytest.raises(VerificationError) as refused:
        expect_conversion(verification)
    assert str(path) in str(refused.value)


def test_whole_models_pass(centred: Path) -> None:
    for name, after in (
        *((name, converted(name)) for name in (DYNAMO, GENAI, MOBIUS, GEMMA)),
        (LLAMA, centred),
    ):
        verification = compared(name, after)
        found = verification.report()
        assert found.holds, [entry for entry in found.checks if not entry.holds]
        expect_conversion(verification)


MODELS = DYNAMO, GENAI, MOBIUS


@pytest.mark.parametrize("place", range(len(DAMAGES)), ids=lambda place: DAMAGES[place].name)
def test_a_damage_is_found(tmp_path: Path, place: int) -> None:
    """The models take turns; the first of them that has such a part is damaged."""
    damage, first, path = DAMAGES[place], place % len(MODELS), tmp_path / "damaged.onnx"
    for name in MODELS[first:] + MODELS[:first]:
        try:
            damaged(converted(name), damage.change, path)
        except NothingToDamageError:
            continue
        assert_found(name, path, damage.place, quick=True)
        return
    pytest.skip("the models have no such part")


OF_BOTH = {"one_bit", "swap_kv_heads", "roll_vocabulary", "cross_caches", "see_the_future"}


@pytest.mark.parametrize(
    "damage",
    [*OF_CALIBRATION, *(one for one in DAMAGES if one.name in OF_BOTH)],
    ids=lambda damage: damage.name,
)
def test_a_damage_to_scales_is_found(tmp_path: Path, centred: Path, damage: Damage) -> None:
    path = damaged(centred, damage.change, tmp_path / "damaged.onnx")
    assert_found(LLAMA, path, damage.place)


def test_a_shorter_window_is_found(tmp_path: Path) -> None:
    path = damaged(converted(GEMMA), graph.a_shorter_window, tmp_path / "damaged.onnx")
    assert_found(GEMMA, path, "layer 0")


def test_padding_that_is_not_hidden_is_found(tmp_path: Path) -> None:
    """A target counts padding itself; a prompt without any would not show what it counts."""
    whole = tmp_path / "whole.onnx"
    convert(original(HALF), whole, target=target_of("cann", max_positions=128))

    def count_none(model: onnx.ModelProto) -> None:
        none = integer(model, 0)
        for node in attentions(model):
            node.input[Attention.left_padding.slot] = none

    path = damaged(whole, count_none, tmp_path / "damaged.onnx")
    for model, lost in ((whole, ()), (path, ("layer 0, results of attention behind padding",))):
        found = [check for check in compared(HALF, model).fidelity if check.holds is False]
        assert tuple(check.detail.split(":")[0] for check in found) == lost


def test_no_figures_of_a_damaged_model(tmp_path: Path) -> None:
    """Its figures would be those of something else than its codecs."""
    (damage,) = (one for one in DAMAGES if one.name == "one_bit")
    path = damaged(converted(GENAI), damage.change, tmp_path / "damaged.onnx")
    models = original(GENAI), converted(GENAI), path
    outcome = run("report", *models, "--tokens", 32, "--context", 32, "--threads", 1)
    sentence = outcome.sentence(5)
    assert str(path) in sentence
    assert "weights and nodes are the original's" in sentence
    assert outcome.out == ""
    assert run("verify", *models[::2], "--tokens", 32, "--context", 32).code == 5


def test_figures_that_could_not_be_checked_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tq_onnx.errors import UnsupportedModelError

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedModelError("a reason")

    monkeypatch.setattr(fidelity, "prepare", refuse)
    found = report(original(GENAI), [converted(GENAI)], TEXT, source="", context=32, threads=1)
    (warning,) = found.warnings
    assert "a reason" in warning
