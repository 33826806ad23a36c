"""Render docs/measurements/, the documents that ``benchmarks/*.py --json`` wrote.

decode, decode-avx2      attention.py: steps of all contenders, of two machines
presets                  attention.py: a step of every preset
prompts, long-prompts    attention.py: prompts
pieces                   attention.py: pieces of prompts behind a past
whole                    end_to_end.py: steps of a whole model
javascript               javascript.py: whole models in Node and browsers
serving                  serving.py: many requests at a time, of a small and a larger model
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent / "measurements"
OURS: Final = "tq-onnx int4"
GQA: Final = "ort gqa"
_MANY: Final = 100  # from here on a ratio has no decimals

Row = Mapping[str, Any]


@cache
def document(name: str = "decode") -> dict[str, Any]:
    """Return a whole document; see benchmarks/README.md for its keys."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def rows(shape: str, threads: int, name: str = "decode") -> list[Row]:
    """Return the decode steps of one shape that were measured, in the document's order."""
    return [
        row
        for row in document(name)["rows"]
        if row["shape"] == shape and row["threads"] == threads and row["ms"] is not None
    ]


def contexts(measured_rows: Iterable[Row]) -> list[int]:
    """Return the lengths of the cache, in tokens, that rows tell of."""
    return sorted({row["context"] for row in measured_rows})


def peers(measured_rows: Sequence[Row]) -> list[str]:
    """Return the contenders, the fastest first."""
    ratios: dict[str, list[float]] = {}
    for row in measured_rows:
        ratios.setdefault(row["peer"], []).append(row["floor_ratio"])
    return sorted(ratios, key=lambda peer: sum(ratios[peer]) / len(ratios[peer]))


