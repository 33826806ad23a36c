"""The pass of Olive: `olive run` with the recipe of examples/olive makes a model that verifies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tq_onnx
from tests.exports.conftest import Exports
from tests.exports.recipes import ROOT
from tq_onnx.integrations.modelcard import MARK
from tq_onnx.runtime.library import get_library_path, library_name

pytestmark = [
    pytest.mark.exports,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the exporters' pins need Python 3.11"),
]


def test_the_recipe(exports: Exports, environments: Path, tmp_path: Path) -> None:
    original = exports("olive")
    python = environments / "olive" / "bin" / "python"
    config, output = tmp_path / "olive-tq.json", tmp_path / "converted"
    variables = {"PYTHONPATH": str(ROOT), "TQ_ONNX_LIBRARY": str(get_library_path())}
    for command in (
        ("-m", "tq_onnx", "olive-config", config),
        (
            *(ROOT / "models" / "export_olive.py", ROOT / "models" / "qwen3-tiny", output),
            *("--package-config", config),
        ),
    ):
        done = subprocess.run(
            [str(word) for word in (python, *command)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    passes = json.loads(config.read_text())["passes"]
    assert passes["TurboQuantKVCache"]["module_path"].startswith("tq_onnx.")
    assert "ModelBuilder" in passes  # Olive's own are there, too
    assert tq_onnx.verify(original, output, tokens=128, quick=True).holds
    plan = tq_onnx.inspect(output / "model.onnx").plan
    assert plan.interface.logits == "logits"  # as genai_config.json names it
    assert (output / library_name()).is_file()
    assert MARK in (output / "README.md").read_text()
    session = json.loads((output / "genai_config.json").read_text())["model"]["decoder"]
    assert session["session_options"]["custom_ops_library"] == library_name()
