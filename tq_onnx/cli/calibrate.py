"""``tq-onnx calibrate``: statistics of a model on a text. See ``tq_onnx.calibrate``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from tq_onnx.api import calibrating
from tq_onnx.cli import flags, terminal


@click.command()
@click.argument("model", type=flags.FilePath())
@click.option(
    "--text",
    type=flags.FilePath(),
    metavar="FILE",
    help="Read this UTF-8 text.  [default: a bundled text of prose, code and lists in several "
    "languages]",
)
@click.option(
    "-o",
    "--output",
    type=flags.FilePath(),
    metavar="FILE",
    help="Write the statistics to FILE.  [default: MODEL with .calibration.safetensors]",
)
@click.option(
    "--tokens",
    type=flags.Whole(64),
    default=16384,
    show_default=True,
    help="Read N tokens of the text.",
)
@click.option(
    "--skip",
    type=flags.Whole(),
    default=0,
    show_default=True,
    help="Skip the first N tokens of the text, to measure quality on them later.",
)
@click.option(
    "--context",
    type=flags.Whole(16),
    help="Tokens of the longest window of the text. The model may be used with longer contexts.  "
    "[default: 2048, or the model's limit if lower]",
)
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option("--overwrite", is_flag=True, help=flags.OVERWRITE)
@flags.as_json
def calibrate(*, as_json: bool, **arguments: Any) -> None:
    """Gather statistics of an original MODEL for `convert --calibration`.

    Reads MODEL, a file or a folder with one decoder, and runs it on a text. Writes means, mean
    squares and covariances of keys, values and queries to a safetensors file. `convert` uses them
    to center keys and values, and to scale keys in models without norms of queries and keys.

    \b
    Example:
      tq-onnx calibrate model.onnx
      tq-onnx convert model.onnx --calibration model.calibration.safetensors
    """
    with terminal.progress("Opening the model") as on_progress:
        report = calibrating.calibrate(**arguments, on_progress=on_progress)
    terminal.print_warnings(report.warnings)
    if as_json:
        terminal.print_json(report)
        return
    typed = (arguments["model"], arguments["output"] or report.output)
    model, output = (shlex.quote(str(path)) for path in typed)
    terminal.print_facts(
        [
            ("layers", str(report.layers)),
            ("text", report.source),
            ("tokens", f"{report.tokens:,} in windows of up to {report.context:,}"),
            ("output", f"{report.output} ({report.bytes:,} bytes)"),
            ("next", f"tq-onnx convert {model} --calibration {output}"),
        ]
    )
