"""The results of ``verify`` as tables of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tq_onnx.measure.tables import TextTable, either

if TYPE_CHECKING:
    from tq_onnx.measure.reconstruction import ReconstructionFigures
    from tq_onnx.verification.findings import VerifyReport

_VERDICTS = {True: "ok", False: "FAILED", None: "not done"}


def verify_tables(report: VerifyReport) -> tuple[TextTable, ...]:
    """Return checks, quality and layers, in reading order, as far as there are such."""
    figures = _quality(report)
    layers = (_layers(report),) if report.layers else ()
    return (_checks(report), *((figures,) if figures.rows else ()), *layers)


def _checks(report: VerifyReport) -> TextTable:
    rows = [(_VERDICTS[check.holds], check.name, check.detail) for check in report.checks]
    return TextTable.of(("", "property", "measured"), rows, "Checks")


def _predictions(report: VerifyReport) -> list[tuple[str, object]]:
    quality = report.quality
    if quality is None:
        return []
    return [
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
    ]


def _quality(report: VerifyReport) -> TextTable:
    memory, rows = report.memory, _predictions(report)
    if memory is not None:
        rows += [
            (
                "cache bytes per token",
                f"{memory.original_bytes_per_token:,} -> {memory.converted_bytes_per_token:,}",
            ),
            (
                f"cache bytes at {memory.tokens:,} tokens",
                f"{memory.original_bytes:,} -> {memory.converted_bytes:,} "
                f"({memory.ratio:.2f} times smaller than the original's)",
            ),
        ]
    if report.logits_kernel_body is not None:
        gap = f"{report.logits_kernel_body:.1e} relative"
        rows.append(("logits, kernels against bodies", gap))
    title = f"Quality on {report.tokens:,} tokens ({report.source})"
    return TextTable.of(("figure", "value"), rows, "Caches" if report.left_out else title)


def _layers(report: VerifyReport) -> TextTable:
    from tq_onnx.measure.oracle import BODY, KERNEL

    backends = list(dict.fromkeys((KERNEL, BODY, *(entry.backend for entry in report.ladder))))
    attention = {
        (entry.layer, entry.backend): f"{entry.attention_error:.1e}" for entry in report.ladder
    }
    keys = [loss for loss in report.layers if loss.cache == "key"]
    values = [loss for loss in report.layers if loss.cache == "value"]
    columns = (">layer", "codec", ">theory", ">key", ">value", ">key drift", ">value drift")
    return TextTable.of(
        (*columns, *(f">{backend}" for backend in backends)),
        [
            (
                key.layer,
                either(key.codec, value.codec),
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


def _theory(loss: ReconstructionFigures) -> str:
    return "-" if loss.theory is None else f"{loss.theory:.5f}"


def _error(loss: ReconstructionFigures) -> str:
    excess = "" if loss.theory is None else f" ({loss.excess:+.1%})"
    return f"{loss.error:.5f}{excess}"
