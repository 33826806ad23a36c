"""Paths that name no model: an empty one is not the current folder, and a folder may have none."""

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
        ("report", "", "model.onnx"),
        ("report", "model.onnx", ""),
        ("report", "model.onnx", "model.onnx", "--picture", ""),
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


@pytest.mark.parametrize("files", [(), ("notes.txt",)], ids=["empty", "text"])
def test_a_folder_without_a_model_is_a_file_problem(files: tuple[str, ...], tmp_path: Path) -> None:
    model, folder = inline(tmp_path), tmp_path / "folder"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("no model")
    before = snapshot(tmp_path)
    told = f"{folder}: there is no ONNX file in this folder (it has {''.join(files) or 'no files'})"
    commands = "inspect fit convert calibrate adopt bench chat info"
    for name in commands.split():
        assert told in run(name, folder).sentence(4), name
    for name in ("verify", "report", "diff"):
        assert told in run(name, model, folder).sentence(4), name
    assert told in run("generate", folder, "--prompt", "x").sentence(4)
    assert "no genai_config.json" in run("serve", folder).sentence(4)
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
