"""Each lane runs, finds nothing in its first cases, and would find something."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.cli.run import Outcome
from tests.fuzz import commands, model, values
from tests.fuzz.commands import Case
from tests.fuzz.draws import Bytes
from tests.fuzz.lanes import LANES, lane
from tests.fuzz.pool import Answer, Done, Limits, work
from tests.fuzz.summary import Summary

FIRST = {"folder": 8, "values": 4}
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


def test_the_same_bytes_are_the_same_case() -> None:
    data = random.Random(3).randbytes(64)
    assert model.mutated(Bytes(data)) == model.mutated(Bytes(data))
    assert model.mutated(Bytes(data)) != model.mutated(Bytes(data[::-1]))
    assert model.mutated(Bytes(b"")) == model.mutated(Bytes(bytes(99)))


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


def sabotaged(number: int, folder: Path) -> Answer:
    """One task in ten dies, hangs, takes memory or raises."""
    assert list(folder.iterdir()) == []
    (folder / "left").touch()
    if number % 10 == 1:
        os._exit(7)
    if number % 10 == 2:
        time.sleep(60)
    if number % 10 == 3:
        bytearray(1 << 40)
    if number % 10 == 4:
        raise KeyError(number)
    return {"outcomes": {"task": "done"}, "problems": []}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits of memory")
def test_the_pool_goes_on_whatever_a_task_does() -> None:
    summary = Summary()
    for done in work(sabotaged, range(10), 2, 60, Limits(seconds=5)):
        summary.take(done, 2 << 30)
    found = summary.document()
    assert found["cases"] == 10
    assert found["outcomes"] == {"task done": 6}
    assert found["problems"] == {"death": 2, "memory": 1, "exception": 1}


def test_the_pool_ends_when_time_is_up() -> None:
    assert list(work(sabotaged, range(20), 1, -1, Limits())) == []


def test_a_summary_groups_what_is_alike() -> None:
    summary = Summary()
    for number in range(9):
        answer = {"problems": [f"exit: convert exits with 1 (a KeyError: 'x{number}')"]}
        summary.take(Done(number, answer, 0.1 * number, number << 20), 7 << 20)
    found = summary.document()
    assert [finding["count"] for finding in found["findings"]] == [9, 1]
    assert found["slowest"][0] == {"number": 8, "seconds": 0.8}
    assert found["largest"][0] == {"number": 8, "MiB": 8}


def nothing(proto: onnx.ModelProto, draw: random.Random) -> None:
    """No edit."""


def test_verify_tells_a_wrong_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the lane of values: its cases do not pass because nothing is compared."""
    right = commands.run

    def mistaken(name: str, *rest: object) -> Outcome:
        outcome = right(name, *rest)
        if name == "convert" and outcome.code == 0:
            path = Path(str(rest[-1]))
            proto = onnx.load(path)
            for node in proto.graph.node:
                for attribute in node.attribute:
                    if attribute.name == "scale":
                        attribute.f *= 1.1
            path.write_bytes(proto.SerializeToString())
        return outcome

    monkeypatch.setattr(commands, "run", mistaken)
    monkeypatch.setattr(values, "EDITS", [nothing])
    case = values.check(random.Random(1), tmp_path)
    assert case.outcomes == {"convert": 0, "verify": 5}
    assert case.problems[0].startswith("wrong: verify: ")
