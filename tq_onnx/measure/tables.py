"""Tables of text, which the command line draws and ``tq_onnx.quality.page`` writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table of plain text.

    Attributes:
        title: the line above the table; empty for none.
        columns: names of the columns; ``>`` before a name aligns the column to the right.
        rows: one cell for each column.
        brief: names of the columns that a terminal shows; files have all. Empty for all.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
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
