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
    help="UTF-8 text to read, of the kind that the model will see. By default a text that comes "
    "with tq-onnx: prose, code and lists, in several languages.",
)
@click.option(
    "-o",
    "--output",
    type=flags.FilePath(),
    help="File to write.  [default: MODEL with .calibration.safetensors]",
)
@click.option(
    "--tokens",
    type=flags.Whole(64),
    default=16384,
    show_default=True,
    help="Tokens of the text to read.",
)
@click.option(
    "--skip",
    type=flags.Whole(),
    default=0,
    show_default=True,
    help="Tokens at the start of the text to skip, to measure quality on them later.",
)
@click.option(
    "--context",
    type=flags.Whole(16),
    help="Tokens of the longest windows, as many as the contexts that the model is used with "
    "have.  [default: 2048, or as many as the model takes]",
)
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@flags.as_json
def calibrate(*, as_json: bool, **arguments: Any) -> None:
    """Gather statistics of an original MODEL, for `convert --calibration`.

    Write the means and energies of keys, values and queries to a small safetensors file. convert
    turns them into offsets, which cost no byte per token, into scales for a model without norms of
    queries and keys, and into what the presets int2.75 and int2.5 need to know: which coordinates
    deserve more bits. MODEL is not changed. MODEL may be a folder with one decoder.

    \b
    Example:
      tq-onnx calibrate model.onnx
      tq-onnx convert model.onnx --calibration model.calibration.safetensors
    """
    with terminal.progress("Opening the model") as on_progress:
        found = calibrating.calibrate(**arguments, on_progress=on_progress)
    terminal.print_warnings(found.warnings)
    if as_json:
        terminal.print_json(found)
        return
    typed = (arguments["model"], arguments["output"] or found.output)
    model, output = (shlex.quote(str(path)) for path in typed)
    terminal.print_facts(
        [
            ("layers", str(found.layers)),
            ("text", found.source),
            ("tokens", f"{found.tokens:,} in windows of up to {found.context:,}"),
            ("output", f"{found.output} ({found.bytes:,} bytes)"),
            ("next", f"tq-onnx convert {model} --calibration {output}"),
        ]
    )
