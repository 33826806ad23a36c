"""Write the tables of ``report`` to a piece of a Markdown page."""

from __future__ import annotations

import os
from pathlib import Path

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.files.save import all_or_nothing
from tq_onnx.measure.tables import TextTable
from tq_onnx.quality.figures import ComparisonReport
from tq_onnx.quality.tables import layer_table, report_notes, report_tables


def check_page(path: Path) -> None:
    """Refuse a page that could not be written, or might be a model, before any work is done.

    Raises:
        UsageError: its name does not end with .md.
        ModelFileError: its folder does not exist.
    """
    if path.suffix.lower() != ".md":
        raise UsageError("a page of Markdown ends with .md", where=str(path))
    if not path.parent.is_dir():
        raise ModelFileError("there is no such folder", where=str(path.parent))


def write_page(
    report: ComparisonReport, path: Path, picture: Path | None, *, layers: bool = False
) -> None:
    """Write the tables, with a link to the picture if there is one; see ``to_page``.

    Raises:
        ModelFileError: the page cannot be written.
    """
    link = None
    if picture is not None:
        link = Path(os.path.relpath(picture.resolve(), path.resolve().parent)).as_posix()
    with all_or_nothing(path) as transaction:
        transaction.write(path, [to_page(report, link, layers=layers).encode()])


def to_page(
    report: ComparisonReport,
    picture: str | None = None,
    *,
    layers: bool = False,
    heading: str = "",
) -> str:
    """Write the report as a piece of a Markdown page, headings from the third level down.

    Args:
        report: the measured figures.
        picture: link to the picture; None if there is none.
        layers: True to write a table of the layers of each model, too.
        heading: what makes the title of a table a heading.
    """
    parts = []
    for table in report_tables(report):
        title = f"{heading} {table.title}" if heading else f"{table.title}."
        parts += [title, to_markdown(table)]
    parts.append("\n".join(f"- {note}" for note in report_notes(report)))
    if picture is not None:
        parts.insert(0, f"![quality against cache bytes per token]({picture})")
    if not layers:
        return "\n\n".join(parts) + "\n"
    parts.append(
        f"### Layers\n\nOn the first {report.layer_tokens} tokens; the percentages are the "
        "distance of an error from theory."
    )
    for model in report.models:
        table = layer_table(model, report.layer_tokens)
        parts.append(
            f"<details><summary>{model.name}</summary>\n\n{to_markdown(table)}\n\n</details>"
        )
    return "\n\n".join(parts) + "\n"


def to_markdown(table: TextTable) -> str:
    """Write a Markdown table, without its title."""
    names = [name.lstrip(">") for name in table.columns]
    rules = ["---:" if name.startswith(">") else "---" for name in table.columns]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (names, rules, *table.rows)
    )
