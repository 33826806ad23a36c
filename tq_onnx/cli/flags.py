"""Options that several commands have, spelled once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from tq_onnx.api.arguments import LARGEST, MAX_THREADS
from tq_onnx.runtime.providers import CPU, PROVIDERS


class FilePath(click.Path):
    """A path that a command opens or writes itself; an empty one is no name of the folder here."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty path, which ``Path`` would take for the current folder."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


_SHOWN: Final = 40
"""Characters of a refused value that a message repeats."""


class Whole(click.types.IntParamType):
    """A whole number in decimal digits, within bounds.

    Args:
        least: the smallest value.
        most: the largest value.
    """

    name = "n"

    def __init__(self, least: int = 0, most: int = LARGEST) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; defaults are numbers already."""
        text = str(value)
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text) and self.least <= int(text) <= self.most:
            return int(text)
        span = f"of at least {self.least}" if self.most == LARGEST else ""
        span = span or f"from {self.least} to {self.most}"
        raise click.BadParameter(f"{_shown(text)} is not a whole number {span}", ctx, param)


class Real(click.types.FloatParamType):
    """A finite number within bounds.

    Args:
        least: the smallest value.
        most: the largest value.
        above: whether ``least`` itself is too small.
    """

    name = "x"

    def __init__(self, least: float, most: float, *, above: bool = False) -> None:
        self.least = least
        self.most = most
        self.above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; defaults are numbers already."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        fits = number > self.least if self.above else number >= self.least
        if fits and number <= self.most:
            return number
        span = f"{'above' if self.above else 'from'} {self.least:g} to {self.most:g}"
        raise click.BadParameter(f"{_shown(str(value))} is not a number {span}", ctx, param)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


tokenizer = click.option(
    "--tokenizer",
    type=FilePath(),
    help="Folder with tokenizer.json; by default the folder of a model.",
)
threads = click.option("--threads", type=Whole(1, MAX_THREADS), help="Threads for onnxruntime.")


def without_library(text: str) -> Callable[[Any], Any]:
    """Return the option ``--no-library`` with a help text; commands get ``library``."""
    return click.option(
        "--no-library",
        "library",
        is_flag=True,
        callback=lambda _context, _option, without: not without,
        help=text,
    )


no_library = without_library("Run the function bodies, not the kernels.")
ep = click.option(
    "--ep",
    type=click.Choice(list(PROVIDERS)),
    default=CPU.name,
    show_default=True,
    help="Execution provider that must run all of the converted model.",
)
windows = click.option(
    "--context",
    type=Whole(16),
    default=1024,
    show_default=True,
    help="Tokens per window; each begins with empty caches.",
)


all_presets = click.option(
    "--all", "show_all", is_flag=True, help="Show all presets, not the six common ones."
)


WHEEL: Final = (
    "Wheel of tq-onnx to take the library from, or a folder with wheels of several platforms."
)

_SAMPLING = (
    click.option(
        "--temperature",
        type=Real(0, 100),
        default=0.0,
        show_default=True,
        help="Randomness; 0 takes the most likely token.",
    ),
    click.option(
        "--top-k",
        type=Whole(),
        default=0,
        show_default=True,
        help="Draw from this many most likely tokens; 0 for all.",
    ),
    click.option(
        "--top-p",
        type=Real(0, 1, above=True),
        default=1.0,
        show_default=True,
        help="Draw from the most likely tokens that hold this share of the probability; 1 for all.",
    ),
    click.option(
        "--min-p",
        type=Real(0, 1),
        default=0.0,
        show_default=True,
        help="Draw from tokens at least this many times as likely as the most likely one; 0 for "
        "all.",
    ),
    click.option(
        "--repetition-penalty",
        type=Real(0, 100, above=True),
        default=1.0,
        show_default=True,
        help="Make tokens that were there before less likely; 1 for no change.",
    ),
    click.option(
        "--seed",
        type=Whole(0, 2**64 - 1),
        default=0,
        show_default=True,
        help="Seed of the draws.",
    ),
)


def sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``Sampling``, by the names of its fields."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def option_of_json(option: Callable[..., Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return the option ``--json``, made by ``click.option`` or by the option of a group."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON document.")


as_json = option_of_json(click.option)
