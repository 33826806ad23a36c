"""Rows of the JSON document, and the table that people read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from contender import Step
from registry import GQA, MATMUL, TURNING, YARDSTICK
from timing import Bandwidth, Timing

from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.spec import row_layout

Row = dict[str, Any]


def document_text(document: Mapping[str, Any]) -> str:
    """One document as JSON, with a line for each row."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            text = "[" + ",".join("\n  " + json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def floor_bytes(step: Step) -> int:
    """What one decode step has to read of an ``int4`` cache: the yardstick of every contender."""
    preset = PRESETS["int4"]
    widths = [row_layout(codec, step.head_size).row_bytes for codec in (preset.key, preset.value)]
    return sum(widths) * step.vectors // 2


def decode_rows(
    step: Step, threads: int, timings: Mapping[str, Timing], bandwidth: Bandwidth | None
) -> list[Row]:
    """One row per contender; times in milliseconds, ratios None where something is missing."""
    floor_ms = floor_bytes(step) / bandwidth.median * 1e3 if bandwidth else None
    lowest_ms = floor_bytes(step) / bandwidth.best * 1e3 if bandwidth else None
    rows = _rows(step, threads, timings)
    for row in rows:
        ms = row["ms"]
        known = ms is not None and floor_ms is not None
        row["floor_ms"] = floor_ms
        row["bandwidth_gb_s"] = bandwidth.median / 1e9 if bandwidth else None
        row["floor_ratio"] = ms / floor_ms if known else None
        row["fastest_floor_ratio"] = row["fastest_ms"] / lowest_ms if known else None
        floors = row["cache_bytes"] / floor_bytes(step) if row["cache_bytes"] else None
        row["own_floor_ratio"] = ms / (floor_ms * floors) if known and floors else None
    return rows


def prefill_rows(step: Step, threads: int, timings: Mapping[str, Timing]) -> list[Row]:
    """Likewise for a prompt, which no memory bandwidth limits; ratios to a matrix product."""
    rows = _rows(step, threads, timings)
    product = timings.get(MATMUL)
    product_ms = product.median if product and product.ms else None
    for row in rows:
        row["tokens"], row["past"] = step.new, step.past
        known = row["ms"] is not None and product_ms is not None
        row["matmul_ratio"] = row["ms"] / product_ms if known else None
    return rows


def _rows(step: Step, threads: int, timings: Mapping[str, Timing]) -> list[Row]:
    medians = {name: timing.median for name, timing in timings.items() if timing.ms}
    fastest = min((ms for name, ms in medians.items() if name.startswith(GQA)), default=None)
    yardstick = medians.get(YARDSTICK)
    rows = []
    for name, timing in timings.items():
        row: Row = {
            "shape": f"{step.query_heads}/{step.kv_heads}",
            "head_size": step.head_size,
            "batch": step.batch,
            "context": step.context,
            "threads": threads,
            "peer": name,
            "ms": None,
            "cache_bytes": timing.cache_bytes or None,
        }
        if timing.missing:
            row["missing"] = timing.missing
        else:
            ms = medians[name]
            row |= {
                "ms": ms,
                "fastest_ms": min(timing.ms),
                "quartiles_ms": list(timing.quartiles),
                "steps": len(timing.ms),
                "times_fastest_ort_gqa": fastest / ms if fastest else None,
                "times_ort_gqa_float32": yardstick / ms if yardstick else None,
            }
        plain = timings.get(name.removesuffix(TURNING))
        if name.endswith(TURNING) and plain is not None:
            pairs = zip(timing.bursts, plain.bursts, strict=False)
            row["times_not_turning"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Rows of one step, as text."""
    first = rows[0]
    heading = f"{first['shape']} heads, batch {first['batch']}, "
    heading += f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}, "
    decode = "tokens" not in first
    if decode:
        heading += f"{first['context']} tokens of context"
        if first["floor_ms"]:
            heading += f": floor {first['floor_ms']:.3f} ms at {first['bandwidth_gb_s']:.1f} GB/s"
    else:
        heading += f"prefill of {first['tokens']} tokens behind {first['past']}"
    ratio = f"{'x floor':>8} {'fastest':>8} " if decode else f"{'x matmul':>8} "
    lines = [heading]
    lines.append(
        f"  {'peer':<26} {ratio}{'ms':>10} {'fastest':>9} {'cache MB':>9} "
        f"{'x ort gqa':>9} {'x float32':>9}"
    )
    for row in rows:
        if row["ms"] is None:
            lines.append(f"  {row['peer']:<26} missing: {row['missing']}")
            continue
        names = ("floor_ratio", "fastest_floor_ratio") if decode else ("matmul_ratio",)
        ratio = "".join(f"{_number(row.get(name), 8)} " for name in names)
        lines.append(
            f"  {row['peer']:<26} {ratio}{row['ms']:10.3f} {row['fastest_ms']:9.3f} "
            f"{row['cache_bytes'] / 1e6:9.2f} {_number(row['times_fastest_ort_gqa'], 9)} "
            f"{_number(row['times_ort_gqa_float32'], 9)}"
        )
        if "times_not_turning" in row:
            lines[-1] += f"  {row['times_not_turning']:.3f} of not turning"
    return "\n".join(lines) + "\n"


def _number(ratio: float | None, width: int) -> str:
    return f"{'-':>{width}}" if ratio is None else f"{ratio:{width}.2f}"
