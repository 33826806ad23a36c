"""``tq-onnx demo``: the bundled trained model before and after, without torch."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import click

from tq_onnx.api import demonstrating
from tq_onnx.cli import flags, terminal
from tq_onnx.measure.tables import TextTable

_SHOWN_PROMPT: Final = 160


@click.command()
@click.option("--keep", type=flags.FilePath(), metavar="FOLDER", help="Keep both models in FOLDER.")
@click.option(
    "--route",
    type=click.Choice(["genai", "dynamo"]),
    default="genai",
    show_default=True,
    help="Build the model as this exporter writes it.",
)
@flags.threads
@flags.as_json
def demo(keep: Path | None, route: str, threads: int | None, as_json: bool) -> None:
    """Convert the bundled model and compare it with its conversion.

    Builds a tiny Qwen3 (trained, not random weights) and runs both models on a text that was not in
    the training data. Prints cache bytes, perplexity, speed and a continuation. Keeps no files
    without --keep.

    \b
    Example:
      tq-onnx demo
      tq-onnx demo --keep ./demo
    """
    place: AbstractContextManager[Any] = nullcontext(keep)
    if keep is None:
        place = tempfile.TemporaryDirectory(prefix="tq-onnx-demo-")
    with place as folder, terminal.progress("Building the bundled model") as on_progress:
        report = demonstrating.demonstrate(
            Path(folder), route=route, threads=threads, on_progress=on_progress
        )
    if as_json:
        terminal.print_json(report)
    else:
        _print(report, keep)


def _print(report: demonstrating.DemoReport, keep: Path | None) -> None:
    before, after = report.original, report.converted
    rows = [
        (
            "cache bytes per token",
            f"{before.cache_bytes_per_token:,}",
            f"{after.cache_bytes_per_token:,}",
            f"{report.cache_ratio:.2f} x smaller",
        ),
        (
            f"cache bytes at {report.context} tokens, measured",
            f"{before.cache_bytes:,}",
            f"{after.cache_bytes:,}",
            f"{before.cache_bytes / after.cache_bytes:.2f} x smaller",
        ),
        (
            f"perplexity on {report.text_tokens:,} unseen bytes",
            f"{before.perplexity:.4f}",
            f"{after.perplexity:.4f}",
            f"{after.perplexity / before.perplexity - 1:+.2%}",
        ),
        (
            "tokens/s in decode",
            f"{before.tokens_per_second:.0f}",
            f"{after.tokens_per_second:.0f}",
            f"{after.tokens_per_second / before.tokens_per_second:.2f} x",
        ),
        (
            "same most likely next byte",
            "",
            f"{report.top1_agreement:.1%}",
            f"KL {report.kl_mean:.2g} nats",
        ),
    ]
    columns = ("", ">original", f">{report.preset}", ">change")
    terminal.print_table(TextTable.of(columns, rows, f"A small trained {report.model}"))
    terminal.print_line(
        "The original's caches are float32; those of the conversion are "
        f"{report.cache_ratio / 2:.2f} times smaller than float16."
    )
    terminal.print_line(f"prompt (its end)      ...{report.prompt[-_SHOWN_PROMPT:]!r}")
    terminal.print_line(f"original continues    {before.text!r}")
    terminal.print_line(f"{report.preset} continues        {after.text!r}")
    terminal.print_line(f"greedy continuations  {report.greedy}")
    if keep is not None:
        terminal.print_line(f"kept: {before.model} and {after.model}")
