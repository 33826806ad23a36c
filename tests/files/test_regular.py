"""What is no regular file is refused, and waits for nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tq_onnx.files import regular
from tq_onnx.files.arrays import facts_of, read_arrays
from tq_onnx.files.configuration import context_length
from tq_onnx.files.regular import open_regular, read_text

KINDS = ("pipe", "socket", "folder", "device", "link to a pipe")


def special(folder: Path, kind: str) -> Path:
    path = folder / "special"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        os.mkfifo(path)
    if kind == "link to a pipe":
        (folder / "link").symlink_to(path)
        return folder / "link"
    return path


@pytest.mark.skipif(os.name != "posix", reason="there are no such files")
@pytest.mark.parametrize("kind", KINDS)
def test_special_files_are_refused(kind: str, tmp_path: Path) -> None:
    path = special(tmp_path, kind)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_arrays(path, largest=100)
    assert facts_of(path) == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_that_takes_the_place_of_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appears after the first look, so the open file is looked at, too."""
    path, checks = tmp_path / "file", []
    path.write_text("text", encoding="utf-8")
    check = regular._refuse_special

    def replacing(status: os.stat_result) -> None:
        check(status)
        if not checks:
            path.unlink()
            os.mkfifo(path)
        checks.append(status)

    monkeypatch.setattr(regular, "_refuse_special", replacing)
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(path)
    assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_configurations_that_are_pipes_say_nothing(tmp_path: Path) -> None:
    for name in ("config.json", "genai_config.json"):
        os.mkfifo(tmp_path / name)
    assert context_length(tmp_path / "model.onnx") is None


def test_texts_are_read_as_python_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("ä\r\nb".encode())
    assert read_text(path) == path.read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
