"""The results of ``verify``, ``report`` and ``bench`` as tables of text.

The command line draws them, and ``tq_onnx.measure.page`` writes them. A column whose name begins
with ``>`` holds numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tq_onnx.measure.bench import SpeedReport, SpeedRow
    from tq_onnx.measure.layers import LayerErrors
    from tq_onnx.measure.reconstruction import ReconstructionFigures
    from tq_onnx.measure.report import ComparisonReport, ModelFigures
    from tq_onnx.measure.verify import VerifyReport

PEER_NOTE = (
    "ORT: ONNX Runtime's own GroupQueryAttention caches; int8 and int4 with one step per KV head "
    "and channel, found on this very text, so at their best"
)

_VERDICTS = {True: "ok", False: "FAILED", None: "not done"}


@dataclass(frozen=True)
class TextTable:
    """A table of plain text.

    Attributes:
        title: the line above the table; empty for none.
        columns: names of the columns; ``>`` before a name aligns the column to the right.
        rows: one cell for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = ""
    ) -> TextTable:
        """Make a table of cells of any type; a cell shows ``str`` of its object."""
        return cls(title, tuple(columns), tuple(tuple(map(str, row)) for row in rows))


def report_table(report: ComparisonReport) -> TextTable:
    """Return one row for each model, the original first and the peers last."""
    rows = [
        (
            "original",
            "",
            f"{report.bytes_per_token:,}",
            "1.00",
            f"{report.perplexity:.4f}",
            *([""] * 7),
        )
    ]
    rows += [_summary_row(model) for model in (*report.models, *report.peers)]
    return TextTable(
        f"Quality on {report.positions:,} predictions, {report.windows} windows of "
        f"{report.context} tokens ({report.source})",
        (
            "model",
            ">bits/value",
            ">bytes/token",
            ">times smaller",
            ">perplexity",
            ">change",
            ">KL mean",
            ">KL p99",
            ">same top token",
            ">key error",
            ">value error",
            ">attention cosine",
        ),
        tuple(rows),
    )


def layer_table(model: ModelFigures, tokens: int) -> TextTable:
    """Return one row for each layer of a converted model."""
    return TextTable(
        f"{model.name}: relative squared errors of keys and values, and their distance from "
        f"theory, on {tokens} tokens",
        (
            ">layer",
            "codec",
            ">key error",
            ">theory",
            ">value error",
            ">theory",
            ">attention cosine",
            ">lowest",
        ),
        tuple(_layer_row(layer) for layer in model.layers),
    )


def report_notes(report: ComparisonReport) -> list[str]:
    """Return notes for the reader of the tables, one sentence each."""
    lines = [
        "change: of the perplexity, with its standard error; KL: divergence from the original's "
        "predictions in nats; errors: mean over the layers of squared error over squared norm",
    ]
    if not report.kernels:
        lines.append("the function bodies ran, not the library's kernels")
    if report.peers:
        lines.append(PEER_NOTE)
    lines += [f"{peer.name} is left out: {peer.reason}" for peer in report.missing]
    return lines


def bench_table(report: SpeedReport) -> TextTable:
    """Return one row for each context."""
    plural = "" if report.threads == 1 else "s"
    threads = "" if report.threads is None else f", {report.threads} thread{plural}"
    columns = [">context", ">tokens/s before", ">after", ">times"]
    if any(row.before.first_token_seconds is not None for row in report.rows):
        columns += [">first token before", ">after", ">times"]
    columns += [">cache before", ">after", ">times smaller"]
    return TextTable(
        f"{report.original.name} before and after {report.preset}: medians of {report.tokens} "
        f"decode steps{threads}",
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
            "--prompt-limit reads longer ones"
        )
    first = report.rows[0]
    if not first.before.in_place:
        lines.append("the original's caches only grow: it makes new ones in each step")
    if not first.after.in_place:
        lines.append("the converted model's caches are copied in each step, too")
    if not report.kernels:
        lines.append("the function bodies ran, not the library's kernels")
    return lines


def verify_tables(report: VerifyReport) -> tuple[TextTable, ...]:
    """Return checks, quality and layers, in reading order."""
    return _checks(report), _quality(report), _layers(report)


def _checks(report: VerifyReport) -> TextTable:
    rows = [(_VERDICTS[check.holds], check.name, check.detail) for check in report.checks]
    return TextTable.of(("", "property", "measured"), rows, "Checks")


def _quality(report: VerifyReport) -> TextTable:
    quality, memory = report.quality, report.memory
    rows: list[tuple[str, object]] = [
        (
            "perplexity",
            f"{quality.original_perplexity:.4f} -> {quality.converted_perplexity:.4f} "
            f"({quality.perplexity_change:+.2%})",
        ),
        ("KL divergence", f"mean {quality.kl_mean:.5f}, max {quality.kl_max:.4f} nats"),
        ("same most likely token", f"{quality.top1_agreement:.2%}"),
        (
            "logits",
            f"relative error {quality.logit_relative_error:.4f}, largest difference "
            f"{quality.logit_max_difference:.3f}",
        ),
        ("greedy continuation", report.greedy),
        (
            "cache bytes per token",
            f"{memory.original_bytes_per_token} -> {memory.converted_bytes_per_token} "
            f"({memory.ratio:.2f} times smaller)",
        ),
        (
            f"cache bytes at {memory.tokens} tokens",
            f"{memory.original_bytes} -> {memory.converted_bytes}",
        ),
    ]
    if report.logits_kernel_body is not None:
        gap = f"{report.logits_kernel_body:.1e} relative"
        rows.append(("logits, kernels against bodies", gap))
    title = f"Quality on {report.tokens} tokens ({report.source})"
    return TextTable.of(("figure", "value"), rows, title)


