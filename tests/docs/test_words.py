"""Names that are no nouns are counted, and riddles are seen."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(ROOT / ".ci")  # as for `python .ci/words.py`
    monkeypatch.setattr(sys, "argv", ["words.py"])
    return importlib.import_module("words")


def test_a_name_and_a_phrase_too_many_fail(
    words: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text('[names]\n"tq_onnx" = 1\n')
    module = tmp_path / "tq_onnx" / "module.py"
    module.parent.mkdir()
    module.write_text(
        "def f(own, size):\n    return [x for found in own]  # --seed, pip --platform\n"
    )
    (tmp_path / "README.md").write_text("The reader is\ntold nothing.\n")
    monkeypatch.setattr(words, "BUDGET", budget)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "git", lambda *_: "tq_onnx/module.py\nREADME.md\n")
    assert words.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "tq_onnx/module.py:1: own",
        "tq_onnx/module.py:2: found",
        "tq_onnx/module.py:2: --seed",
        "README.md:1: 'is told'",
        "tq_onnx has 2 names that are no nouns, not 1",
    ]


def test_what_is_counted(words: types.ModuleType) -> None:
    source = """
class Record:
    done: int
    def f(self, *rest, other=None):
        self.kept = one = 0
        with open(one) as _given:
            match one:
                case [*more]: pass
        try: pass
        except OSError as made: pass
        for same, size in {}: pass
        left, right = size, size
"""
    names = [name for _, name in words.names(ast.parse(source))]
    assert sorted(names) == sorted(["rest", "other", "one", "_given", "more", "made", "same"])


def test_docstrings_are_no_messages(words: types.ModuleType) -> None:
    tree = ast.parse('"""it is told"""\nraise E(f"{x} is asked of " "it for\\never")')
    found = [
        phrase for line, text in words.strings(tree) for _, phrase in words.riddles(line, text)
    ]
    assert found == ["is asked", "for ever"]
