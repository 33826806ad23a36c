"""``tq-onnx report``: what conversions cost in quality. See ``tq_onnx.report``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tq_onnx.api import measuring
from tq_onnx.cli import flags, terminal

if TYPE_CHECKING:
    from tq_onnx.quality.figures import ComparisonReport


@click.command()
@click.argument("original", type=flags.FilePath())
@click.argument("converted", nargs=-1, required=True, type=flags.FilePath())
@flags.text
@click.option(
    "--tokens",
    type=flags.Whole(16),
    default=6144,
    show_default=True,
    help="Read N tokens of the text.",
)
@flags.windows(1024)
@click.option(
    "--stride",
    type=flags.Whole(1),
    help="Start a window every N tokens, so that windows overlap.  [default: windows do not "
    "overlap, and every prediction counts]",
)
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option("--layers", is_flag=True, help="Also show the errors of each layer.")
@flags.picture()
@flags.as_json
def report(*, layers: bool, as_json: bool, **arguments: Any) -> None:
    """Measure how much quality each CONVERTED model loses against ORIGINAL.

    Reads the models, each a file or a folder with one decoder, and runs them on a text. Prints
    perplexity, KL divergence and agreement with the original, cache bytes, and the errors of keys,
    values and attention in each layer. Exits with code 5, without figures, if a CONVERTED model is
    not a conversion of ORIGINAL.

    Writes the original's predictions to a temporary file: 4 bytes for each token and vocabulary
    entry.

    \b
    Example:
      tq-onnx report model.onnx model.int4.onnx model.int3.onnx --picture cost.svg
    """
    with terminal.progress("Opening the original") as on_progress:
        comparison = measuring.report(**arguments, on_progress=on_progress)
    terminal.print_warnings(comparison.warnings)
    if as_json:
        terminal.print_json(comparison)
    else:
        _print(comparison, layers=layers)


def _print(comparison: ComparisonReport, *, layers: bool) -> None:
    from tq_onnx.quality.tables import layer_table, report_notes, report_tables

    first, *extra = report_tables(comparison)
    terminal.print_table(first)
    if terminal.width() is not None:
        terminal.print_line("all columns: in a pipe, or with --json")
    for table in extra:
        terminal.print_table(table)
    if layers:
        for model in (model for model in comparison.models if model.layers):
            terminal.print_table(layer_table(model, comparison.layer_tokens))
    for line in report_notes(comparison):
        terminal.print_line(line)