def _layers(report: VerifyReport) -> TextTable:
    from tq_onnx.measure.oracle import BODY, KERNEL

    backends = list(dict.fromkeys((KERNEL, BODY, *(one.backend for one in report.ladder))))
    attention = {(one.layer, one.backend): f"{one.attention_error:.1e}" for one in report.ladder}
    keys = [loss for loss in report.layers if loss.cache == "key"]
    values = [loss for loss in report.layers if loss.cache == "value"]
    columns = (">layer", "codec", ">theory", ">key", ">value", ">key drift", ">value drift")
    return TextTable.of(
        (*columns, *(f">{backend}" for backend in backends)),
        [
            (
                key.layer,
                _either(key.codec, value.codec),
                _theory(key) if key.codec == value.codec else f"{_theory(key)} / {_theory(value)}",
                _error(key),
                _error(value),
                f"{distance.key:.5f}",
                f"{distance.value:.5f}",
                *(attention.get((key.layer, backend), "-") for backend in backends),
            )
            for key, value, distance in zip(keys, values, report.drift, strict=True)
        ],
        "Layers: relative squared errors of the caches; drift is the distance from the original's "
        "caches; the last columns are relative errors of attention",
    )


def _either(key: str, value: str) -> str:
    return key if key == value else f"{key} / {value}"


def _theory(loss: ReconstructionFigures) -> str:
    return "-" if loss.theory is None else f"{loss.theory:.5f}"


def _error(loss: ReconstructionFigures) -> str:
    excess = "" if loss.theory is None else f" ({loss.excess:+.1%})"
    return f"{loss.error:.5f}{excess}"


def _summary_row(model: ModelFigures) -> tuple[str, ...]:
    quality = model.quality
    return (
        model.name,
        f"{model.bits_per_value:.2f}",
        f"{model.bytes_per_token:,}",
        f"{model.compression:.2f}",
        f"{quality.converted_perplexity:.4f}",
        f"{100 * quality.perplexity_change:+.2f} ± {100 * quality.perplexity_change_error:.2f} %",
        _small(quality.kl_mean),
        _small(quality.kl_p99),
        f"{100 * quality.top1_agreement:.2f} %",
        _mean_error([(layer.key_error, layer.key_theory) for layer in model.layers]),
        _mean_error([(layer.value_error, layer.value_theory) for layer in model.layers]),
        _mean(layer.attention_cosine for layer in model.layers),
    )


def _layer_row(layer: LayerErrors) -> tuple[str, ...]:
    return (
        str(layer.layer),
        _either(layer.key_codec, layer.value_codec),
        _small(layer.key_error),
        _excess(layer.key_error, layer.key_theory),
        _small(layer.value_error),
        _excess(layer.value_error, layer.value_theory),
        f"{layer.attention_cosine:.5f}",
        f"{layer.attention_cosine_lowest:.5f}",
    )


def _mean_error(layers: Sequence[tuple[float, float | None]]) -> str:
    """Write the mean error, and its distance from theory where every layer has one."""
    if not layers:
        return ""
    error = sum(found for found, _ in layers) / len(layers)
    wanted = [theory for _, theory in layers if theory is not None]
    if len(wanted) < len(layers):
        return _small(error)
    return f"{_small(error)} ({_excess(error, sum(wanted) / len(wanted))})"


def _excess(error: float, theory: float | None) -> str:
    return "" if not theory else f"{100 * (error / theory - 1):+.1f} %"


def _mean(numbers: Iterable[float]) -> str:
    found = list(numbers)
    return f"{sum(found) / len(found):.5f}" if found else ""


def _small(number: float) -> str:
    """Write a number with enough digits; a number that rounding alone makes is 0."""
    if abs(number) < 1e-9:
        return "0"
    digits = ".4f" if number >= 0.1 else ".5f" if number >= 1e-3 else ".1e"
    return format(number, digits)


def _cells(row: SpeedRow, columns: int) -> tuple[str, ...]:
    """Return a row; the columns of the first token are left out where no row has one."""
    sides = (row.before, row.after)
    speed = [_number(side.tokens_per_second) for side in sides]
    first = [
        "" if side.first_token_seconds is None else f"{_number(side.first_token_seconds)} s"
        for side in sides
    ]
    times = "" if row.first_token_speedup is None else f"{row.first_token_speedup:.2f} x"
    cache = [_size(side.cache_bytes) for side in sides]
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


def _size(count: int) -> str:
    power, unit = (30, "GiB") if count >= 2**30 else (20, "MiB") if count >= 2**20 else (10, "KiB")
    return f"{_number(count / 2**power)} {unit}"
