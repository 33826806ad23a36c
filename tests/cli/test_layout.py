"""Tables and text in narrow terminals: no line breaks inside a word, whatever a command prints."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import run
from tests.integrations.genai_folder import genai_folder
from tests.language.models import folder
from tq_onnx.cli import layout, terminal
from tq_onnx.measure.tables import TextTable

WIDTHS = (80, 60)
LINES = ("table_lines", "fact_lines", "text_lines")


def expect_whole_words(lines: list[str], unbroken: list[str], width: int) -> None:
    """Lines hold words of the unbroken text only; one that is too long is a single word."""
    known = {word for line in unbroken for word in line.split()} | {"\\"}
    for line in lines:
        words = [word for word in line.split() if set(word) != {"─"}]
        assert set(words) <= known, (line, set(words) - known)
        assert len(line) <= width or len(words) <= 2, line


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lays out everything that is printed for narrow terminals, too; yields the names of what."""
    seen: list[str] = []

    def checking(name: str, lay_out: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def laid_out(content: Any, width: None) -> list[str]:
            seen.append(name)
            wide = lay_out(content, None)
            for columns in WIDTHS:
                expect_whole_words(lay_out(content, columns), wide, columns)
            return wide

        return laid_out

    for name in LINES:
        monkeypatch.setattr(terminal, name, checking(name, getattr(layout, name)))
    yield seen


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a folder with a name of many words")
    genai_folder(path / "qwen3-genai")
    return path


@pytest.mark.parametrize(
    "line",
    [
        "presets",
        "inspect {original}",
        "inspect {converted}",
        "inspect {place}/qwen3-genai",
        "fit {original}",
        "fit {original} --context 512 --memory 1GB",
        "diff {original} {converted}",
        "info",
        "convert {original} -o {place}/out.onnx",
        "convert {place}/qwen3-genai --residual-length 16",
        "bench {original} --contexts 32 --tokens 2 --threads 1",
        "verify {original} {converted} --tokens 32 --context 32 --new-tokens 2 --threads 1",
        "report {original} {converted} --tokens 64 --context 64 --layers --threads 1",
    ],
    ids=lambda line: line.partition("{")[0],
)
def test_no_command_breaks_a_word(line: str, place: Path, checked: list[str]) -> None:
    models = {form: folder(form) / "model.onnx" for form in ("original", "int4")}
    found = {"original": models["original"], "converted": models["int4"], "place": place}
    outcome = run(*(word.format(**found) for word in line.split()))
    assert outcome.code == 0, outcome.err
    assert set(checked) & {"table_lines", "fact_lines"}


def test_a_table_is_as_narrow_as_it_has_to_be() -> None:
    table = TextTable.of(("name", ">count"), [("one of the words", "1,000"), ("two", "2")], "Title")
    assert layout.table_lines(table, None) == [
        "Title",
        "",
        "  name              count",
        "  ───────────────────────",
        "  one of the words  1,000",
        "  two                   2",
        "",
    ]
    assert layout.table_lines(table, 16)[2:6] == [
        "  name     count",
        "  ──────────────",
        "  one of   1,000",
        "  the",
    ]
    assert layout.table_lines(table, 13)[2:] == [
        "  name   one",
        "         of",
        "         the",
        "         words",
        "  count  1,000",
        "",
        "  name   two",
        "  count  2",
        "",
    ]


def test_a_terminal_shows_the_brief_columns() -> None:
    table = TextTable.of(("a", "b", ">c"), [("1", "2", "3")], brief=("a", ">c"))
    assert layout.table_lines(table, 80)[1].split() == ["a", "c"]
    assert layout.table_lines(table, None)[1].split() == ["a", "b", "c"]


def test_a_command_goes_on_in_the_next_line() -> None:
    assert layout.text_lines("tq-onnx verify first.onnx second.onnx", 30, "next  ") == [
        "next  tq-onnx verify \\",
        "        first.onnx \\",
        "        second.onnx",
    ]


def test_wide_characters_take_two_columns() -> None:
    table = TextTable.of(("名前", "x"), [("模型", "1"), ("abc", "2")])
    assert layout.table_lines(table, None)[1:] == [
        "  名前  x",
        "  ───────",
        "  模型  1",
        "  abc   2",
        "",
    ]


def test_a_real_terminal() -> None:
    """The words of a wide terminal are those of a narrow one."""

    def shown(columns: int) -> str:
        main, other = pty.openpty()
        environment = {**os.environ, "COLUMNS": str(columns)}
        words = [sys.executable, "-m", "tq_onnx", "presets"]
        subprocess.run(words, stdout=other, env=environment, check=True, timeout=300)
        os.close(other)
        parts = []
        try:
            while part := os.read(main, 65536):
                parts.append(part)
        except OSError:  # the end of a terminal
            pass
        finally:
            os.close(main)
        return b"".join(parts).decode()

    lines = shown(60).splitlines()
    assert max(map(len, lines)) <= 60
    expect_whole_words(lines, shown(200).splitlines(), 60)
