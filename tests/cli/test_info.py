from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.cli.run import run
from tq_onnx import __version__
from tq_onnx.codec.spec import layout_digest


def test_the_table() -> None:
    outcome = run("info")
    assert outcome.code == 0
    assert outcome.err == ""
    for word in ("tq-onnx", "onnx-ir", "numpy", "python", "CPUExecutionProvider", "kernels use"):
        assert word in outcome.out
    assert "library problem" not in outcome.out


def test_json() -> None:
    document = run("info", "--json").document
    assert document["packages"]["tq-onnx"] == __version__
    assert document["packages"]["onnxruntime"] == onnxruntime.__version__
    assert document["layout_digest"] == document["library"]["layout_digest"] == layout_digest()
    assert document["library"]["registers"] is True
    assert document["library"]["problem"] is None
    assert document["library"]["isa"] in document["library"]["isa_supported"]
    assert set(document["library"]["isa_supported"]) <= set(document["library"]["isa_compiled"])
    assert "CPUExecutionProvider" in document["providers"]
    assert isinstance(document["cpu_features"], list)


def test_a_missing_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    outcome = run("info")
    assert outcome.code == 0
    assert "library problem" in outcome.out
    library = run("info", "--json").document["library"]
    assert library["path"] is None
    assert library["registers"] is False
    assert "nowhere.so" in library["problem"]


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "library.so"
    path.write_text("no library")
    monkeypatch.setenv("TQ_ONNX_LIBRARY", str(path))
    library = run("info", "--json").document["library"]
    assert library["path"] == str(path)
    assert library["registers"] is False
    assert library["problem"]


def test_a_level_that_this_cpu_lacks() -> None:
    # In a process of its own: a library reads the variable once.
    found = subprocess.run(
        [sys.executable, "-m", "tq_onnx.cli.main", "info", "--json"],
        env={**os.environ, "TQ_ONNX_ISA": "none-such"},
        capture_output=True,
        check=True,
    )
    library = json.loads(found.stdout)["library"]
    assert library["isa"] is None
    assert "TQ_ONNX_ISA" in library["problem"]
