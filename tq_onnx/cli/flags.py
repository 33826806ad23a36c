"""Options that several commands have, spelled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

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


tokenizer = click.option(
    "--tokenizer",
    type=FilePath(),
    help="Folder with tokenizer.json; by default the folder of a model.",
)
threads = click.option("--threads", type=click.IntRange(min=1), help="Threads for onnxruntime.")


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
    type=click.IntRange(min=16),
    default=1024,
    show_default=True,
    help="Tokens per window; each begins with empty caches.",
)


WHEEL: Final = (
    "Wheel of tq-onnx to take the library from, or a folder with wheels of several platforms."
)

_SAMPLING = (
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Randomness; 0 takes the most likely token.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Draw from this many most likely tokens; 0 for all.",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=1.0,
        show_default=True,
        help="Draw from the most likely tokens that hold this share of the probability; 1 for all.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(min=0, max=1),
        default=0.0,
        show_default=True,
        help="Draw from tokens at least this many times as likely as the most likely one; 0 for "
        "all.",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Make tokens that were there before less likely; 1 for no change.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
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
