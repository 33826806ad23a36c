"""The results of ``bench`` as tables of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tq_onnx.measure.tables import TextTable, byte_size, model_name

if TYPE_CHECKING:
    from tq_onnx.speed.bench import SpeedReport, SpeedRow


def bench_table(report: SpeedReport) -> TextTable:
    """Return one row for each context."""
    plural = "" if report.threads == 1 else "s"
    threads = "" if report.threads is None else f", {report.threads} thread{plural}"
    columns = [">context", ">tokens/s before", ">after", ">times"]
    if any(row.before.first_token_seconds is not None for row in report.rows):
        columns += [">first token before", ">after", ">times"]
    columns += [">cache before", ">after", ">times smaller"]
    return TextTable(
        f"{model_name(report.original)} before and after {report.preset}: medians of "
        f"{report.tokens:,} decode steps{threads}",
        tuple(columns),
        tuple(_cells(row, len(columns)) for row in report.rows),
    )


def bench_notes(report: SpeedReport) -> list[str]:
    """Return notes for the reader of the table, one sentence each."""
    lines = []
    read = [row.context for row in report.rows if row.before.first_token_seconds is not None]
    if read:
        lines.append(
            f"first token: the time of a prompt that fills the context, in pieces of {report.piece}"
        )
    if len(read) < len(report.rows):
        lines.append(
            "contexts without it were filled with copies of the rows of a short prompt; "
            "`prompt_limit` reads longer ones"
        )
    lines.append(
        f"floor: the time of reading the caches once from memory, at the "
        f"{report.bytes_per_second / 1e9:.0f} GB/s that numpy reads"
    )
    lines += [
        f"at {row.context:,} tokens the floor is {_number(row.floor_seconds_before * 1e3)} ms "
        f"before and {_number(row.floor_seconds_after * 1e3)} ms after: steps, with the weights, "
        f"take {row.floors_before:.1f} and {row.floors_after:.1f} floors"
        for row in report.rows
    ]
    first = report.rows[0]
    if not first.before.in_place:
        lines.append("the original's caches only grow: it makes new ones in each step")
    if not first.after.in_place:
        lines.append("the converted model's caches are copied in each step, too")
    if not report.kernels:
        lines.append("kernels of the operator library did not run")
    return lines


def _cells(row: SpeedRow, columns: int) -> tuple[str, ...]:
    """Return a row; the columns of the first token are left out where no row has one."""
    sides = (row.before, row.after)
    speed = [_number(side.tokens_per_second) for side in sides]
    first = [
        "" if side.first_token_seconds is None else f"{_number(side.first_token_seconds)} s"
        for side in sides
    ]
    times = "" if row.first_token_speedup is None else f"{row.first_token_speedup:.2f} x"
    cache = [byte_size(side.cache_bytes) for side in sides]
    cells = (
        *(f"{row.context:,}", *speed, f"{row.speedup:.2f} x"),
        *(*first, times),
        *(*cache, f"{row.cache_ratio:.2f} x"),
    )
    return cells if columns == len(cells) else (*cells[:4], *cells[7:])


def _number(value: float) -> str:
    """Write a number with three significant digits, or more before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
