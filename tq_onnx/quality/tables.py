"""The results of ``report`` as tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tq_onnx.measure.divergence import STRETCH
from tq_onnx.measure.tables import HALF_BITS, TextTable, either, small

if TYPE_CHECKING:
    from tq_onnx.quality.figures import ComparisonReport, ModelFigures
    from tq_onnx.quality.layers import LayerErrors


def report_tables(report: ComparisonReport) -> list[TextTable]:
    """Return the table of all models, and that of their divergence by position."""
    positions = position_table(report)
    return [report_table(report), *([] if positions is None else [positions])]


def report_table(report: ComparisonReport) -> TextTable:
    """Return one row for each model, the original first."""
    rows = [
        (
            "original",
            "",
            *([f"{report.bytes_per_token:,}"] * 3),
            "",
            f"{report.perplexity:.4f}",
            *([""] * 9),
        )
    ]
    rows += [_summary_row(model) for model in report.models]
    return TextTable(
        f"Quality on {report.positions:,} predictions, {report.windows} "
        f"window{'' if report.windows == 1 else 's'} of "
        f"{report.context:,} tokens ({report.source})",
        (
            "model",
            ">bits/value",
            *(">bytes/token at 1k", ">at 8k", ">bytes/token at 32k"),
            ">times smaller than float16",
            ">perplexity",
            ">change",
            ">KL mean",
            ">KL 2nd half",
            ">KL p99",
            ">p99.9",
            ">same top token",
            ">key error",
            ">value error",
            ">attention cosine",
        ),
        tuple(rows),
        (
            "model",
            ">bytes/token at 32k",
            ">times smaller than float16",
            ">change",
            ">KL mean",
            ">same top token",
        ),
    )


def position_table(report: ComparisonReport) -> TextTable | None:
    """Return the KL divergence by position, one row a model; None for windows of one stretch."""
    models = report.models
    stretches = max(len(model.quality.kl_by_position) for model in models)
    if stretches < 2:
        return None
    return TextTable.of(
        ("model", *(f">to {STRETCH * (stretch + 1):,}" for stretch in range(stretches))),
        [
            (
                model.name,
                *("" if kl is None else small(kl) for kl in model.quality.kl_by_position),
            )
            for model in models
        ],
        f"Mean KL divergence of each {STRETCH:,} positions of a window, in nats",
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
        "bytes/token: of caches of 1,024, 8,192 and 32,768 tokens, exact tokens included; times "
        "smaller: at 32,768 tokens",
        "change: of the perplexity, with its standard error; KL: divergence from the original's "
        "predictions in nats; errors: mean over the layers of squared error over squared norm",
    ]
    if not report.kernels:
        lines.append("the function bodies ran, not the library's kernels")
    return lines


def _summary_row(model: ModelFigures) -> tuple[str, ...]:
    quality = model.quality
    return (
        model.name,
        f"{model.bits_per_value:.2f}",
        *(f"{size:,.0f}" for size in model.bytes_at),
        f"{HALF_BITS * model.bytes_per_token / model.bits_per_value / model.bytes_at[-1]:.2f}",
        f"{quality.converted_perplexity:.4f}",
        f"{100 * quality.perplexity_change:+.2f} ± {100 * quality.perplexity_change_error:.2f} %",
        small(quality.kl_mean),
        "" if quality.kl_second_half is None else small(quality.kl_second_half),
        small(quality.kl_p99),
        small(quality.kl_p999),
        f"{100 * quality.top1_agreement:.2f} %",
        _mean_error([(layer.key_error, layer.key_theory) for layer in model.layers]),
        _mean_error([(layer.value_error, layer.value_theory) for layer in model.layers]),
        _mean(layer.attention_cosine for layer in model.layers),
    )


def _layer_row(layer: LayerErrors) -> tuple[str, ...]:
    return (
        str(layer.layer),
        either(layer.key_codec, layer.value_codec),
        small(layer.key_error),
        _excess(layer.key_error, layer.key_theory),
        small(layer.value_error),
        _excess(layer.value_error, layer.value_theory),
        f"{layer.attention_cosine:.5f}",
        f"{layer.attention_cosine_lowest:.5f}",
    )


def _mean_error(layers: Sequence[tuple[float, float | None]]) -> str:
    """Write the mean error, and its distance from theory where every layer has one."""
    if not layers:
        return ""
    error = sum(value for value, _ in layers) / len(layers)
    theories = [theory for _, theory in layers if theory is not None]
    if len(theories) < len(layers):
        return small(error)
    return f"{small(error)} ({_excess(error, sum(theories) / len(theories))})"


def _excess(error: float, theory: float | None) -> str:
    return "" if not theory else f"{100 * (error / theory - 1):+.1f} %"


def _mean(numbers: Iterable[float]) -> str:
    values = list(numbers)
    return f"{sum(values) / len(values):.5f}" if values else ""
