"""Temporary files of runs that were killed, of those that live, and of nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.run import run
from tests.files.models import external, inline, snapshot
from tq_onnx.files import abandoned, save
from tq_onnx.files.abandoned import is_empty, open_locked, remove_abandoned, temporary_name
from tq_onnx.files.oversize import StagedModel

posix = pytest.mark.skipif(os.name != "posix", reason="there are no such locks")


@posix
def test_only_files_without_a_living_run_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "out.onnx"
    stale = temporary_name(target)
    stale.write_bytes(b"weights")
    with open_locked(temporary_name(target)) as file:
        others = [
            *("out.onnx", ".out.onnx.tmp", ".out.onnx.0123abcd.tmp2", ".out.onnx.0123ABCD.tmp"),
            *(".other.onnx.0123abcd.tmp", "out.onnx.0123abcd.tmp", ".out.onnx.data.0123abcd.tmp"),
        ]
        for name in others:
            (tmp_path / name).write_bytes(b"")
        (tmp_path / ".out.onnx.00000000.tmp").symlink_to("out.onnx")
        (tmp_path / ".out.onnx.00000001.tmp").mkdir()
        # A hard link shares the locks of its other names, and a backup has none.
        os.link(tmp_path / "out.onnx", tmp_path / ".out.onnx.00000002.tmp")
        (tmp_path / ".out.onnx.00000003.old").write_bytes(b"")
        before = {*snapshot(tmp_path)} - {stale.name}
        remove_abandoned(target)
        assert {*snapshot(tmp_path)} == before
    remove_abandoned(target)
    assert {*snapshot(tmp_path)} == before - {Path(file.name).name}


@posix
def test_old_links_and_backups_are_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"")
    os.link(target, tmp_path / ".out.onnx.00000002.tmp")
    (tmp_path / ".out.onnx.00000003.old").write_bytes(b"")
    (tmp_path / ".gone.onnx.00000004.old").write_bytes(b"the only copy")
    later = target.stat().st_ctime + 90_000
    monkeypatch.setattr(time, "time", lambda: later)
    remove_abandoned(target)
    remove_abandoned(tmp_path / "gone.onnx")
    assert {*snapshot(tmp_path)} == {"out.onnx", ".gone.onnx.00000004.old"}


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandoned, "_lock", lambda *_, **__: None)
    target = tmp_path / "out.onnx"
    stale = temporary_name(target)
    open_locked(stale).close()
    remove_abandoned(target)
    assert stale.exists()
    now = stale.stat().st_ctime + 90_000
    monkeypatch.setattr(time, "time", lambda: now)
    remove_abandoned(target)
    assert not stale.exists()


@posix
def test_a_folder_is_empty_but_for_abandoned_files(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    inside = temporary_name(tmp_path / "onnx" / "model.onnx")
    inside.write_bytes(b"")
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    assert not is_empty(tmp_path)
    assert inside.exists()
    (tmp_path / "note.txt").unlink()
    assert is_empty(tmp_path)
    with open_locked(inside):
        assert not is_empty(tmp_path)


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_undoes_what_was_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path / "in")
    number = getattr(signal, name)
    # Whoever runs this under nohup has SIGHUP ignored, and a command leaves that as it is.
    callers = signal.signal(number, signal.SIG_DFL)
    before = snapshot(tmp_path)

    def interrupted(*_: object, **__: object) -> StagedModel:
        assert {*snapshot(tmp_path)} > {*before}  # the copied weights, under a temporary name
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        time.sleep(10)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(save, "stage_model", interrupted)
    try:
        outcome = run("convert", path, "-o", tmp_path / "out" / "m.onnx")
        assert (outcome.code, outcome.err) == (128 + number, "terminated\n")
        assert snapshot(tmp_path) == before
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, callers)


@posix
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = inline(tmp_path / "in")
    output = tmp_path / "out" / "m.onnx"
    code = (
        "import os, sys\n"
        "from tq_onnx.files import transaction\n"
        "from tq_onnx.cli.main import main\n"
        "transaction.Transaction.commit = lambda *_: os.kill(os.getpid(), 9)\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(path), "-o", str(output)], check=False
    )
    assert done.returncode == -9
    (left,) = output.parent.iterdir()
    assert left.name.startswith(".m.onnx.")
    assert run("convert", path, "-o", output).code == 0
    assert list(output.parent.iterdir()) == [output]
