"""Each lane runs, finds nothing in its first cases, and would find something."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.cli.run import Outcome
from tests.fuzz import commands, model
from tests.fuzz.commands import Case
from tests.fuzz.found import MODELS, VERIFIED, Edit
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.lanes import LANES, Lane, lane
from tq_onnx.errors import ModelFileError
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.integrations.huggingface import TOKENIZER_FILE, load_tokenizer

FIRST = {"folder": 8}
"""Cases of a lane whose cases take long, instead of 20; ``.ci/run`` runs more, beside the tests."""


@pytest.mark.parametrize("name", LANES)
def test_the_first_cases(name: str, tmp_path: Path) -> None:
    if name == "server":
        pytest.importorskip("httpx", reason="needs tests/serving/requirements.txt")
    chosen = lane(name)
    for number in range(FIRST.get(name, 20)):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = chosen.check(random.Random(number), folder)
        assert case.outcomes
        assert case.problems == [], (number, case.what)


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ({"inspect": Outcome(1, "", "error: a defect\n")}, "exit"),
        ({"inspect": Outcome(4, "", "error: one\nerror: two\n")}, "sentence"),
        ({"inspect": Outcome(4, "", "error: \x1b[31m\n")}, "terminal"),
        ({"convert": Outcome(3, "", "error: no\n")}, "disagreement"),
        ({"inspect": Outcome(3, "", "")}, "disagreement"),
        ({"convert": Outcome(0, "", "")}, "output"),
    ],
)
def test_a_broken_promise_is_noted(
    outcomes: dict[str, Outcome], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = commands.run
    monkeypatch.setattr(
        commands, "run", lambda name, *rest: outcomes.get(name) or right(name, *rest)
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(model.export("dynamo-op23-sdpa"))
    case = Case(tmp_path)
    case.convert(path)
    assert any(problem.startswith(f"{kind}: ") for problem in case.problems)


def test_files_that_stay_or_change_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, path: Path, *_: object) -> Outcome:
        path.write_bytes(b"changed")
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "model.onnx.part").write_bytes(b"half")
        return Outcome(4, "", f"error: {name}\n")

    monkeypatch.setattr(commands, "run", refuse)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"model")
    case = Case(tmp_path)
    case.convert(path)
    assert [problem.partition(":")[0] for problem in case.problems] == ["files", "output"]


def sabotage(number: int) -> None:
    """Of ten cases three are wrong, and one of the last two ends the process."""
    if number == 2:
        bytearray(1 << 40)
    if number == 3:
        raise KeyError(number)
    if number == 8:
        time.sleep(60)
    if number == 19:
        os._exit(7)


def sabotaged() -> Lane:
    def check(draw: random.Random, folder: Path) -> Case:
        assert list(folder.iterdir()) == []
        number = next(n for n in range(20) if random.Random(n).getstate() == draw.getstate())
        sabotage(number)
        return Case(folder, problems=["exit: 9"] if number == 4 else [])

    return Lane("sabotaged", check, lambda: None)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits of memory")
@pytest.mark.parametrize(
    ("numbers", "death", "cases"), [(range(10), 8, 8), (range(12, 20), 19, 7)], ids=["hang", "exit"]
)
def test_whatever_a_case_does_is_told(
    numbers: range, death: int, cases: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(sabotaged(), numbers, 60, most=5) == (4 if death == 8 else 1)
    said = capfd.readouterr()
    assert f"\n{death}: the process ended with " in f"\n{said.err}"
    assert f"{cases} cases from {numbers.start} on" in said.out
    for number, problem in ((2, "MemoryError"), (3, "KeyError: 3"), (4, "exit: 9")):
        told = said.err.partition(f"{number}: ")[2].partition(f"{number + 1}: ")[0]
        assert (problem in told) == (death == 8)


def test_no_case_begins_when_time_is_up(capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz(sabotaged(), range(20), -1) == 0
    assert "0 cases" in capfd.readouterr().out


# What fuzzing has found stays found, and the fuzzers see it.


def edited(folder: Path, export: str, edit: Edit) -> Path:
    proto = onnx.load_from_string(model.export(export))
    edit(proto)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    path = edited(tmp_path, *MODELS[name])
    case = Case(tmp_path)
    case.convert(path)
    assert case.problems == []


@pytest.mark.parametrize("preset", ["raw", "int4"])
@pytest.mark.parametrize("name", VERIFIED)
def test_verify(name: str, preset: str, tmp_path: Path) -> None:
    *rest, code = VERIFIED[name]
    path = edited(tmp_path, *rest)
    case = Case(tmp_path)
    converted = tmp_path / "converted.onnx"
    case.run("convert", path, "--preset", preset, "-o", converted, codes=[0])
    case.run("verify", path, converted, "--threads", 1, codes=[code])
    assert case.problems == []


def test_a_tokenizer_with_which_its_library_panics(tmp_path: Path) -> None:
    fields = json.loads((bundled_directory() / TOKENIZER_FILE).read_text(encoding="utf-8"))
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps({**fields, "normalizer": [""]}))
    with pytest.raises(ModelFileError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path).encode("a b\n")
