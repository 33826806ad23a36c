"""Presets with two classes of coordinates: from a calibration to a model that verify believes."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.cli.run import run
from tests.integrations.genai_folder import bundled_genai
from tq_onnx.codec.classmatrices import INVERSION, inversion_error
from tq_onnx.codec.presets import PRESETS as ALL_PRESETS
from tq_onnx.conversion.calibrationfile import read_calibration, write_calibration
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.plan import METADATA_PLAN, Plan

PRESETS = ("int2.75", "int2.5")
TOKENS = 96
"""That verify reads: few, as every check reads all of them."""


def not_held(document: Any) -> list[str]:
    """What verify says of the checks that do not hold."""
    return [each["detail"] for each in document["report"]["checks"] if not each["holds"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a folder of onnxruntime-genai, calibrated."""
    model = build_bundled("genai", tmp_path_factory.mktemp("classes") / "m")
    text = model.parent.parent / "text.txt"
    text.write_text(heldout_text(), encoding="utf-8")
    found = run(
        *("calibrate", model, "--text", text, "--tokens", 1024, "--context", 256),
        *("-o", model.parent.parent / "statistics"),
    )
    assert found.code == 0, found.err
    return model.parent


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    path = folder.parent / "int2.5.onnx"
    model, statistics = folder / "model.onnx", folder.parent / "statistics"
    made = run("convert", model, "--preset", "int2.5", "--calibration", statistics, "-o", path)
    assert made.code == 0, made.err
    assert "keys split_eighth 4, values split_quarter 3, 38 and 38 bytes a row" in made.out
    return path


def test_verify_holds_and_inspect_tells_which(folder: Path, small: Path) -> None:
    found = run("verify", folder / "model.onnx", small, "--json", "--tokens", TOKENS)
    document = found.document
    assert found.code == 0, not_held(document)
    assert document["report"]["quality"]["kl_mean"] < 0.001
    shown = run("inspect", small)
    assert "16 of 128 coordinates of a key; pairs i, i + 64 by heads" in shown.out
    baked = [
        value.const_value.nbytes
        for name, value in ir.load(small).graph.initializers.items()
        if name.startswith(("tq.key_encode", "tq.key_read", "tq.value_encode", "tq.value_read"))
    ]
    assert re.search(rf"matrices per KV head +{sum(baked):,} bytes in the model\n", shown.out)
    classes = run("inspect", small, "--json").document["classes"]
    plan = Plan.from_json(ir.load(small).metadata_props[METADATA_PLAN])
    assert [one["layer"] for one in classes] == [layer.layer for layer in plan.layers]
    for one in classes:
        assert [len(head) for head in one["heads"]] == [16] * plan.layers[0].kv_num_heads
    assert classes[0]["heads"] != classes[-1]["heads"]


def test_a_matrix_that_is_not_the_conversions_is_found(folder: Path, small: Path) -> None:
    model = ir.load(small)
    for role in ("key", "value"):
        encode, read = (
            model.graph.initializers[f"tq.{role}_{name}.1"].const_value.numpy()
            for name in ("encode", "read")
        )
        assert inversion_error(encode, read) < INVERSION
    damages = {
        "read": ("tq.key_read.1", "layer 1 key: rotation"),
        # Both halves of a pair that fit each other, but not the plan.
        "both": ("tq.value_encode.1", "scales or offsets are not those of the conversion"),
    }
    for name, (damaged, says) in damages.items():
        model = ir.load(small)
        value = model.graph.initializers[damaged]
        matrices = value.const_value.numpy() * np.float32(1.25)
        value.const_value = ir.tensor(matrices, name=damaged)
        if name == "both":
            other = model.graph.initializers["tq.value_read.1"]
            read = other.const_value.numpy() / np.float32(1.25)
            other.const_value = ir.tensor(read, name="tq.value_read.1")
        path = small.parent / f"{name}.onnx"
        ir.save(model, path)
        shutil.copyfile(folder / "model.onnx.data", small.parent / "model.onnx.data")
        found = run("verify", folder / "model.onnx", path, "--json", "--tokens", TOKENS, "--quick")
        assert found.code == 5
        failed = not_held(found.document)
        assert any(says in detail for detail in failed), failed


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_refused(folder: Path, tmp_path: Path, preset: str) -> None:
    model, statistics = folder / "model.onnx", folder.parent / "statistics"
    out = ("-o", tmp_path / "out", "--preset", preset)
    assert run("convert", model, *out).sentence(2) == (
        f"the preset {preset} gives more bits to the coordinates that matter, and only statistics "
        "of this model tell which these are; give --calibrate, or with --calibration the file that "
        "`tq-onnx calibrate` wrote of this model"
    )
    known = read_calibration(statistics)
    older = tuple(replace(layer, value_covariance=None) for layer in known.layers)
    write_calibration(tmp_path / "older", replace(known, layers=older))
    source = bundled_genai(tmp_path / "source", "genai")
    told = run("convert", source, *out, "--calibration", statistics).sentence(2)
    recent = ALL_PRESETS[preset].window
    assert told.endswith(
        f"the preset {preset} needs exact tokens, and folders of onnxruntime-genai have them only "
        f"as far as max_length leaves them rows; give --residual-length {recent} and "
        "--sink-tokens 4, use --preset int3, or convert with --residual-length 0, which costs "
        "8 % of perplexity"
    )
    told = run("convert", model, *out, "--calibration", tmp_path / "older").sentence(2)
    assert "does not tell which coordinates matter: it was made by an older version" in told
    given = (*out, "--calibration", statistics)
    for original in (model, source):
        told = run("convert", original, *given, "--paged").sentence(2)
        assert f"the preset {preset} needs exact tokens, and pages have them only as far" in told
    assert told.endswith(
        "use --preset int3, or convert with --residual-length 0, which costs 8 % of perplexity"
    )
    # No calibration and no window would make them right.
    for target in ("cann", "web"):
        refused = run("convert", model, *out, "--target", target).sentence(2)
        assert "for caches of split_" in refused
        assert "calibrat" not in refused
        assert "--residual-length" not in refused
    assert "class of coordinates that is a power of two, not" in run(
        "convert", model, *given, "--rotation", "hadamard"
    ).sentence(2)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("older", "source")]


def test_pages_take_it_when_no_window_is_meant(folder: Path, tmp_path: Path) -> None:
    model, statistics = folder / "model.onnx", folder.parent / "statistics"
    path = tmp_path / "paged.onnx"
    made = run(
        *("convert", model, "--preset", "int2.5", "--calibration", statistics),
        *("--paged", "--residual-length", 0, "--sink-tokens", 0, "-o", path),
    )
    assert made.code == 0, made.err
    found = run("verify", model, path, "--tokens", TOKENS, "--quick")
    assert found.code == 0, found.out
