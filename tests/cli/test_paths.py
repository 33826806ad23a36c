"""An empty path is refused; it is not the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import tq_onnx
from tests.cli.run import run
from tests.files.models import inline, snapshot
from tq_onnx.errors import UsageError


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", ""),
        ("convert", "model.onnx", "-o", ""),
        ("convert", "model.onnx", "--calibration", ""),
        ("inspect", ""),
        ("verify", "", "model.onnx"),
        ("verify", "model.onnx", ""),
        ("verify", "model.onnx", "model.onnx", "--text", ""),
        ("verify", "model.onnx", "model.onnx", "--tokenizer", ""),
        ("verify-on-npu", ""),
        ("verify-on-npu", "-o", ""),
        ("report", "", "model.onnx"),
        ("report", "model.onnx", ""),
        ("report", "model.onnx", "model.onnx", "--picture", ""),
        ("report", "model.onnx", "model.onnx", "--markdown", ""),
        ("bench", ""),
        ("bench", "model.onnx", ""),
        ("calibrate", "", "--text", "model.onnx"),
        ("calibrate", "model.onnx", "--text", ""),
        ("calibrate", "model.onnx", "--text", "model.onnx", "-o", ""),
        ("generate", "", "x"),
        ("demo", "--keep", ""),
        ("info", ""),
    ],
    ids=" ".join,
)
def test_commands_refuse_an_empty_path(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inline(tmp_path / "here").parent)
    before = snapshot(tmp_path)
    assert "the path is empty" in run(*arguments).sentence(2)
    assert snapshot(tmp_path) == before


def test_functions_refuse_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = inline(tmp_path / "here")
    monkeypatch.chdir(model.parent)
    before = snapshot(tmp_path)
    for call in (
        lambda: tq_onnx.convert(""),
        lambda: tq_onnx.convert(model, ""),
        lambda: tq_onnx.convert(model, calibration=""),
        lambda: tq_onnx.inspect(""),
        lambda: tq_onnx.verify("", model),
        lambda: tq_onnx.verify(model, ""),
        lambda: tq_onnx.report(model, ""),
        lambda: tq_onnx.report(model, [model, ""]),
        lambda: tq_onnx.bench(""),
        lambda: tq_onnx.calibrate("", model),
        lambda: tq_onnx.calibrate(model, ""),
        lambda: tq_onnx.load(""),
    ):
        with pytest.raises(UsageError, match="a path is empty"):
            call()
    assert snapshot(tmp_path) == before
