from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.files.models import inline, snapshot
from tests.files.test_save import resave
from tests.runtime.models import DYNAMO, converted, original
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.files import transaction
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.quality.figures import ComparisonReport
from tq_onnx.quality.picture import check_picture, draw_quality
from tq_onnx.quality.report import report as make_report
from tq_onnx.quality.tables import position_table


@pytest.fixture(scope="module")
def report() -> ComparisonReport:
    return make_report(original(DYNAMO), [converted(DYNAMO)], 64, source="", context=32, threads=1)


def test_an_svg_names_every_point(report: ComparisonReport, tmp_path: Path) -> None:
    draw_quality(report, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.count(">int4, no window<") == 2  # once in each panel
    assert "cache bytes per token" in text
    assert f"{report.original.resolve().parent.name}/{report.original.name}" in text
    assert text.count('id="LineCollection_') == 2  # the error bars of each panel
    draw_quality(report, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def test_long_windows_show_the_divergence_by_position(
    report: ComparisonReport, tmp_path: Path
) -> None:
    assert position_table(report) is None
    (model,) = report.models
    quality = replace(model.quality, kl_by_position=(0.25, None, 2e-3))
    long = replace(report, models=(replace(model, quality=quality),))
    table = position_table(long)
    assert table is not None
    assert table.columns[-1] == ">to 3,072"
    assert table.rows[0] == ("int4, no window", "0.2500", "", "0.00200")
    draw_quality(long, tmp_path / "long.svg")
    assert "position in the window" in (tmp_path / "long.svg").read_text()


def test_a_png(report: ComparisonReport, tmp_path: Path) -> None:
    path = tmp_path / "a.PNG"
    draw_quality(report, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"one of \.png, \.svg"):
        check_picture(tmp_path / "a.jpg")
    with pytest.raises(ModelFileError, match="no such folder"):
        check_picture(tmp_path / "none" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install tq-onnx\[report\]"):
        check_picture(tmp_path / "a.png")


WRITERS: dict[str, Callable[[ComparisonReport, Path], object]] = {
    "a.svg": draw_quality,
    "a.png": draw_quality,
    "demo": lambda _, path: build_bundled("genai", path),
    "model.onnx": lambda _, path: resave(inline(path.parent / "in"), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full_or_read_only_gets_no_half_of_a_file(
    name: str, report: ComparisonReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what ``report``, ``bench``, ``demo`` and ``convert`` write."""
    inline(tmp_path / "in")
    before = snapshot(tmp_path)
    for number in (errno.ENOSPC, errno.EROFS):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(tmp_path / ".a.0.tmp"))

        with monkeypatch.context() as patch:
            if number == errno.ENOSPC:
                patch.setattr(transaction.os, "fsync", fail)
            else:
                patch.setattr(transaction, "open_locked", fail)
                patch.setattr(Path, "unlink", fail)
            with pytest.raises(ModelFileError) as error:
                WRITERS[name](report, tmp_path / name)
        told = f"{tmp_path / name}: the output cannot be written ({os.strerror(number)})"
        assert str(error.value) == told
        assert snapshot(tmp_path) == before
