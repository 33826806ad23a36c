from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.run import run
from tests.files.models import FIXTURES, external, inline, snapshot
from tests.security.hostile import HOSTILE, ODD
from tq_onnx.cli import terminal
from tq_onnx.errors import ModelFileError, TqOnnxError
from tq_onnx.files.load import load


@pytest.mark.parametrize("name", [name for name, item in HOSTILE.items() if not item.may_hang])
def test_one_sentence_and_nothing_written(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = HOSTILE[name].build(folder)
    before = snapshot(tmp_path)
    for command in (
        ["inspect"],
        ["convert"],
        ["convert", "--json", "-o", tmp_path / "o" / "m.onnx"],
    ):
        outcome = run(command[0], path, *command[1:])
        sentence = outcome.sentence(HOSTILE[name].code)
        assert HOSTILE[name].says in sentence
        assert sentence.startswith(str(path))
        assert len(sentence) < 500
        assert outcome.out == ""
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", [name for name, item in HOSTILE.items() if item.may_hang])
def test_nothing_hangs(name: str, tmp_path: Path) -> None:
    path = HOSTILE[name].build(tmp_path)
    before = snapshot(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tq_onnx.cli.main", "convert", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == HOSTILE[name].code
    assert done.stderr.count("\n") == 1
    assert HOSTILE[name].says in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_do_no_harm(name: str, tmp_path: Path) -> None:
    path = ODD[name](tmp_path)
    before = snapshot(tmp_path)
    outcome = run("convert", path)
    after = snapshot(tmp_path)
    if outcome.code == 0:
        after.pop("model.int4.onnx")
    else:
        assert outcome.code in (3, 4), outcome.err
        assert "defect" not in outcome.sentence(outcome.code)
    assert after == before


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "/nowhere/x.onnx"]
)
def test_special_paths(path: str, tmp_path: Path) -> None:
    for command in ("inspect", "convert"):
        run(command, path, *(["-o", tmp_path / "x.onnx"] if command == "convert" else [])).sentence(
            4
        )
    assert snapshot(tmp_path) == {}


def test_an_unreadable_name_is_one_sentence(tmp_path: Path) -> None:
    for name in ("a\nb.onnx", "\x1b[31mred.onnx", "x" * 300 + ".onnx"):
        outcome = run("inspect", tmp_path / name)
        assert outcome.code in (2, 4)
        assert "\x1b" not in outcome.err
        assert "Traceback" not in outcome.err
    with pytest.raises(ModelFileError):  # no shell can pass this one
        load(tmp_path / "nul\0.onnx")


def test_control_characters_of_a_file_never_reach_the_terminal(tmp_path: Path) -> None:
    """Names that onnx-ir warns about: an output and an input that nothing makes."""
    path = inline(tmp_path)
    proto = onnx.load(path)
    proto.graph.output[-1].name = "\x1b[31mred\x07"
    proto.graph.node[-1].input[0] = "\x1b]0;title\x07"
    path.write_bytes(proto.SerializeToString())
    for command in ("inspect", "convert"):
        outcome = run(command, path)
        assert outcome.code in (3, 4)
        assert all(char.isprintable() or char == "\n" for char in outcome.out + outcome.err)
        assert outcome.err.count("\n") <= 1


def test_notes_of_other_packages_are_printed_without_control_characters() -> None:
    with terminal.quiet_libraries(), redirect_stderr(io.StringIO()) as shown:
        logging.getLogger("other").warning("red \x1b[31m")
        logging.getLogger("onnx_ir.serde").warning("hidden")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = terminal._show_warning
            warnings.warn("title \x1b]0;x\x07", stacklevel=1)
    first, second = shown.getvalue().splitlines()
    assert first == "other: red \\x1b[31m"
    assert second.endswith("UserWarning: title \\x1b]0;x\\x07")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 65_000),
    flips=st.lists(st.tuples(st.integers(0, 65_000), st.integers(1, 255)), max_size=4),
)
def test_damaged_files_load_or_are_refused(
    tmp_path: Path, cut: int, flips: list[tuple[int, int]]
) -> None:
    """Flipped bytes and cut ends of a real export: a sentence or a model, nothing else."""
    path = tmp_path / "model.onnx"
    data = bytearray((FIXTURES / "genai-cuda-int4.onnx").read_bytes())
    for position, mask in flips:
        data[position] ^= mask
    path.write_bytes(bytes(data[: len(data) - cut] if cut % 3 == 0 else data))
    try:
        load(path)
    except TqOnnxError as error:
        assert str(error).startswith(str(path))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    location=st.text(alphabet="./\\ab~\0\n:*", max_size=12),
    offset=st.one_of(st.integers(), st.text(max_size=5)).map(str),
    length=st.one_of(st.integers(), st.text(max_size=5)).map(str),
)
def test_no_external_reference_leaves_the_folder(
    tmp_path: Path, location: str, offset: str, length: str
) -> None:
    folder = tmp_path / "folder"
    if not folder.exists():
        external(folder)
        (tmp_path / "a").write_bytes(bytes(1 << 20))
        (folder / "b").write_bytes(bytes(1 << 20))
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.external_data)
    for entry, text in zip(tensor.external_data, (location, offset, length), strict=True):
        entry.value = text
    path = folder / "changed.onnx"
    path.write_bytes(proto.SerializeToString())
    try:
        loaded = load(path)
    except TqOnnxError as error:
        assert str(error).startswith(str(path))
    else:
        for file in loaded.external_files:
            assert file.resolve().is_relative_to(folder)
