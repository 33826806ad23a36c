"""``tq-onnx report``: what conversions cost in quality. See ``tq_onnx.report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq_onnx.api import measuring
from tq_onnx.cli import flags, terminal

if TYPE_CHECKING:
    from tq_onnx.measure.report import ComparisonReport


@click.command()
@click.argument("original", type=click.Path(path_type=Path, readable=False))
@click.argument(
    "converted", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False)
)
@click.option("--text", type=click.Path(path_type=Path, readable=False), help="UTF-8 text to read.")
@click.option(
    "--tokens",
    type=click.IntRange(min=16),
    default=6144,
    show_default=True,
    help="Tokens of the text to read.",
)
@flags.windows
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Let windows overlap: tokens by which they advance. By default they stand side by side, "
    "and every prediction inside them counts.",
)
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Whether to measure ONNX Runtime's own float16, int8 and int4 caches, too.",
)
@click.option("--layers", is_flag=True, help="Also print a table of the layers of each model.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw a .png or .svg file.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path),
    help="Write all tables to a file, as a piece of a Markdown page.",
)
@flags.as_json
def report(*, layers: bool, as_json: bool, **arguments: Any) -> None:
    """Measure what each CONVERTED model of one ORIGINAL costs in quality.

    Every model reads the text through onnxruntime, its caches really written and read: perplexity,
    KL divergence and agreement against the original, cache bytes, and for each layer the error of
    keys, values and attention. Models may also be folders with one decoder each. The original's
    predictions are kept in a temporary file, 4 bytes for each token and vocabulary entry.

    \b
    Example:
      tq-onnx report model.onnx model.int4.onnx model.int3.onnx --text book.txt --picture cost.svg
    """
    with terminal.progress("Opening the original") as on_progress:
        found = measuring.report(**arguments, on_progress=on_progress)
    if as_json:
        terminal.print_json(found)
    else:
        _print(found, layers=layers)


def _print(found: ComparisonReport, *, layers: bool) -> None:
    from tq_onnx.measure.tables import layer_table, report_notes, report_table

    terminal.print_table(report_table(found))
    if layers:
        for model in (model for model in found.models if model.layers):
            terminal.print_table(layer_table(model, found.layer_tokens))
    for line in report_notes(found):
        terminal.print_line(line)
