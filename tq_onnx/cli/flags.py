"""Options that several commands have, spelled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def option_of_json(option: Callable[..., Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return the option ``--json``, made by ``click.option`` or by the option of a group."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON document.")


as_json = option_of_json(click.option)
