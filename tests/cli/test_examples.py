"""The examples of every help text run, on the bundled model and with small figures."""

from __future__ import annotations

import io
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.run import run
from tests.integrations.genai_folder import genai_folder
from tests.integrations.wheels import made_wheel
from tests.language.models import folder
from tq_onnx.cli.main import COMMANDS
from tq_onnx.runtime.platforms import PLATFORMS

ELSEWHERE = {
    "serve": "likewise; tests/serving/test_servers.py",
    "demo": "test_demo.py",
    "olive-config": "needs Olive; tests/exports/test_olive.py",
}
"""Commands whose examples do not run here, with the place where they do."""
SMALL = {
    "convert": "--overwrite",
    "verify": "--tokens 32 --context 32 --new-tokens 2 --quick",
    "report": "--tokens 32 --context 32",
    "bench": "--contexts 32 --threads 1",
    "calibrate": "--text book.txt --context 32 --overwrite",
    "generate": "--max-new-tokens 2",
    "chat": "--max-new-tokens 2",
}
"""What is added to the examples of a command; the last one of equal options counts."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    path = tmp_path_factory.mktemp("examples")
    shutil.copytree(folder("original"), path, dirs_exist_ok=True)
    shutil.copytree(folder("int4"), path / "qwen3-int4")
    shutil.copyfile(folder("int4") / "model.onnx", path / "model.int4.onnx")
    genai_folder(path / "qwen3-genai")
    assert run("convert", path / "qwen3-genai").code == 0
    for platform in PLATFORMS:
        made_wheel(path / "wheels", platform)
    (path / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long. " * 4)
    (path / "config.json").unlink()  # which allows contexts of 2,048 tokens only
    model = path / "model.onnx"
    for preset in ("k8v4", "int3"):
        assert run("convert", model, "--preset", preset).code == 0
    few = ("--text", path / "book.txt", "--context", 32)
    assert run("calibrate", model, *few).code == 0
    return path


def examples(command: str) -> list[str]:
    text = run(command, "--help").out.partition("Example")[2].partition("\n\n")[0]
    # A long line is wrapped, with the rest indented as it is.
    return [line.strip() for line in text.splitlines() if "tq-onnx " in line]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ELSEWHERE])
def test_examples_of_the_help_run(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found = examples(command)
    assert found
    for line in found:
        said, _, called = line.rpartition("| ")
        monkeypatch.setattr(sys, "stdin", io.StringIO(said and shlex.split(said)[1]))
        words = shlex.split(called)[1:]
        outcome = run(*words, *shlex.split(SMALL.get(words[0], "")))
        assert outcome.code == 0, (line, outcome.err)
