"""Options that several commands have, spelled once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tq_onnx.api.arguments import LARGEST
from tq_onnx.cli.grouped import GroupedOption
from tq_onnx.cli.retired import refuse_retired
from tq_onnx.codec.presets import find_preset
from tq_onnx.errors import UsageError
from tq_onnx.runtime.arguments import MAX_THREADS
from tq_onnx.runtime.platforms import PLATFORMS
from tq_onnx.runtime.providers import CPU, PROVIDERS

if TYPE_CHECKING:
    from tq_onnx.language.promptstore import PromptStore


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


class PresetName(click.types.StringParamType):
    """The name of a preset, or another tool's name for it; commands get its own."""

    name = "preset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Look the name up."""
        refuse_retired(value)
        try:
            return find_preset(value).name
        except UsageError as error:
            self.fail(str(error), param, ctx)


class CurrentName(click.Choice):  # type: ignore[type-arg]  # no generic before click 8.2
    """The name of a target or of a provider; a sentence of its own refuses those of the past."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Look the name up."""
        refuse_retired(value)
        return super().convert(value, param, ctx)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


tokenizer = click.option(
    "--tokenizer",
    type=FilePath(),
    metavar="FOLDER",
    help="Folder with tokenizer.json.  [default: the folder of the model]",
)
threads = click.option(
    "--threads",
    type=Whole(1, MAX_THREADS),
    help="Threads of onnxruntime.  [default: onnxruntime's choice]",
)
text = click.option(
    "--text",
    type=FilePath(),
    metavar="FILE",
    help="Read this UTF-8 text.  [default: the held-out text of the bundled model, or random "
    "tokens without a tokenizer]",
)


def without_library(text: str) -> Callable[[Any], Any]:
    """Return the option ``--no-library`` with a help text; commands get ``library``."""
    return click.option(
        "--no-library",
        "library",
        is_flag=True,
        callback=lambda _context, _option, without: not without,
        help=text,
    )


no_library = without_library("Run the ONNX function bodies instead of the kernels.")
ep = click.option(
    "--ep",
    type=CurrentName(list(PROVIDERS)),
    default=CPU.name,
    show_default=True,
    help="Execution provider that must run the converted model.",
)


def context(default: str) -> Callable[[Any], Any]:
    """Return the option ``--context`` of commands that generate; ``default`` says what without."""
    return click.option(
        "--context",
        cls=GroupedOption,
        type=Whole(1),
        help=f"Allocate caches for N tokens up front.  [default: {default}]",
    )


def windows(default: int) -> Callable[[Any], Any]:
    """Return the option ``--context`` of commands that read a text in windows."""
    return click.option(
        "--context",
        type=Whole(16),
        default=default,
        show_default=True,
        help="Tokens per window; each window starts with empty caches.",
    )


def max_new_tokens(default: int) -> Callable[[Any], Any]:
    """Return the option ``--max-new-tokens``."""
    return click.option(
        "--max-new-tokens",
        type=Whole(1),
        default=default,
        show_default=True,
        help="Generate at most N tokens.",
    )


def picture(*names: str) -> Callable[[Any], Any]:
    """Return the option ``--picture``, with other names for it."""
    return click.option(
        "--picture",
        *names,
        type=FilePath(),
        metavar="FILE",
        help="Draw a chart to FILE (.png or .svg).",
    )


all_presets = click.option(
    "--all", "show_all", is_flag=True, help="Show all presets instead of the common ones."
)

WHEEL: Final = "Take the library from this wheel of tq-onnx, or from a folder of such wheels."
PLATFORM: Final = (
    f"Platform of the operator library in a folder of onnxruntime-genai: {', '.join(PLATFORMS)}."
)
PRESET: Final = "Codecs of keys and values; see `tq-onnx presets`. vLLM's names work, too."
PRESET_NAMES: Final = ("--preset", "--kv-cache-dtype", "preset")
OVERWRITE: Final = "Replace existing output."

_SAMPLING = (
    click.option(
        "--temperature",
        type=Real(0, 100),
        default=0.0,
        show_default=True,
        help="Sampling temperature; 0 for greedy decoding.",
    ),
    click.option(
        "--top-k",
        type=Whole(),
        default=0,
        show_default=True,
        help="Sample from the N most likely tokens; 0 for all.",
    ),
    click.option(
        "--top-p",
        type=Real(0, 1, above=True),
        default=1.0,
        show_default=True,
        help="Sample from the fewest tokens with a total probability of X; 1 for all.",
    ),
    click.option(
        "--min-p",
        type=Real(0, 1),
        default=0.0,
        show_default=True,
        help="Sample from tokens with at least X times the highest probability; 0 for all.",
    ),
    click.option(
        "--repetition-penalty",
        type=Real(0, 100, above=True),
        default=1.0,
        show_default=True,
        help="Make tokens that occurred before less likely; 1 for no penalty.",
    ),
    click.option(
        "--seed",
        type=Whole(0, 2**64 - 1),
        default=0,
        show_default=True,
        help="Random seed of sampling.",
    ),
)


_PROMPT_CACHE = (
    click.option(
        "--prompt-cache",
        type=FilePath(),
        metavar="FOLDER",
        help="Keep what is read of prompts in FOLDER, and go on from it where a prompt begins "
        "alike. Files that were used least recently go first.",
    ),
    click.option(
        "--prompt-cache-size",
        default="4GiB",
        show_default=True,
        metavar="SIZE",
        help="Most bytes of --prompt-cache, as 16GB or 16GiB.",
    ),
)


def prompt_cache(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a ``PromptStore``, which ``prompt_store`` opens."""
    for option in reversed(_PROMPT_CACHE):
        command = option(command)
    return command


def prompt_store(folder: Path | None, size: str) -> PromptStore | None:
    """Open the store of the options ``prompt_cache``; None without a folder."""
    from tq_onnx.api.fitting import memory_of
    from tq_onnx.language.promptstore import PromptStore

    limit = memory_of(size)
    return None if folder is None else PromptStore(folder, bytes=limit)


def sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``Sampling``, by the names of its fields."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def option_of_json(option: Callable[..., Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return the option ``--json``, made by ``click.option`` or by the option of a group."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON document.")


as_json = option_of_json(click.option)
