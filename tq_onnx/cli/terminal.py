"""The terminal: one rich console on stderr, tables and JSON on stdout, errors as exit codes.

Every command uses these and draws nothing by other means:

- ``console()``: the shared rich console on stderr.
- ``progress(doing)``: draws the progress of some work on stderr; silent when that is no terminal.
- ``print_table(table)``, ``print_facts(pairs)``, ``print_line(text)``: the result, on stdout.
- ``print_warnings(sentences)``: what the result should make its reader wary of, on stderr.
- ``print_json(data)``: exactly one JSON document on stdout; dataclasses and paths are understood.
- ``exit_code_of(run)``: runs something, prints an error as one sentence, returns the exit code.

File, node and layer names come from files that strangers wrote: ``printable`` takes control
characters out of them, and rich markup is never interpreted in them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, Final

import click

from tq_onnx.cli.layout import fact_lines, table_lines, text_lines
from tq_onnx.cli.signals import TerminatedError, ending_by_signals
from tq_onnx.errors import ModelFileError, TqOnnxError
from tq_onnx.runtime.variables import DEBUG

if TYPE_CHECKING:
    from rich.console import Console

    from tq_onnx.measure.tables import TextTable
    from tq_onnx.progress import OnProgress, Progress

REPORT: Final = "please report it with the command and, if you can, the model"

EXIT_INTERNAL: Final = 1
EXIT_SIGNAL: Final = 128
"""The number of a signal is added to it."""
EXIT_BROKEN_PIPE: Final = 141

_PARAMETER: Final = re.compile(r'`(\w+)(?:="?([^`"]*)"?)?`')
"""A parameter of the Python API in a message, perhaps with a value: `` `sink_tokens=4` ``."""

_MINUTE: Final = 60
_LONG: Final = 15
"""Seconds that people wait for without wondering."""

_QUIET: Final = "onnx_ir"
"""A package that warns of what a conversion refuses or mends."""


class StdoutClosedError(Exception):
    """The reader of stdout went away: nobody is left to tell."""


@cache
def console() -> Console:
    """Return the console on stderr, for progress and notes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def progress(doing: str) -> Iterator[OnProgress]:
    """Draw the progress of some work on stderr; the line disappears when the work is done.

    Args:
        doing: what is being done until the first call.

    Yields:
        What to give as ``on_progress``. It does nothing when stderr is not a terminal.
    """
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console(),
        transient=True,
        disable=not console().is_terminal,
    )
    with bar:
        task = bar.add_task(doing, total=None)

        def draw(moment: Progress) -> None:
            # ``update`` takes None for "as before".
            bar.tasks[task].total = moment.total or None
            bar.update(task, description=printable(moment.doing), completed=moment.done)

        yield draw


def announcing(on_progress: OnProgress, hint: str = "") -> OnProgress:
    """Say how long some work takes, once, where that is long enough to wonder.

    Args:
        on_progress: called with every step.
        hint: what is said behind it.
    """
    said = False

    def tell(moment: Progress) -> None:
        nonlocal said
        if moment.seconds is not None and not said:
            said = True
            if moment.seconds >= _LONG:
                print_note("; ".join(filter(None, (_duration(moment.seconds), hint))))
        on_progress(moment)

    return tell


def _duration(seconds: float) -> str:
    """Say a time as people do, as exact as an estimate is."""
    minutes = round(seconds / _MINUTE)
    if seconds < _MINUTE:
        return f"this takes about {10 * max(1, round(seconds / 10))} seconds"
    return f"this takes about {'a minute' if minutes == 1 else f'{minutes} minutes'}"


