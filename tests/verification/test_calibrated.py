"""``verify`` of a calibrated model: is its calibration of this model, these layers and heads?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.run import run
from tests.runtime.models import original as fixture
from tests.runtime.test_fingerprint import changed, in_int4, of_another_training, rounded_to_half
from tq_onnx.codec.calibration import Calibration, LayerStatistics
from tq_onnx.codec.rotaryangles import Rotary
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.conversion.calibrationrecord import METADATA_CALIBRATION, record_in, record_of
from tq_onnx.conversion.options import CENTER_FROM, Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import ModelFileError
from tq_onnx.files.load import load
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.tokens import calibration_text
from tq_onnx.plan import Plan, plan_in
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_original
from tq_onnx.verification.calibrated import (
    CALIBRATE_AGAIN,
    OF_THESE_ANGLES,
    OF_THESE_HEADS,
    OF_THIS_MODEL,
    advice,
    calibration_checks,
)
from tq_onnx.verification.checks import PropertyCheck, failed
from tq_onnx.verification.findings import VerifyReport
from tq_onnx.verification.verify import verify

TEXTS = {
    "prose": heldout_text()[:600],
    "code": Path(__file__).read_text(encoding="utf-8"),
    "German": "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist "
    "Verpflichtung aller staatlichen Gewalt. Das Deutsche Volk bekennt sich darum zu "
    "unverletzlichen und unveräußerlichen Menschenrechten als Grundlage jeder Gemeinschaft. ",
    "Chinese": "人人生而自由、在尊严和权利上一律平等。他们赋有理性和良心、并应以兄弟关系相对待。"
    * 2,
}


def ids(text: str, count: int = 400) -> np.ndarray:
    """The bundled model's tokens are bytes."""
    return np.frombuffer(text.encode(), np.uint8)[:count].astype(np.int64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as one file."""
    folder = tmp_path_factory.mktemp("calibrated")
    path = folder / "model.onnx"
    onnx.save(onnx.load(build_bundled("dynamo", folder / "m")), path)
    return path


@pytest.fixture(scope="module")
def opened(model: Path) -> OpenModel:
    return open_original(model, threads=1)


@pytest.fixture(scope="module")
def statistics(model: Path) -> Calibration:
    return calibrate(model, ids(calibration_text(), 2048), context=512, threads=1)


@pytest.fixture(scope="module")
def converted(model: Path, statistics: Calibration) -> Path:
    return converted_with(statistics, model, "converted")


def converted_with(statistics: Calibration, model: Path, name: str, preset: str = "int4") -> Path:
    """A conversion by the pipeline, which runs no model and so takes any calibration."""
    file, output = model.with_name(f"{name}.statistics"), model.with_name(f"{name}.onnx")
    write_calibration(file, statistics)
    convert(model, output, preset=preset, options=Options(calibration=file))
    return output


def plan_of(path: Path) -> Plan:
    plan = plan_in(load(path).model.metadata_props)
    assert plan is not None
    return plan


def judged(
    statistics: Calibration, opened: OpenModel, plan: Plan, text: np.ndarray
) -> tuple[PropertyCheck, PropertyCheck]:
    record = record_of(statistics, CENTER_FROM)
    first, angles, second = calibration_checks(record, opened, text)
    assert [each.name for each in (first, angles, second)] == [
        *(OF_THIS_MODEL, OF_THESE_ANGLES, OF_THESE_HEADS)
    ]
    assert angles.holds, angles
    return first, second


@pytest.mark.parametrize("name", TEXTS)
def test_other_texts_are_of_the_same_model(
    statistics: Calibration, opened: OpenModel, converted: Path, name: str
) -> None:
    for count in (400, 40):
        found = judged(statistics, opened, plan_of(converted), ids(TEXTS[name], count))
        assert [check.holds for check in found] == [True, True], found


def test_tokens_of_no_language_and_rounded_weights_are_no_fault(
    statistics: Calibration, opened: OpenModel, converted: Path, model: Path
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 300)
    plan = plan_of(converted)
    others = [open_original(in_int4(model), threads=1)]
    others.append(open_original(changed(model, rounded_to_half, "half"), threads=1))
    for original, text in ((opened, noise), *((one, ids(TEXTS["prose"])) for one in others)):
        found = judged(statistics, original, plan, text)
        assert [check.holds for check in found] == [True, True], found


def test_random_weights_and_ids_of_another_distribution_are_no_fault(converted: Path) -> None:
    """Keys and values of layers and heads are alike there, and frequent ids make tables narrow."""
    path, random = fixture("dynamo-llama"), np.random.default_rng(3)
    opened, plan = open_original(path, threads=1), plan_of(converted)
    frequent = np.minimum(random.zipf(1.5, 812), opened.vocabulary) - 1
    statistics = calibrate(path, frequent[:512], context=128, threads=1)
    text = random.integers(0, opened.vocabulary, 300)
    for count in (40, 64, 300):
        *_, found = judged(statistics, opened, plan, text[:count])
        assert found.holds, (count, found)
    *_, found = judged(reverse_heads(*KEYS)(statistics), opened, plan, frequent[512:])
    assert found.holds is False, found


KEYS, VALUES = ("k_mean", "k_energy", "k_turned_mean"), ("v_mean", "v_energy")


def exchange_layers(*tables: str) -> Callable[[Calibration], Calibration]:
    def change(found: Calibration) -> Calibration:
        one, other = found.layers[1:3]
        pair = (
            replace(one, **{name: getattr(other, name) for name in tables}),
            replace(other, **{name: getattr(one, name) for name in tables}),
        )
        return replace(found, layers=(found.layers[0], *pair, *found.layers[3:]))

    return change


def reverse_heads(
    *tables: str, layers: slice = slice(None)
) -> Callable[[Calibration], Calibration]:
    def change(found: Calibration) -> Calibration:
        reversed_ = [
            replace(layer, **{name: getattr(layer, name)[:, ::-1] for name in tables})
            for layer in found.layers
        ]
        return replace(
            found,
            layers=tuple(
                other if index in range(*layers.indices(len(reversed_))) else own
                for index, (own, other) in enumerate(zip(found.layers, reversed_, strict=True))
            ),
        )

    return change


def turning(layer: LayerStatistics) -> Rotary:
    assert layer.rotary is not None
    return layer.rotary


def exchange_caches(found: Calibration) -> Calibration:
    layers = tuple(
        replace(
            layer,
            k_mean=layer.v_mean,
            k_energy=layer.v_energy,
            v_mean=layer.k_mean,
            v_energy=layer.k_energy,
            k_turned_mean=turning(layer).turned_mean(layer.v_mean[-1]),
        )
        for layer in found.layers
    )
    return replace(found, layers=layers)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (exchange_layers(*KEYS), "keys of layer 1 .* exchanged with layer 2"),
        (exchange_layers(*VALUES), "values of layer 1 .* exchanged with layer 2"),
        (exchange_layers(*KEYS, *VALUES), "keys of layer 1 .* exchanged with layer 2"),
        (reverse_heads(*KEYS), "keys of layer 0 .* exchanged between heads 0 and 1"),
        (
            reverse_heads(*KEYS, layers=slice(2, 3)),
            "keys of layer 2 .* exchanged between heads 0 and 1",
        ),
        (reverse_heads(*VALUES), "values of layer . .* exchanged between heads"),
        (exchange_caches, "keys of layer 0 .* exchanged with its values"),
    ],
    ids=["keys", "values", "layers", "heads", "heads of a layer", "heads of values", "caches"],
)
def test_tables_in_other_places_are_found(
    statistics: Calibration,
    opened: OpenModel,
    converted: Path,
    change: Callable[[Calibration], Calibration],
    place: str,
) -> None:
    for name in ("prose", "code"):
        _, found = judged(change(statistics), opened, plan_of(converted), ids(TEXTS[name]))
        assert found.holds is False, (name, found)
        assert re.search(place, found.detail), found


@pytest.mark.parametrize(
    "change",
    [lambda angles: angles * 1.01, lambda angles: angles**1.1, np.negative],
    ids=["other positions", "another theta", "conjugate pairs"],
)
def test_angles_by_which_keys_do_not_turn_are_found(
    statistics: Calibration, opened: OpenModel, converted: Path, change: Callable[..., np.ndarray]
) -> None:
    layer = replace(statistics.layers[2], frequencies=change(statistics.layers[2].frequencies))
    layers = (*statistics.layers[:2], layer, statistics.layers[3])
    record = record_of(replace(statistics, layers=layers), CENTER_FROM)
    found = calibration_checks(record, opened, ids(TEXTS["prose"], 40))
    (lost,) = failed(found)
    assert lost.name == OF_THESE_ANGLES
    assert "is left in layer 2, the most" in lost.detail
    assert advice(found, record) == CALIBRATE_AGAIN


def test_a_calibration_of_another_model_does_not_verify(model: Path) -> None:
    """However it got in: ``convert`` would have refused it."""
    other = changed(model, of_another_training, "other")
    strange = calibrate(other, ids(calibration_text(), 512), context=256, threads=1)
    path = converted_with(strange, model, "strange")
    report = verify(model, path, ids(TEXTS["prose"], 64), source="", quick=True, threads=1)
    assert isinstance(report, VerifyReport)
    assert not report.holds
    (lost, *_) = failed(report.checks)
    assert lost.name == OF_THIS_MODEL
    assert "4 of 4 layers cache something else for the same tokens; layer 0: the key of head" in (
        lost.detail
    )
    assert report.advice == CALIBRATE_AGAIN


def test_a_paragraph_is_enough_to_verify_and_said_to_be_little(model: Path) -> None:
    few = calibrate(model, ids(calibration_text(), 130), context=512, threads=1)
    assert few.context == 130
    path = converted_with(few, model, "few")
    report = verify(model, path, ids(TEXTS["prose"], 256), source="", new_tokens=2, threads=1)
    assert isinstance(report, VerifyReport)
    assert report.holds, failed(report.checks)
    assert report.warnings == ()
    record = record_in(load(path).model.metadata_props, plan_of(path))
    assert record is not None
    told = "has read 130 tokens, too few to tell all directions: calibrate on a text of"
    assert re.search(told, record.facts.shortage)
    lost = PropertyCheck("keys and values reconstruct as theory says", False, "")
    assert advice([lost], record) == record.facts.shortage


def test_the_record_is_read_as_it_was_written(statistics: Calibration, converted: Path) -> None:
    metadata, plan = load(converted).model.metadata_props, plan_of(converted)
    found = record_in(metadata, plan)
    assert found is not None
    wanted = record_of(statistics, CENTER_FROM)
    assert (found.facts, found.fingerprint_tokens) == (wanted.facts, wanted.fingerprint_tokens)
    for own, other in zip(found.layers, wanted.layers, strict=True):
        for one, its in zip(own, other, strict=True):
            for name in ("mean", "deviation", "fingerprint"):
                np.testing.assert_allclose(
                    getattr(one, name), getattr(its, name), rtol=2e-3, atol=1e-6
                )
    assert len(metadata[METADATA_CALIBRATION]) < 20 * 4 * 2 * 128


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: text.replace('"version":3', '"version":2'),
        lambda text: text.replace('"context":512', '"context":0'),
        lambda text: text.replace('"context":512', '"context":true'),
        lambda text: text.replace('"mean":"', '"mean":"!'),
        lambda text: text.replace('"mean":"', '"mean":"AAAA'),
    ],
)
def test_a_damaged_record_is_refused(converted: Path, damage: Callable[[str], str]) -> None:
    metadata = dict(load(converted).model.metadata_props)
    text = damage(metadata[METADATA_CALIBRATION])
    assert text != metadata[METADATA_CALIBRATION]
    with pytest.raises(ModelFileError, match="the record of the model's calibration cannot be"):
        record_in({METADATA_CALIBRATION: text}, plan_of(converted))


def test_the_command_refuses_a_calibration_of_another_model(model: Path, tmp_path: Path) -> None:
    other = changed(model, of_another_training, "another")
    strange = calibrate(other, ids(calibration_text(), 256), context=128, threads=1)
    write_calibration(tmp_path / "statistics", strange)
    output = tmp_path / "out.onnx"
    outcome = run("convert", model, "--calibration", tmp_path / "statistics", "-o", output)
    sentence = outcome.sentence(2)
    assert "is of another model: for the same tokens, layer 0 caches something else" in sentence
    assert not output.exists()
