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
@click.option("--text", type=flags.FilePath(), help="UTF-8 text to read.")
@click.option(
    "--tokens",
    type=flags.Whole(16),
    default=6144,
    show_default=True,
    help="Tokens of the text to read.",
)
@flags.windows
@click.option(
    "--stride",
    type=flags.Whole(1),
    help="Tokens by which overlapping windows advance. By default windows stand side by side, and "
    "every prediction inside them counts.",
)
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Measure ONNX Runtime's own float16, int8 and int4 caches, too.",
)
@click.option(
    "--generation",
    is_flag=True,
    help="Judge generation, too: passages that come again 200 to 2,000 tokens later, and decoding "
    "token by token. It doubles the time.",
)
@click.option(
    "--outliers",
    is_flag=True,
    help="Measure each conversion a second time, of the same model with channels of keys that are "
    "16 to 64 times as large as the others, as those of trained Qwen3.",
)
@click.option("--layers", is_flag=True, help="Also show a table of the layers of each model.")
@click.option("--picture", type=flags.FilePath(), help="Draw a .png or .svg file.")
@click.option(
    "--markdown",
    type=flags.FilePath(),
    help="Write the tables to a Markdown file.",
)
@flags.as_json
def report(*, layers: bool, as_json: bool, **arguments: Any) -> None:
    """Measure the loss of quality of each CONVERTED model against its ORIGINAL.

    Every model reads the text through onnxruntime, with real caches. Report perplexity, KL
    divergence and agreement with the original, cache bytes, and the errors of keys, values and
    attention of each layer. Models may also be folders with one decoder each. Exit with code 5,
    without figures, if a CONVERTED model is not ORIGINAL but for its codecs.

    A temporary file holds the original's predictions: 4 bytes for each token and vocabulary entry.

    \b
    Example:
      tq-onnx report model.onnx model.int4.onnx model.int3.onnx --text book.txt --picture cost.svg
    """
    with terminal.progress("Opening the original") as on_progress:
        found = measuring.report(**arguments, layers=layers, on_progress=on_progress)
    terminal.print_warnings(found.warnings)
    if as_json:
        terminal.print_json(found)
    else:
        _print(found, layers=layers)


def _print(found: ComparisonReport, *, layers: bool) -> None:
    from tq_onnx.quality.tables import (
        generation_table,
        layer_table,
        outlier_table,
        report_notes,
        report_table,
    )

    terminal.print_table(report_table(found))
    if terminal.width() is not None:
        terminal.print_line("all columns: in a pipe, with --markdown FILE, or with --json")
    for table in (generation_table(found), outlier_table(found)):
        if table is not None:
            terminal.print_table(table)
    if layers:
        for model in (model for model in found.models if model.layers):
            terminal.print_table(layer_table(model, found.layer_tokens))
    for line in report_notes(found):
        terminal.print_line(line)
