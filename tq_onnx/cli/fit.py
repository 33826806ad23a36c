"""``tq-onnx fit``: show the largest context for a memory, or the memory for a context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq_onnx.api import fitting
from tq_onnx.cli import flags, planned, terminal
from tq_onnx.codec.presets import COMMON_PRESETS, DEFAULT_PRESET
from tq_onnx.measure.tables import TextTable, byte_size

if TYPE_CHECKING:
    from tq_onnx.speed.fit import FitReport


@click.command()
@click.argument("model", type=flags.FilePath())
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory of the whole process, as 16GB or 16GiB.  [default: free memory, within the limits "
    "of a container]",
)
@click.option(
    "--context",
    type=flags.Whole(1),
    help="Show the memory for contexts of N tokens.",
)
@click.option(
    "--sequences",
    type=flags.Whole(1),
    default=1,
    show_default=True,
    help="Number of sequences with caches in memory at the same time.",
)
@flags.all_presets
@flags.as_json
def fit(
    *,
    model: Path,
    memory: str | None,
    context: int | None,
    sequences: int,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show the largest context of MODEL that fits into memory, for each preset.

    Reads the graph of an original or a converted model, or of a folder with one decoder. Nothing is
    run. Prints an estimate of weights, caches and intermediate values for the CPU.

    \b
    Example:
      tq-onnx fit model.onnx
      tq-onnx fit model.onnx --memory 8GB --sequences 4
      tq-onnx fit model.int4.onnx --context 32768 --json
    """
    with terminal.progress("Reading the graph") as on_progress:
        report = fitting.fit(
            model, memory=memory, context=context, sequences=sequences, on_progress=on_progress
        )
    if as_json:
        terminal.print_json(report)
        return
    terminal.print_line(_verdict(report))
    terminal.print_facts(_facts(report), title=str(report.model))
    columns = ("preset", ">context", "limited by", ">caches", ">process", ">bytes per token", "")
    rows = [
        (
            row.preset or "(now)",
            f"{row.context:,}" if not row.refusal else "",
            _LIMITS.get(row.limited_by, ""),
            byte_size(row.cache_bytes) if not row.refusal else "",
            byte_size(row.peak_bytes) if not row.refusal else "",
            f"{row.bytes_per_token:,}" if not row.refusal else "",
            row.refusal or _note(row.fits, row.growing),
        )
        for row in report.rows
        if show_all or len(report.rows) == 1 or row.preset in (None, *COMMON_PRESETS)
    ]
    terminal.print_table(TextTable.of(columns, rows))


_LIMITS = {"memory": "memory", "model": "the model", "request": "--context"}


def _verdict(report: FitReport) -> str:
    """Return what the table says of the default preset and of the model as it is."""
    now, *presets = report.rows
    best = next((row for row in presets if row.preset == DEFAULT_PRESET and not row.refusal), None)
    row, name = (now, "the model") if best is None else (best, DEFAULT_PRESET)
    if row.limited_by != "request":
        original = "" if best is None else f"; the original, {now.context:,}"
        return f"{name} fits with contexts of up to {row.context:,} tokens{original}"
    verdict = "fits" if row.fits else "does not fit"
    original = "" if best is None else f"; the original needs {byte_size(now.peak_bytes)}"
    return f"{name} {verdict}: {byte_size(row.peak_bytes)}{original}"


def _facts(report: FitReport) -> list[tuple[str, object]]:
    source = "given" if report.given else "free"
    positions = "unknown" if report.positions is None else f"{report.positions:,} tokens"
    facts: list[tuple[str, object]] = [
        ("memory", f"{byte_size(report.memory)} ({source})"),
        ("weights", byte_size(report.weights)),
        ("model takes", positions),
        ("sequences", report.sequences),
    ]
    if report.calibration is not None:
        facts.append(("calibrated", planned.reach(report.calibration)))
    return facts


def _note(fits: bool, growing: bool) -> str:
    notes = [] if fits else ["does not fit"]
    if growing:
        notes.append("caches grow: twice in a step")
    return ", ".join(notes)
