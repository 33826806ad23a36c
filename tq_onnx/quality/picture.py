"""Pictures of the results of ``report`` and ``bench``.

matplotlib is an optional dependency (``pip install tq-onnx[report]``) and imported here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tq_onnx.codec.presetfacts import LENGTHS
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.files.save import all_or_nothing
from tq_onnx.measure.divergence import STRETCH
from tq_onnx.measure.tables import model_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from tq_onnx.quality.figures import ComparisonReport, ModelFigures
    from tq_onnx.speed.bench import SpeedReport

FORMATS: Final = (".png", ".svg")

_DRAWN_LENGTH: Final = 1
_LEAST_KL: Final = 1e-5
_LINEAR_PERCENT: Final = 0.1
_GAP: Final = 6
"""Points between a marker and its label."""
_Place = tuple[int, int, Literal["left", "center", "right"], Literal["bottom", "center", "top"]]
_PLACES: Final[tuple[_Place, ...]] = (
    *((1, 0, "left", "center"), (-1, 0, "right", "center")),
    *((0, 1, "center", "bottom"), (0, -1, "center", "top")),
    *((1, 1, "left", "bottom"), (1, -1, "left", "top")),
    *((-1, 1, "right", "bottom"), (-1, -1, "right", "top")),
    *((2, 2, "left", "bottom"), (2, -2, "left", "top")),
    *((-2, 2, "right", "bottom"), (-2, -2, "right", "top")),
    *((4, 3, "left", "bottom"), (4, -3, "left", "top")),
    *((-4, 3, "right", "bottom"), (-4, -3, "right", "top")),
    *((6, 5, "left", "bottom"), (6, -5, "left", "top")),
    *((-6, 5, "right", "bottom"), (-6, -5, "right", "top")),
)
"""Where a label may stand, best first: steps to the right and up, alignment."""

_Line = list[tuple[int, float]]


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"a picture is one of {', '.join(FORMATS)}", where=str(path), fix="name such a file"
        )
    if not path.parent.is_dir():
        raise ModelFileError("there is no such folder", where=str(path.parent))
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "matplotlib, which draws the picture, is not installed",
            fix="install it with `pip install tq-onnx[report]`, or leave `picture` out",
        ) from error


def draw_quality(report: ComparisonReport, path: Path) -> None:
    """Draw KL divergence and change of perplexity over bytes per token, one point for each model.

    Bars are standard errors. Bytes are those of caches of 8,192 tokens, exact windows included.
    With windows of more than 1,024 tokens, a third panel has the KL divergence over the position.
    """
    stretches = max(len(model.quality.kl_by_position) for model in report.models)
    with _figure(path, 14 if stretches < 2 else 21, 7) as figure:
        left, right, *panel_axes = figure.subplots(1, 2 if stretches < 2 else 3)
        figure.suptitle(
            f"{model_name(report.original)}: {report.positions:,} predictions, windows of "
            f"{report.context:,} tokens; float perplexity {report.perplexity:.2f}"
        )
        left.set_ylabel(f"mean KL divergence from the original, nats (at least {_LEAST_KL:g})")
        left.set_yscale("log")
        right.set_ylabel("change of the perplexity, %")
        right.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
        right.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
        right.axhline(0, color="0.7", linewidth=0.8)
        panels = (
            (
                left,
                [max(model.quality.kl_mean, _LEAST_KL) for model in report.models],
                [model.quality.kl_error for model in report.models],
            ),
            (
                right,
                [100 * model.quality.perplexity_change for model in report.models],
                [100 * model.quality.perplexity_change_error for model in report.models],
            ),
        )
        for axes, heights, errors in panels:
            _scatter(axes, report, heights, errors)
        for axes in panel_axes:
            _draw_positions(axes, report.models)
        figure.draw_without_rendering()
        for axes, heights, _ in panels:
            _label(axes, report.models, heights)


def _draw_positions(axes: Axes, models: Sequence[ModelFigures]) -> None:
    """Draw a line for each model, with a point in the middle of each stretch of a window."""
    for model in models:
        points = [
            (STRETCH * (stretch + 0.5), max(kl, _LEAST_KL))
            for stretch, kl in enumerate(model.quality.kl_by_position)
            if kl is not None
        ]
        axes.plot(*zip(*points, strict=True), "o-", label=model.name)
    axes.set_xlabel(f"position in the window, means of {STRETCH:,} tokens")
    axes.set_ylabel("mean KL divergence from the original, nats")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(visible=True, which="major", color="0.92")
    axes.legend(fontsize=8)


def draw_speed(report: SpeedReport, path: Path) -> None:
    """Draw a panel for each figure of ``bench``, with a line for each model."""
    panels = _panels(report)
    with _figure(path, 5 * len(panels), 4.5) as figure:
        figure.suptitle(f"{model_name(report.original)} before and after {report.preset}")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, before, after) in zip(row, panels, strict=True):
            _lines(axes, name, before, after, report.preset)


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure and write it to the file afterwards; sizes are in inches."""
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and the same report gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tq-onnx"}):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        drawing = BytesIO()
        figure.savefig(drawing, format=path.suffix[1:].lower(), metadata=metadata)
    with all_or_nothing(path) as transaction:
        transaction.write(path, [drawing.getvalue()])


