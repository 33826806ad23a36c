"""A lane of .ci/run is left out only where the contents of all that it reads have passed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
FILES = {
    "tests/room/test_room.py": "def test():\n    from tests.other import feeds\n",
    "tests/room/data.json": "{}",
    "tests/other.py": 'MODULE = "more.deep"\n',
    "more/deep.py": "",
    "product/part.py": "",
    "product/left_out/part.py": "",
    "unread.py": "",
}


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    module = importlib.import_module("lanes")
    module.modules.cache_clear()
    return module


def test_the_table_has_the_lanes_of_the_script(lanes: types.ModuleType) -> None:
    assert sorted(re.findall(r"^begin ([\w-]+)", SCRIPT, re.M)) == sorted(lanes.LANES)
    order = " ".join(re.findall(r'^order\+?="(.*)"$', SCRIPT, re.M)).split()
    assert order == list(lanes.LANES)
    assert {user for lane in lanes.LANES.values() for user in lane.serves} <= {*lanes.LANES}
    assert all(lanes.budget(name) for name in lanes.LANES if name != "release")


def test_inputs_are_there_and_have_what_lanes_import(lanes: types.ModuleType) -> None:
    files = lanes.tracked()
    for lane in lanes.LANES.values():
        for pattern in lane.inputs:
            assert any(lanes.is_matched(name, pattern.lstrip("!")) for name in files), pattern
    always = {".ci/run", ".ci/lanes.py", "pyproject.toml", "custom_ops/core/dispatch.cpp"}
    for lane in lanes.LANES.values():
        assert not lane.inputs or always <= lanes.inputs(lane, files)
    assert {"tests/tolerances.py", "tests/onethread.py"} <= lanes.inputs(
        lanes.LANES["exports"], files
    )


@pytest.fixture
def run(
    lanes: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> types.SimpleNamespace:
    """A repository of two lanes, one of which makes something for the other."""
    inputs = ("product/", "!product/left_out/", "tests/room/*.py", "tests/room/data.json")
    table = {
        "made": lanes.Lane(serves=("room",)),
        "room": lanes.Lane(inputs, skips=("has no card",)),
        "always": lanes.Lane(),
    }
    root, kept = tmp_path / "root", tmp_path / "cache"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(lanes, "LANES", table)
    monkeypatch.setattr(lanes, "ROOT", root)
    monkeypatch.setattr(lanes, "budget", {"room": 60, "always": 600}.get)
    monkeypatch.delenv("TQ_ALL", raising=False)

    def begin() -> set[str]:
        """Return the lanes that would run, as a new process would say."""
        lanes.modules.cache_clear()
        logs = tmp_path / "logs"
        for path in logs.glob("*") if logs.exists() else ():
            path.unlink()
        logs.mkdir(exist_ok=True)
        lanes.plan(logs, kept)
        return {name for name in table if not (logs / f"{name}.status").exists()}

    def end(log: str = "3 passed in 1.0s\n", status: int = 0) -> None:
        logs = tmp_path / "logs"
        (logs / "room.log").write_text(log)
        (logs / "room.times").write_text("0m1.000s 0m0.500s\n1m2.000s 0m0.250s\n")
        (logs / "room.status").write_text(f"{status}\n")
        lanes.end(logs, kept, "room")

    return types.SimpleNamespace(root=root, kept=kept, begin=begin, end=end)


ALL = {"made", "room", "always"}


def test_what_has_passed_need_not_run(
    run: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.begin() == ALL
    run.end()
    said = "room: 64 CPU s, over the 60 of tests/budget.toml; 3 passed in 1.0s\n"
    assert capsys.readouterr().out == said
    assert run.begin() == {"always"}
    assert "room: skipped: its inputs have passed on this machine" in capsys.readouterr().out
    monkeypatch.setenv("TQ_ALL", "1")
    assert run.begin() == ALL


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_an_input_runs_a_lane(run: types.SimpleNamespace, name: str) -> None:
    run.begin()
    run.end()
    (run.root / name).write_text("# changed\n")
    is_read = name not in ("product/left_out/part.py", "unread.py")
    assert run.begin() == (ALL if is_read else {"always"})


def test_a_new_file_runs_a_lane(run: types.SimpleNamespace) -> None:
    run.begin()
    run.end()
    (run.root / "tests" / "room" / "conftest.py").touch()
    assert run.begin() == ALL


@pytest.mark.parametrize(
    ("log", "status", "is_kept"),
    [
        ("3 passed in 1.0s\n", 1, False),
        ("SKIPPED [2] tests/room/test_room.py:3: needs Node\n3 passed in 1.0s\n", 0, False),
        ("skipped: no index answers\n", 0, False),
        ("SKIPPED [2] tests/room/test_room.py:3: the fake has no card\n", 0, True),
    ],
)
def test_only_a_whole_pass_is_kept(
    run: types.SimpleNamespace, log: str, status: int, is_kept: bool
) -> None:
    run.begin()
    run.end(log, status)
    assert ("room" not in run.begin()) == is_kept


def test_an_edit_during_a_run_and_an_old_pass_do_not_count(run: types.SimpleNamespace) -> None:
    run.begin()
    (run.root / "product" / "part.py").write_text("# edited meanwhile\n")
    run.end()
    assert run.begin() == ALL
    run.end()
    assert run.begin() == {"always"}
    (record,) = (run.kept / "passed").iterdir()
    old = time.time() - 8 * 24 * 3600
    os.utime(record, (old, old))
    assert run.begin() == ALL