def machine(name: str = "decode") -> str:
    """Return what was measured on, and with which packages."""
    facts = document(name)["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    level = f", level `{facts['isa']}`" if "isa" in facts else ""
    return f"{facts['cpu']}, {facts['cores']} virtual cores{level}; {packages}."


def javascript() -> str:
    """Return how fast models open and decode in JavaScript runtimes, as a Markdown table."""
    head = ["layers", "runtime", "form", "opens in", "context", "ms a token", "x original", "cache"]
    lines = [_line("model", head), "|---" * 4 + "|---:" * (len(head) - 3) + "|"]
    for row in document("javascript")["rows"]:
        cells = (
            str(row["layers"]),
            row["runtime"],
            " ".join(filter(None, (row["form"], row["preset"]))),
            f"{row['seconds_to_open']:.2f} s",
            f"{row['context']:,}",
            f"{row['ms']:.1f}",
            f"{row['times_original']:.2f}",
            f"{row['cache_bytes']:,}",
        )
        lines.append(_line(row["model"], cells))
    return "\n".join(lines)


def table(shape: str, threads: str) -> str:
    """Return multiples of the floor, and milliseconds in brackets, as a Markdown table."""
    measured_rows = rows(shape, int(threads))
    columns = contexts(measured_rows)
    lines = [_line("", (f"{tokens:,}" for tokens in columns)), "|---|" + "---:|" * len(columns)]
    for peer in peers(measured_rows):
        peer_rows = {row["context"]: row for row in measured_rows if row["peer"] == peer}
        bold = "**" if peer == OURS else ""
        cells = (_cell(peer_rows.get(tokens), bold) for tokens in columns)
        lines.append(_line(f"{bold}{peer}{bold}", cells))
    floors = {row["context"]: row for row in measured_rows}
    floor_cells = (
        f"{floors[tokens]['floor_ms']:.3f} ({floors[tokens]['bandwidth_gb_s']:.0f})"
        for tokens in columns
    )
    lines.append(_line("floor, ms (GB/s)", floor_cells))
    return "\n".join(lines)


def lead() -> str:
    """Return how many times as fast as ONNX Runtime's caches ours is, as a Markdown table."""
    every = document()["rows"]
    columns = contexts(every)
    lines = [_line("", (f"{tokens:,}" for tokens in columns)), "|---|" + "---:|" * len(columns)]
    for shape in dict.fromkeys(row["shape"] for row in every):
        for threads in sorted({row["threads"] for row in every}):
            our_rows = {row["context"]: row for row in rows(shape, threads) if row["peer"] == OURS}
            cells = (
                f"{our_rows[tokens]['times_fastest_ort_gqa']:.1f} and "
                f"{our_rows[tokens]['times_ort_gqa_float32']:.1f}"
                for tokens in columns
            )
            lines.append(_line(f"{shape}, {_threads(threads)}", cells))
    return "\n".join(lines)


def summary(name: str, *tokens: str) -> str:
    """Return speed-ups over the float32 cache at these lengths, as a Markdown table."""
    every = [row for row in document(name)["rows"] if row["threads"] == 1]
    head = [OURS, f"{GQA} int8 vnni", f"{GQA} int8", f"{GQA} int4", f"{GQA} float16"]
    lines = [_line("heads", ["tokens", *head]), "|---|" + "---:|" * (1 + len(head))]
    for shape in dict.fromkeys(row["shape"] for row in every):
        for count in map(int, tokens):
            by_peer = {row["peer"]: row for row in rows(shape, 1, name) if row["context"] == count}
            cells = (_best(by_peer, peer) for peer in head)
            lines.append(_line(shape, [f"{count:,}", *cells]))
    return "\n".join(lines)


def presets() -> str:
    """Return a step with each preset, also by byte of its cache, as a Markdown table."""
    every = document("presets")["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in every))
    yardstick = {row["shape"]: row for row in every if row["peer"] == OURS}
    head = ["bytes", *(heading for shape in shapes for heading in (f"{shape}: ms", "by byte"))]
    lines = [_line("", head), "|---|" + "---:|" * len(head)]
    for peer in dict.fromkeys(row["peer"] for row in every):
        peer_rows = {row["shape"]: row for row in every if row["peer"] == peer}
        first = peer_rows[shapes[0]]
        vectors = int(first["shape"].split("/")[1]) * first["context"] * first["batch"]
        cells = [f"{first['cache_bytes'] // vectors}"]
        for shape in shapes:
            row, of = peer_rows[shape], yardstick[shape]
            ratio = row["ms"] / row["cache_bytes"] * of["cache_bytes"] / of["ms"]
            cells += [f"{row['ms']:.3f}", f"{ratio:.2f}"]
        name = peer.removeprefix("tq-onnx ")
        lines.append(_line(f"`{name}`", cells))
    return "\n".join(lines)


def prompts() -> str:
    """Return times of prompts, of those of GroupQueryAttention and MatMul, as a Markdown table."""
    every = [
        row for name in ("prompts", "long-prompts", "pieces") for row in document(name)["prefill"]
    ]
    every = [row for row in every if row["peer"] == OURS]
    columns, lines = _pivot(every, ("past", "tokens"), ("shape", "threads"), _prompt)
    head = ["behind", *(f"{shape}, {_threads(many)}" for shape, many in columns)]
    table = [_line("tokens", head), "|---:|---:|" + "---:|" * len(columns)]
    for (past, tokens), cells in lines:
        table.append(_line(f"{tokens:,}", [f"{past:,}", *cells]))
    return "\n".join(table)


def _prompt(row: Row) -> str:
    return f"{1 / row['times_ort_gqa_float32']:.2f}, {row['matmul_ratio']:.2f}"


def whole() -> str:
    """Return speed-ups of a whole model's steps, and tokens per second, as a Markdown table."""
    every = [row for row in document("whole")["rows"] if row["ms"] is not None]
    columns, lines = _pivot(every, ("weights", "peer"), ("context", "threads"), _speed)
    head = ["cache", *(f"{count:,}, {_threads(many)}" for count, many in columns)]
    table = [_line("weights", head), "|---|---|" + "---:|" * len(columns)]
    for (weights, peer), cells in lines:
        bold = "**" if peer == OURS else ""
        table.append(_line(weights, [f"{bold}{peer}{bold}", *cells]))
    return "\n".join(table)


def _speed(row: Row) -> str:
    return f"{row['times_original']:.2f} ({row['tokens_per_second']:.1f})"


def serving(name: str) -> str:
    """Return tokens per second and times to a first token, as a Markdown table."""

    def cell(row: Row) -> str:
        return f"{row['tokens_per_second']:,.0f}, {row['first_token_ms']:,.0f} ms"

    columns, lines = _pivot(document(name)["rows"], ("contender",), ("concurrent",), cell)
    head = [f"{count} client{'s' if count > 1 else ''}" for (count,) in columns]
    table = [_line("contender", head), "|---|" + "---:|" * len(columns)]
    names = {"paged": "Engine over pages", "static": "Engine, batches of four"}
    names |= {"generators": "a Generator for each client", "plain": "over pages, no guesses"}
    names["prefixes"] = "over pages, no kept answers"
    table += [_line(names[which], cells) for (which,), cells in lines]
    return "\n".join(table)


def _threads(many: int) -> str:
    return f"{many} thread{'s' if many > 1 else ''}"


def _pivot(
    every: Sequence[Row], down: Sequence[str], across: Sequence[str], cell: Callable[[Row], str]
) -> tuple[list[Any], list[tuple[Any, list[str]]]]:
    """Return what stands above the columns, and each line: what stands before it, and its cells.

    Args:
        every: the rows, in whose order both come.
        down: keys that tell lines apart.
        across: keys that tell columns apart.
        cell: the text of a row; of none it is "not run".
    """

    def values(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
        return tuple(row[key] for key in keys)

    columns = list(dict.fromkeys(values(row, across) for row in every))
    lines = []
    for line in dict.fromkeys(values(row, down) for row in every):
        row_of = {values(row, across): row for row in every if values(row, down) == line}
        cells = [cell(row_of[column]) if column in row_of else "not run" for column in columns]
        lines.append((line, cells))
    return columns, lines


def _best(row_of: Mapping[str, Row], peer: str) -> str:
    """Return the faster of one scale per tensor and one per channel, where there are both."""
    ratios = [
        row_of[name]["times_ort_gqa_float32"]
        for name in (peer, f"{peer} per channel")
        if name in row_of
    ]
    if not ratios:
        return "not run"
    bold = "**" if peer == OURS else ""
    return f"{bold}{max(ratios):.1f}{bold}"


def _cell(row: Row | None, bold: str) -> str:
    if row is None:
        return "not run"
    ratio = row["floor_ratio"]
    multiple = f"{ratio:.0f}" if ratio >= _MANY else f"{ratio:.2f}"
    return f"{bold}{multiple}{bold} ({row['ms']:.3f})"


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")
