"""Render docs/decode.json, the document that ``benchmarks/attention.py --json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

DECODE: Final = Path(__file__).resolve().parent / "decode.json"
OURS: Final = "tq-onnx int4"
GQA: Final = "ort gqa"
_MANY: Final = 100  # from here on a ratio has no decimals

Row = Mapping[str, Any]


@cache
def document() -> dict[str, Any]:
    """Return the whole document; see benchmarks/README.md for its keys."""
    found: dict[str, Any] = json.loads(DECODE.read_text(encoding="utf-8"))
    return found


def rows(shape: str, threads: int) -> list[Row]:
    """Return the decode steps of one shape that were measured, in the document's order."""
    return [
        row
        for row in document()["rows"]
        if row["shape"] == shape and row["threads"] == threads and row["ms"] is not None
    ]


def contexts(found: Iterable[Row]) -> list[int]:
    """Return the lengths of the cache, in tokens, that rows tell of."""
    return sorted({row["context"] for row in found})


def peers(found: Sequence[Row]) -> list[str]:
    """Return the contenders, the fastest first."""
    ratios: dict[str, list[float]] = {}
    for row in found:
        ratios.setdefault(row["peer"], []).append(row["floor_ratio"])
    return sorted(ratios, key=lambda peer: sum(ratios[peer]) / len(ratios[peer]))


def machine() -> str:
    """Return what was measured on, and with which packages."""
    told = document()["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    return f"{told['cpu']}, {told['cores']} virtual cores, level `{told['isa']}`; {packages}."


def table(shape: str, threads: str) -> str:
    """Return multiples of the floor, and milliseconds in brackets, as a Markdown table."""
    found = rows(shape, int(threads))
    columns = contexts(found)
    lines = [_line("", (f"{tokens:,}" for tokens in columns)), "|---|" + "---:|" * len(columns)]
    for peer in peers(found):
        own = {row["context"]: row for row in found if row["peer"] == peer}
        bold = "**" if peer == OURS else ""
        cells = (_cell(own.get(tokens), bold) for tokens in columns)
        lines.append(_line(f"{bold}{peer}{bold}", cells))
    floors = {row["context"]: row for row in found}
    told = (
        f"{floors[tokens]['floor_ms']:.3f} ({floors[tokens]['bandwidth_gb_s']:.0f})"
        for tokens in columns
    )
    lines.append(_line("floor, ms (GB/s)", told))
    return "\n".join(lines)


def lead() -> str:
    """Return how many times as fast as ONNX Runtime's caches ours is, as a Markdown table."""
    every = document()["rows"]
    columns = contexts(every)
    lines = [_line("", (f"{tokens:,}" for tokens in columns)), "|---|" + "---:|" * len(columns)]
    for shape in dict.fromkeys(row["shape"] for row in every):
        for threads in sorted({row["threads"] for row in every}):
            own = {row["context"]: row for row in rows(shape, threads) if row["peer"] == OURS}
            cells = (
                f"{own[tokens]['times_fastest_ort_gqa']:.1f} and "
                f"{own[tokens]['times_ort_gqa_float32']:.1f}"
                for tokens in columns
            )
            name = f"{shape}, {threads} thread{'s' if threads > 1 else ''}"
            lines.append(_line(name, cells))
    return "\n".join(lines)


def summary(*tokens: str) -> str:
    """Return speed-ups over the float32 cache with one thread, as a Markdown table.

    Args:
        tokens: the lengths of the cache.
    """
    every = [row for row in document()["rows"] if row["threads"] == 1]
    head = [OURS, f"{GQA} int8 vnni", f"{GQA} int8", f"{GQA} int4", f"{GQA} float16"]
    lines = [_line("heads", ["tokens", *head]), "|---|" + "---:|" * (1 + len(head))]
    for shape in dict.fromkeys(row["shape"] for row in every):
        for count in map(int, tokens):
            here = {row["peer"]: row for row in rows(shape, 1) if row["context"] == count}
            cells = (_best(here, peer) for peer in head)
            lines.append(_line(shape, [f"{count:,}", *cells]))
    return "\n".join(lines)


def _best(here: Mapping[str, Row], peer: str) -> str:
    """Return the faster of one scale per tensor and one per channel, where there are both."""
    found = [
        here[name]["times_ort_gqa_float32"]
        for name in (peer, f"{peer} per channel")
        if name in here
    ]
    if not found:
        return "not run"
    bold = "**" if peer == OURS else ""
    return f"{bold}{max(found):.1f}{bold}"


def _cell(row: Row | None, bold: str) -> str:
    if row is None:
        return "not run"
    ratio = row["floor_ratio"]
    told = f"{ratio:.0f}" if ratio >= _MANY else f"{ratio:.2f}"
    return f"{bold}{told}{bold} ({row['ms']:.3f})"


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")