def _bytes(model: ModelFigures) -> float:
    return model.bytes_at[_DRAWN_LENGTH]


def _scatter(
    axes: Axes, report: ComparisonReport, heights: Sequence[float], errors: Sequence[float]
) -> None:
    places = [_bytes(model) for model in report.models]
    axes.errorbar(places, heights, errors, fmt="none", ecolor="0.5", elinewidth=1, capsize=2)
    axes.scatter(places, heights, marker="o", color="tab:blue", label="tq-onnx", zorder=3)
    axes.axvline(report.bytes_per_token, color="0.6", linestyle=":", label="the original's cache")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel(f"cache bytes per token, all layers, at {LENGTHS[_DRAWN_LENGTH]:,} tokens")
    axes.margins(x=0.12, y=0.08)
    axes.grid(visible=True, which="major", color="0.92")
    axes.legend(loc="upper right")


def _label(axes: Axes, models: Sequence[ModelFigures], heights: Sequence[float]) -> None:
    """Write names beside the points, each in the first place where it covers nothing."""
    spots = [
        axes.transData.transform((_bytes(model), height))
        for model, height in zip(models, heights, strict=True)
    ]
    boxes: list[Any] = []
    for model, height in zip(models, heights, strict=True):
        point = (_bytes(model), height)
        for place in _PLACES:
            text = _write(axes, model.name, point, place)
            box = text.get_window_extent()
            free = not any(box.overlaps(placed) for placed in boxes)
            if free and not any(box.contains(*spot) for spot in spots):
                break
            text.remove()
        else:
            place = _PLACES[0]
            text = _write(axes, model.name, point, place)
            box = text.get_window_extent()
        boxes.append(box)
        if max(abs(place[0]), abs(place[1])) > 1:
            text.remove()
            line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkB": 3}
            _write(axes, model.name, point, place, arrowprops=line)


def _write(
    axes: Axes, name: str, point: tuple[float, float], place: _Place, **line: Any
) -> Annotation:
    """Write a name beside a point; ``line`` styles a line between them."""
    right, up, horizontal, vertical = place
    return axes.annotate(
        name,
        point,
        xytext=(right * _GAP, up * _GAP),
        textcoords="offset points",
        ha=horizontal,
        va=vertical,
        fontsize=8,
        **line,
    )


def _panels(report: SpeedReport) -> list[tuple[str, _Line, _Line]]:
    """Return the names of the figures, and their points before and after."""
    panels: list[tuple[str, _Line, _Line]] = [
        ("tokens per second in decode", [], []),
        ("seconds to the first token", [], []),
        ("MB of cache", [], []),
    ]
    for row in report.rows:
        for side, figures in ((1, row.before), (2, row.after)):
            values = (
                figures.tokens_per_second,
                figures.first_token_seconds,
                figures.cache_bytes / 1e6,
            )
            for panel, value in zip(panels, values, strict=True):
                if value is not None:
                    (panel[1] if side == 1 else panel[2]).append((row.context, value))
    return [panel for panel in panels if panel[1]]


def _lines(axes: Axes, name: str, before: _Line, after: _Line, preset: str) -> None:
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
