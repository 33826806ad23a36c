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
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = ""
    ) -> TextTable:
        """Make a table of cells of any type; a cell shows ``str`` of its object."""
        return cls(title, tuple(columns), tuple(tuple(map(str, row)) for row in rows))


def either(key: str, value: str) -> str:
    """Write the codecs of keys and values, once where they are the same."""
    return key if key == value else f"{key} / {value}"
