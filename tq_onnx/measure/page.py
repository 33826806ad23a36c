"""Write the tables of a comparison to a piece of a Markdown page."""

from __future__ import annotations

import os
from pathlib import Path

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.measure.report import ComparisonReport
from tq_onnx.measure.tables import to_page


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


def write_page(found: ComparisonReport, path: Path, picture: Path | None) -> None:
    """Write all tables, with a link to the picture if there is one.

    Raises:
        OSError: the page cannot be written.
    """
    link = None
    if picture is not None:
        link = Path(os.path.relpath(picture.resolve(), path.resolve().parent)).as_posix()
    path.write_text(to_page(found, link), encoding="utf-8")
