"""Lay out tables and text in a number of columns; no line breaks inside a word.

All functions return lines without an end. A width of None is that of a file or a pipe, where
nothing is wrapped and no column is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tq_onnx.measure.tables import TextTable

_MARGIN: Final = "  "
_GAP: Final = "  "
_COMMAND: Final = "tq-onnx "


def text_lines(text: str, width: int | None, begin: str = "") -> list[str]:
    r"""Return a text in lines; a command goes on behind a ``\``, so that it can be copied.

    Args:
        text: the text; its own line breaks are kept.
        width: columns of a line.
        begin: what stands before the first line; others are indented as far.
    """
    indent = " " * _cells(begin)
    lines = text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in _wrapped(line, width - len(indent))]
    return [f"{indent if index else begin}{line}" for index, line in enumerate(lines)]


def fact_lines(facts: Iterable[tuple[str, object]], width: int | None) -> list[str]:
    """Return names and values, one pair a line."""
    rows = [(name, str(value)) for name, value in facts]
    longest = max(_cells(name) for name, _ in rows)
    return [
        line
        for name, value in rows
        for line in text_lines(value, width, f"{_MARGIN}{_padded(name, longest)}  ")
    ]


def table_lines(table: TextTable, width: int | None) -> list[str]:
    """Return a table: its title, its head, a rule, its rows.

    A terminal shows the columns that ``table.brief`` names. Where not even the words of the columns
    fit beside each other, each row becomes a block of names and values.
    """
    title = text_lines(table.title, width) if table.title else []
    shown = [
        index
        for index, name in enumerate(table.columns)
        if width is None or not table.brief or name in table.brief
    ]
    head = [table.columns[index] for index in shown]
    rows = [[row[index] for index in shown] for row in table.rows]
    names = [name.removeprefix(">") for name in head]
    columns = list(zip(names, *rows, strict=True))
    natural = [max(map(_cells, column)) for column in columns]
    least = [max(_longest_word(cell) for cell in column) for column in columns]
    fixed = len(_MARGIN) + len(_GAP) * (len(columns) - 1)
    if width is not None and sum(least) + fixed > width:
        return [*title, *_blocks(names, rows, width)]
    widths = natural if width is None else _shrunk(natural, least, width - fixed)
    right = [name.startswith(">") for name in head]
    drawn = [_row(cells, widths, right) for cells in (names, *rows)]
    rule = f"{_MARGIN}{'─' * (sum(widths) + fixed - len(_MARGIN))}"
    return [*title, "", *drawn[0], rule, *(line for row in drawn[1:] for line in row), ""]


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths that fit, the widest columns made narrower first."""
    fitted = list(widths)
    while sum(fitted) > room:
        spare = [index for index, size in enumerate(fitted) if size > least[index]]
        fitted[max(spare, key=lambda index: fitted[index])] -= 1
    return fitted


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    parts = [_wrapped(cell, size) for cell, size in zip(cells, widths, strict=True)]
    lines = []
    for index in range(max(map(len, parts))):
        words = [
            _padded(part[index] if index < len(part) else "", size, right=to_right)
            for part, size, to_right in zip(parts, widths, right, strict=True)
        ]
        lines.append(f"{_MARGIN}{_GAP.join(words)}".rstrip())
    return lines


def _blocks(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    lines = [""]
    for row in rows:
        named = [(name, cell) for name, cell in zip(names, row, strict=True) if cell]
        lines += [*fact_lines(named, width), ""]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of whole words; a word that is longer has a line of its own."""
    if _cells(text) <= width:
        return [text]
    continuation = " \\" if text.startswith(_COMMAND) else ""
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        text,
        max(1, width - len(continuation)),
        subsequent_indent=f"{indent}  " if continuation else indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{line}{continuation}" for line in lines[:-1]] + lines[-1:]


def _longest_word(text: str) -> int:
    return max(map(_cells, text.split()), default=0)


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - _cells(text))
    return space + text if right else text + space


def _cells(text: str) -> int:
    """Return the columns that a text takes; East Asian characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
