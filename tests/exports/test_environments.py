"""Without a package index the lane is skipped, with one sentence; anything else is a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exports import recipes
from tests.exports.recipes import ROOT, UNREACHABLE, make_exports

pytestmark = pytest.mark.exports

#: Nothing listens on the discard port of this machine.
NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
#: Only what the environment says.
ALONE = {"PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}


def test_no_package_index(tmp_path: Path) -> None:
    told = make_exports("dynamo", tmp_path, environments=tmp_path, **ALONE, **NOWHERE)

    assert told == (UNREACHABLE, "no package index answers pip for the packages of torch.txt")
    assert not (tmp_path / "torch.txt").exists()


def test_packages_that_no_index_has(tmp_path: Path) -> None:
    status, told = make_exports(
        "dynamo", tmp_path, environments=tmp_path, **ALONE, PIP_NO_INDEX="1"
    )

    assert status == 1
    assert told.startswith("pip could not install torch.txt:\n")
    assert "No matching distribution found for torch" in told
    assert not (tmp_path / "torch.txt").exists()


def made_with(environments: Path, pins: str) -> None:
    """An environment that is there, as its pins say, but without a package in it."""
    arguments = ["--without-pip", str(environments / "torch")]
    subprocess.run([sys.executable, "-m", "venv", *arguments], check=True)
    (environments / "torch.txt").write_text(pins, encoding="utf-8")


PINS = (ROOT / "models" / "environments" / "torch.txt").read_text(encoding="utf-8")


def test_a_recipe_that_fails(tmp_path: Path) -> None:
    made_with(tmp_path, PINS)
    status, told = make_exports("dynamo", tmp_path, environments=tmp_path, **ALONE, **NOWHERE)

    assert status == 1
    assert told.startswith("export_dynamo.py")
    assert "No module named 'onnx_ir'" in told


def test_other_pins_than_it_was_made_with(tmp_path: Path) -> None:
    made_with(tmp_path, PINS.replace("torch==", "torch>="))
    status, _ = make_exports("dynamo", tmp_path, environments=tmp_path, **ALONE, **NOWHERE)

    assert status == UNREACHABLE


def test_exports_are_made_once_for_each_state_of_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def make(route: str, folder: Path, **_: object) -> tuple[int, str]:
        calls.append(route)
        (folder / route).mkdir(parents=True)
        (folder / route / "model.onnx").write_text(route)
        return 0, ""

    monkeypatch.setattr(recipes, "make_exports", make)
    for number in range(2):
        folder = tmp_path / str(number)
        assert recipes.export_once("genai", folder, environments=tmp_path) == (0, "")
        assert (folder / "genai" / "model.onnx").read_text() == "genai"
    assert calls == ["genai"]
    models = tmp_path / "models"
    shutil.copytree(ROOT / "models", models)
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    assert recipes.kept("genai", tmp_path).is_dir()
    (models / "environments" / "torch.txt").write_text(PINS.replace("torch==", "torch>="))
    assert not recipes.kept("genai", tmp_path).is_dir()
