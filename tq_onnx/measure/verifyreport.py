"""The result of ``verify``: data first, then how it looks in a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tq_onnx.measure.devices import ProviderFigures
from tq_onnx.measure.drift import DriftFigures
from tq_onnx.measure.feeding_modes import ModeFigures
from tq_onnx.measure.greedy import GreedyFigures
from tq_onnx.measure.oracle import BODY, KERNEL, LadderFigures, ReconstructionFigures
from tq_onnx.measure.quality import QualityFigures
from tq_onnx.runtime.placement import PlacementReport

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Check:
    """A property that must hold.

    Attributes:
        name: what must hold.
        holds: whether it does.
        detail: what was measured.
    """

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class MemoryFigures:
    """Cache bytes, measured on the buffers and told by the types.

    Attributes:
        tokens: tokens that the measured caches held.
        original_bytes: bytes of the original's buffers.
        converted_bytes: bytes of the converted model's buffers.
        original_bytes_per_token: from the types of the original's caches.
        converted_bytes_per_token: from the types of the converted model's caches.
    """

    tokens: int
    original_bytes: int
    converted_bytes: int
    original_bytes_per_token: int
    converted_bytes_per_token: int

    @property
    def ratio(self) -> float:
        """How many times smaller the caches became."""
        return self.original_bytes / self.converted_bytes


@dataclass(frozen=True)
class VerifyReport:
    """Everything that ``verify`` found.

    Attributes:
        original: the original model.
        converted: the converted model.
        source: where the tokens come from.
        tokens: tokens of the text.
        kernels: whether the library's kernels were checked, and not only the function bodies.
        checks: the hard properties.
        quality: original against converted.
        greedy: their continuations.
        memory: their caches.
        modes: ways to feed the converted model.
        layers: reconstruction of every cache.
        drift: every cache against the original's.
        ladder: every backend on every layer.
        logits_kernel_body: largest relative difference of logits between kernels and bodies.
        placement: where the nodes of the converted model ran that was compared with the original.
        device: the converted model on that provider against itself on the CPU; None if that is it.
    """

    original: Path
    converted: Path
    source: str
    tokens: int
    kernels: bool
    checks: tuple[Check, ...]
    quality: QualityFigures
    greedy: GreedyFigures
    memory: MemoryFigures
    modes: ModeFigures
    layers: tuple[ReconstructionFigures, ...]
    drift: tuple[DriftFigures, ...]
    ladder: tuple[LadderFigures, ...]
    logits_kernel_body: float | None
    placement: PlacementReport
    device: ProviderFigures | None = None

    @property
    def holds(self) -> bool:
        """The verdict: whether every check holds."""
        return all(check.holds for check in self.checks)


def render(report: VerifyReport) -> list[Table]:
    """The report as rich tables, in reading order; every cell is plain text."""
    return [_checks(report), _quality(report), _layers(report)]


def _checks(report: VerifyReport) -> Table:
    table = _table("Checks", "", "property", "measured")
    for check in report.checks:
        _row(table, "ok" if check.holds else "FAILED", check.name, check.detail)
    return table


def _quality(report: VerifyReport) -> Table:
    quality, memory = report.quality, report.memory
    table = _table(f"Quality on {report.tokens} tokens ({report.source})", "figure", "value")
    _row(
        table,
        "perplexity",
        f"{quality.original_perplexity:.4f} -> {quality.converted_perplexity:.4f} "
        f"({quality.perplexity_change:+.2%})",
    )
    _row(table, "KL divergence", f"mean {quality.kl_mean:.5f}, max {quality.kl_max:.4f} nats")
    _row(table, "same most likely token", f"{quality.top1_agreement:.2%}")
    _row(
        table,
        "logits",
        f"relative error {quality.logit_relative_error:.4f}, largest difference "
        f"{quality.logit_max_difference:.3f}",
    )
    _row(table, "greedy continuation", report.greedy)
    _row(
        table,
        "cache bytes per token",
        f"{memory.original_bytes_per_token} -> {memory.converted_bytes_per_token} "
        f"({memory.ratio:.2f} times smaller)",
    )
    _row(
        table,
        f"cache bytes at {memory.tokens} tokens",
        f"{memory.original_bytes} -> {memory.converted_bytes}",
    )
    if report.logits_kernel_body is not None:
        _row(table, "logits, kernels against bodies", f"{report.logits_kernel_body:.1e} relative")
    return table


def _layers(report: VerifyReport) -> Table:
    backends = list(dict.fromkeys((KERNEL, BODY, *(rung.backend for rung in report.ladder))))
    table = _table(
        "Layers: relative squared errors of the caches; drift is the distance from the original's "
        "caches; the last columns are relative errors of attention",
        ">layer",
        "codec",
        ">theory",
        ">key",
        ">value",
        ">key drift",
        ">value drift",
        *(f">{backend}" for backend in backends),
    )
    attention = {(r.layer, r.backend): f"{r.attention_error:.1e}" for r in report.ladder}
    keys = [loss for loss in report.layers if loss.cache == "key"]
    values = [loss for loss in report.layers if loss.cache == "value"]
    for key, value, drift in zip(keys, values, report.drift, strict=True):
        _row(
            table,
            key.layer,
            key.codec if key.codec == value.codec else f"{key.codec} / {value.codec}",
            _theory(key) if key.codec == value.codec else f"{_theory(key)} / {_theory(value)}",
            _error(key),
            _error(value),
            f"{drift.key:.5f}",
            f"{drift.value:.5f}",
            *(attention.get((key.layer, backend), "-") for backend in backends),
        )
    return table


def _theory(loss: ReconstructionFigures) -> str:
    return "-" if loss.theory is None else f"{loss.theory:.5f}"


def _error(loss: ReconstructionFigures) -> str:
    excess = "" if loss.theory is None else f" ({loss.excess:+.1%})"
    return f"{loss.error:.5f}{excess}"


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            Text(name.lstrip(">")), justify="right" if right else "left", overflow="fold"
        )
    return table


def _row(table: Table, *cells: object) -> None:
    from rich.text import Text

    table.add_row(*(Text(str(cell)) for cell in cells))
