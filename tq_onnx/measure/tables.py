"""Tables of text, which the command line draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HALF_BITS: Final = 16


@dataclass(frozen=True)
class TextTable:
    """A table of plain text."""

    title: str  #: the line above the table; empty for none
    #: names of the columns; ``>`` before a name aligns the column to the right
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  #: one cell for each column
    #: names of the columns that a terminal shows; files have all. Empty for all.
    brief: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        columns: Iterable[str],
        rows: Iterable[Iterable[object]],
        title: str = "",
        brief: Iterable[str] = (),
    ) -> TextTable:
        """Make a table of cells of any type; a cell shows ``str`` of its object."""
        cells = tuple(tuple(map(str, row)) for row in rows)
        return cls(title, tuple(columns), cells, tuple(brief))


def either(key: str, value: str) -> str:
    """Write the codecs of keys and values, once where they are the same."""
    return key if key == value else f"{key} / {value}"


def model_name(path: Path) -> str:
    """Return the name of a model file with that of its folder; most are called ``model.onnx``."""
    real = path.resolve()
    return f"{real.parent.name}/{real.name}"


def byte_size(count: float) -> str:
    """Write a number of bytes, in units of 1,000."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:,.{2 if power == 9 else 1}f} {unit}"
    return f"{count:,.0f} bytes"


def smaller(before: float, after: float, bits: int) -> str:
    """Write how many times smaller caches became: than float16, and than the original's.

    Args:
        before: bytes of the original's.
        after: bytes of the converted model's.
    """
    text = f"{before * HALF_BITS / bits / after:.2f} times smaller than float16"
    return text if bits == HALF_BITS else f"{text}, {before / after:.2f} than float{bits}"


def small(number: float) -> str:
    """Write a number with enough digits; a number that rounding alone makes is 0."""
    if abs(number) < 1e-9:
        return "0"
    digits = ".4f" if number >= 0.1 else ".5f" if number >= 1e-3 else ".1e"
    return format(number, digits)