def width() -> int | None:
    """Return the columns of the terminal that stdout is; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_line(text: str = "") -> None:
    """Print a line of the result on stdout; on a terminal it is wrapped between words."""
    _print(text_lines(_shown(text), width()))


def print_facts(facts: Iterable[tuple[str, object]], title: str = "") -> None:
    """Print names and values on stdout, one pair a line, likewise."""
    pairs = [(name, _shown(str(value))) for name, value in facts]
    _print([*([printable(title)] if title else []), *fact_lines(pairs, width())])


def print_table(content: TextTable) -> None:
    """Print a table on stdout, likewise; cells are plain text, whatever they hold."""
    rows = tuple(tuple(map(_shown, row)) for row in content.rows)
    _print(table_lines(replace(content, title=_shown(content.title), rows=rows), width()))


def _print(lines: Iterable[str]) -> None:
    click.echo("\n".join(lines))


def print_json(data: object) -> None:
    """Print one JSON document on stdout; ``json_of`` makes it."""
    click.echo(json_of(data))


def json_of(data: object) -> str:
    """Return one JSON document.

    Args:
        data: mappings, sequences, numbers, strings, dataclasses and paths, nested as wanted. NaN
            and infinities become null, because JSON has none.
    """
    return json.dumps(_plain(data), indent=2, ensure_ascii=True, allow_nan=False)


def _plain(data: Any) -> Any:
    plain: Any = data
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        plain = {f.name: _plain(getattr(data, f.name)) for f in dataclasses.fields(data)}
    elif isinstance(data, dict):
        plain = {str(key): _plain(value) for key, value in data.items()}
    elif isinstance(data, list | tuple | set | frozenset):
        plain = [_plain(value) for value in data]
    elif isinstance(data, Path):
        plain = str(data)
    elif isinstance(data, float):
        plain = float(data) if math.isfinite(data) else None
    elif hasattr(data, "item"):  # a numpy scalar
        plain = _plain(data.item())
    elif not (data is None or isinstance(data, bool | int | str)):
        raise TypeError(f"{type(data).__name__} has no JSON form")
    return plain


def printable(text: str) -> str:
    """Return the text with control characters (terminal escapes above all) shown, not sent."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def with_flags(text: str) -> str:
    """Return a message with flags in the places of parameters: ``--seed 1``, not `` `seed=1` ``.

    They are options of the command that runs, or else of ``convert`` or ``calibrate``; any other
    name stays.
    """
    context = click.get_current_context(silent=True)
    root = context and context.find_root()
    if not (root and isinstance(root.command, click.Group) and _PARAMETER.search(text)):
        return text
    names = (root.invoked_subcommand or "", "convert", "calibrate")
    commands = [root.command.get_command(root, name) for name in names]
    options = [option for command in commands if command for option in command.params]

    def flag(match: re.Match[str]) -> str:
        for option in options:
            if isinstance(option, click.Option) and option.name == match[1]:
                forms = (match[2] == "False" and option.secondary_opts) or option.opts
                value = "" if option.is_flag or not match[2] else f" {match[2]}"
                first = next(form for form in forms if form.startswith("--"))
                return f"{first}{value}"
        return match[0]

    return _PARAMETER.sub(flag, text)


def _shown(text: str) -> str:
    return printable(with_flags(text))


def print_error(sentence: str) -> None:
    """Print one sentence on stderr, on one line."""
    click.echo(f"error: {_shown(' '.join(sentence.split()))}", err=True)


def print_note(sentence: str) -> None:
    """Print one sentence on stderr, above what is drawn there."""
    console().print(_shown(sentence))


def print_warnings(sentences: Iterable[str]) -> None:
    """Print each sentence on stderr, on one line, with flags in the places of parameters."""
    for sentence in sentences:
        click.echo(f"warning: {_shown(' '.join(with_flags(sentence).split()))}", err=True)


@contextmanager
def errors_of_command() -> Iterator[None]:
    """Turn the death of stdout's reader into ``StdoutClosedError``; let errors name flags."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise StdoutClosedError from error
        raise
    except TqOnnxError as error:  # later, click does not know which command ran
        error.args = (with_flags(str(error)),)
        raise


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show notes of other packages without control characters, and those of onnx-ir not at all.

    They quote names of a model. With ``TQ_ONNX_DEBUG`` they are all shown.
    """
    handler, show, root = _Notes(), warnings.showwarning, logging.getLogger()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    root.addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = show
        root.removeHandler(handler)


class _Notes(logging.Handler):
    """Show what packages log; without any handler Python writes it to stderr as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one note."""
        _note(record.name, record.getMessage())


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
) -> None:
    origin = _QUIET if _QUIET in Path(filename).parts else f"{filename}:{lineno}"
    _note(origin, f"{category.__name__}: {message}")


def _note(origin: str, text: str) -> None:
    if os.environ.get(DEBUG.name) or origin.partition(".")[0] != _QUIET:
        click.echo(printable(" ".join(f"{origin}: {text}".split())), err=True)


def exit_code_of(run: Callable[[], Any]) -> int:
    """Run a command and return its exit code; every error becomes one sentence on stderr.

    Args:
        run: what to run; what it returns is the exit code if it is an integer, else the code is 0.
    """
    try:
        with quiet_libraries(), ending_by_signals():
            code = run()
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        hint = f"; `{where.command_path} -h` shows how" if where is not None else ""
        print_error(f"{error.format_message().rstrip('.')}{hint}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt, TerminatedError) as error:
        click.echo("terminated" if isinstance(error, TerminatedError) else "interrupted", err=True)
        return EXIT_SIGNAL + (error.number if isinstance(error, TerminatedError) else SIGINT)
    except StdoutClosedError:
        # The interpreter flushes stdout once more on its way out: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if os.environ.get(DEBUG.name):
            traceback.print_exc()
        print_error(_sentence(error))
        if isinstance(error, OSError):
            return ModelFileError.exit_code
        return error.exit_code if isinstance(error, TqOnnxError) else EXIT_INTERNAL
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str:
    if isinstance(error, TqOnnxError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "there is not enough memory for this model on this machine"
    detail = str(error).strip().split("\n", 1)[0][:200]
    shown = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    return f"an unexpected {shown}; this is a defect, {REPORT}"
