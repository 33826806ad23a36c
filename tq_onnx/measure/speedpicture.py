"""The result of ``bench`` as a picture: speed, first token and cache over the context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tq_onnx.measure.bench import SpeedReport
from tq_onnx.measure.picture import check_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Points = list[tuple[int, float]]


def draw_speed(report: SpeedReport, path: Path) -> None:
    """Draws a panel for each figure, with a line for each model.

    Args:
        report: what was measured.
        path: a PNG or SVG file; one that exists is replaced.

    Raises:
        UsageError, ModelFileError: as ``tq_onnx.measure.picture.check_picture``.
    """
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(report)
    # Text stays text in an SVG, and the same report gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tq-onnx"}):
        figure = Figure(figsize=(5 * len(panels), 4.5), dpi=120, layout="constrained")
        figure.suptitle(f"{report.original.name} before and after {report.preset}")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, before, after) in zip(row, panels, strict=True):
            _lines(axes, name, before, after, report.preset)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, metadata=metadata)


def _panels(report: SpeedReport) -> list[tuple[str, _Points, _Points]]:
    """Names of the figures, and their points before and after."""
    found: list[tuple[str, _Points, _Points]] = [
        ("tokens per second in decode", [], []),
        ("seconds to the first token", [], []),
        ("MiB of cache", [], []),
    ]
    for row in report.rows:
        for side, figures in ((1, row.before), (2, row.after)):
            values = (
                figures.tokens_per_second,
                figures.first_token_seconds,
                figures.cache_bytes / 2**20,
            )
            for panel, value in zip(found, values, strict=True):
                if value is not None:
                    (panel[1] if side == 1 else panel[2]).append((row.context, value))
    return [panel for panel in found if panel[1]]


def _lines(axes: Axes, name: str, before: _Points, after: _Points, preset: str) -> None:
    for points, label, colour in ((before, "original", "tab:orange"), (after, preset, "tab:blue")):
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=label)
    axes.set_title(name)
    axes.set_xscale("log", base=2)
    contexts = [context for context, _ in before]
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_xlabel("tokens in the caches")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="0.92")
    axes.legend()
