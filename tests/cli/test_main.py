from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import types
from contextlib import redirect_stderr
from pathlib import Path

import click
import pytest
from rich.console import Console

from tests.cli.run import run
from tq_onnx import __version__
from tq_onnx.cli import main as main_module
from tq_onnx.cli import terminal
from tq_onnx.cli.main import COMMANDS, main
from tq_onnx.errors import ModelFileError, VerificationError
from tq_onnx.progress import Progress
from tq_onnx.runtime.variables import DEBUG

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-m", "tq_onnx.cli.main")


def examples() -> list[str]:
    """Every ``tq-onnx ...`` line in a code block of the documentation, loops unrolled."""
    found = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if not document.exists():
            continue
        for block in re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.S | re.M):
            name, words = "", [""]
            for line in block.replace("\\\n", " ").splitlines():
                if loop := re.match(r"for (\w+) in (.*); do$", line):
                    name, words = f"${loop[1]}", loop[2].split()
                for part in re.split(r"&&|;|\|", line):
                    command = part.strip().removeprefix("$ ")
                    if command.startswith("tq-onnx "):
                        found += [
                            command.replace(name, word) if name else command for word in words
                        ]
                if line == "done":
                    name, words = "", [""]
    return found


def parse(line: str) -> None:
    """Parses a command line; files that do not exist here are no objection."""
    words = shlex.split(line, comments=True)[1:]
    if words[0].startswith("-"):
        return
    context = click.Context(main)
    command = main.get_command(context, words[0])
    assert command is not None, line
    try:
        command.make_context(words[0], words[1:], parent=context)
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():
            raise
    except click.exceptions.Exit as end:
        assert end.exit_code == 0


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_every_command_shows_an_example_that_parses(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(name, flag)
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    text = outcome.out.partition("Example")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("tq-onnx ")]
    assert lines, outcome.out
    for line in lines:
        parse(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_a_sentence_and_gives_every_option_one(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert re.match(r"[A-Z][^.]*\.\n\n", command.help or "")
    for option in command.params:
        if isinstance(option, click.Option):
            text = option.help or ""
            assert re.match(r"[A-Z].*\.(  \[default: [^]]+\])?$", text), (option.name, text)
            assert "by default" not in text.lower(), "defaults stand in brackets"


def test_documentation_examples_parse() -> None:
    for line in examples():
        parse(line)


def test_an_example_with_an_unknown_option_does_not_parse() -> None:
    with pytest.raises(click.NoSuchOption):
        parse("tq-onnx convert model.onnx --no-such-option")


def test_help_lists_the_commands_without_importing_the_converter() -> None:
    code = (
        "import sys\nfrom tq_onnx.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_version() -> None:
    assert __version__ in run("--version").out


@pytest.mark.parametrize("arguments", [["bogus"], ["convert"], ["convert", "a", "--bogus"]])
def test_bad_usage_exits_2_and_leaves_stdout_alone(arguments: list[str]) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1
    assert "-h` shows how" in outcome.err


def test_without_arguments_the_help_is_shown() -> None:
    outcome = run()
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err == run("--help").out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("conver", "No such command 'conver', did you mean convert?"),
        ("prints", "No such command 'prints', did you mean presets?"),
    ],
)
def test_a_command_that_is_spelled_wrongly(name: str, sentence: str) -> None:
    assert sentence in run(name).sentence(2)


def test_the_package_runs_as_the_command_does() -> None:
    words = [sys.executable, "-m", "tq_onnx", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == run("--version").out


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command()
    def convert() -> None:
        raise error

    module = types.SimpleNamespace(convert=convert)
    monkeypatch.setattr(main_module.importlib, "import_module", lambda _: module)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelFileError("is broken", where="a.onnx"), 4),
        (VerificationError("they differ"), 5),
        (RuntimeError("first line\nsecond line"), 1),
        (RecursionError(), 1),
        (MemoryError(), 1),
    ],
)
def test_errors_become_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    failing(monkeypatch, error)
    sentence = run("convert").sentence(code)
    assert "second line" not in sentence
    if isinstance(error, RuntimeError):
        assert type(error).__name__ in sentence
        assert "report it" in sentence


def test_messages_name_flags_of_the_command() -> None:
    for name, text, shown in (
        ("convert", '`preset="int3"`, `seed=1`, `platform`', "--preset int3, --seed 1, --for"),
        ("calibrate", "`equalize` or `equalize=False`", "--equalize or --no-equalize"),
        ("bench", "`library=False`, `overwrite=True`", "--no-library, --overwrite"),
        ("fit", "`model`, `gains=False`, `tq-onnx fit`", "`model`, `gains=False`, `tq-onnx fit`"),
    ):
        with click.Context(main) as context:
            context.invoked_subcommand = name
            assert terminal.with_flags(text) == shown
        assert terminal.with_flags(text) == text


def test_debug_variable_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("boom"))
    monkeypatch.setenv(DEBUG.name, "1")
    outcome = run("convert")
    assert outcome.code == 1
    assert "Traceback" in outcome.err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interruption_exits_130(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    failing(monkeypatch, error)
    outcome = run("convert")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PYTHON, "convert", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (1, terminal.EXIT_BROKEN_PIPE)


def test_control_characters_of_strangers_do_not_reach_the_terminal() -> None:
    assert terminal.printable("a\x1b[31mb\tc\n\u202e") == "a\\x1b[31mb\tc\n\\u202e"


def test_json_of_numbers_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": float("nan"), "b": (1, Path("x")), "c": float("inf"), "d": True})
    assert capsys.readouterr().out == (
        '{\n  "a": null,\n  "b": [\n    1,\n    "x"\n  ],\n  "c": null,\n  "d": true\n}\n'
    )


def test_progress_is_drawn_and_names_send_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=100, markup=False)
    monkeypatch.setattr(terminal, "console", lambda: screen)
    with terminal.progress("Opening the model") as on_progress:
        on_progress(Progress("Looking at \x1b[2Jx[red].onnx"))
        on_progress(Progress("Copying files", 3, 4))
        on_progress(Progress("Looking at \x1b[2Jx[red].onnx", 3, 4))
    assert "Looking at \\x1b[2Jx[red].onnx" in out.getvalue()
    assert " 75%" in out.getvalue()


def test_progress_is_silent_where_nobody_looks() -> None:
    @click.command()
    def convert() -> None:
        with terminal.progress("Opening the model") as on_progress:
            on_progress(Progress("Copying files", 3, 4))

    with redirect_stderr(io.StringIO()) as err:
        convert.main([], standalone_mode=False)
    assert err.getvalue() == ""
