"""``tq-onnx diff``: show what a conversion changed in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq_onnx.api import converting
from tq_onnx.cli import flags, terminal
from tq_onnx.measure.tables import TextTable, either

if TYPE_CHECKING:
    from tq_onnx.verification.diff import OperatorCount


@click.command()
@click.argument("original", type=flags.FilePath())
@click.argument("converted", type=flags.FilePath())
@flags.as_json
def diff(*, original: Path, converted: Path, as_json: bool) -> None:
    """Show what a conversion changed in the graph, per layer and in total.

    Reads ORIGINAL and CONVERTED, each a file or a folder with one decoder, and runs neither. Prints
    the nodes, caches and weights that were added, removed or changed. `tq-onnx verify` compares the
    results of the models.

    \b
    Example:
      tq-onnx diff model.onnx model.int4.onnx
      tq-onnx diff model.onnx model.int4.onnx --json
    """
    with terminal.progress("Reading the graphs"):
        report = converting.diff(original, converted)
    if as_json:
        terminal.print_json(report)
        return
    rows = [
        (
            layer.layer,
            either(layer.key.before, layer.value.before),
            either(layer.key.after, layer.value.after),
            either(layer.key_codec, layer.value_codec),
            f"{layer.key.bytes_before + layer.value.bytes_before:,}",
            f"{layer.key.bytes_after + layer.value.bytes_after:,}",
            _nodes(layer.removed),
            _nodes(layer.added),
        )
        for layer in report.layers
    ]
    columns = (">layer", "cache before", "cache after", "codec", ">bytes before", ">bytes after")
    terminal.print_table(TextTable.of((*columns, "nodes removed", "nodes added"), rows))
    counts = [
        (
            f"{count.domain}::{count.op_type}" if count.domain else count.op_type,
            count.before,
            count.after,
        )
        for count in report.operators
    ]
    total = ("all", report.nodes_before, report.nodes_after)
    terminal.print_table(TextTable.of(("operator", ">before", ">after"), [*counts, total]))
    weights = [
        (weight.name, weight.type, f"{weight.bytes_before:,}", f"{weight.bytes_after:,}")
        for weight in report.initializers
    ]
    if weights:
        head = ("initializer", "type", ">bytes before", ">bytes after")
        terminal.print_table(TextTable.of(head, weights))
    window = f" and {report.window_bytes:,} for exact tokens" if report.window_bytes else ""
    terminal.print_line(
        f"preset {report.preset}: {report.bytes_per_token_before:,} cache bytes per token before, "
        f"{report.bytes_per_token_after:,} after{window}"
    )


def _nodes(counts: Sequence[OperatorCount]) -> str:
    return ", ".join(f"{count.before} {count.op_type}" for count in counts)
