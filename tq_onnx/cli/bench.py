"""``tq-onnx bench``: how fast a model is before and after. See ``tq_onnx.bench``."""

from __future__ import annotations

from typing import Any

import click

from tq_onnx.api import measuring
from tq_onnx.cli import flags, terminal
from tq_onnx.codec.presets import DEFAULT_PRESET


def _numbers(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """Read numbers of tokens, with commas between them."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is not a list of numbers of tokens, like 1024,4096")
    return numbers


@click.command()
@click.argument("original", type=flags.FilePath())
@click.argument("converted", required=False, type=flags.FilePath())
@click.option(
    "--contexts",
    metavar="N,...",
    callback=_numbers,
    help="Tokens in the caches when decoding starts.  [default: 1024,4096,16384, as far as the "
    "model and the memory allow]",
)
@click.option(
    "--tokens",
    type=flags.Whole(1),
    default=32,
    show_default=True,
    help="Time N decode steps for each model and context.",
)
@click.option(
    "--prompt-limit",
    type=flags.Whole(),
    default=4096,
    show_default=True,
    help="Measure the time to the first token for contexts of up to N tokens. Longer contexts are "
    "filled with copies of a short prompt's cache rows.",
)
@click.option(
    *flags.PRESET_NAMES,
    type=flags.PresetName(),
    metavar="PRESET",
    help=f"{flags.PRESET} Only without CONVERTED.  [default: {DEFAULT_PRESET}]",
)
@flags.threads
@flags.no_library
@flags.picture("--plot")
@flags.as_json
def bench(*, as_json: bool, **arguments: Any) -> None:
    """Measure the speed of an ORIGINAL model before and after its conversion.

    Reads ORIGINAL and CONVERTED, each a file or a folder with one decoder. Without CONVERTED, it
    converts ORIGINAL in memory. Prints decode speed, time to the first token, cache bytes and
    floors (times of reading the caches once from memory) for several contexts. The models take
    turns, with batch size 1, random tokens and, where possible, caches that are updated in place.

    \b
    Example:
      tq-onnx bench model.onnx
      tq-onnx bench model.onnx --contexts 1024,8192 --picture speed.svg
      tq-onnx bench model.onnx model.k8v4.onnx --json
    """
    from tq_onnx.speed.tables import bench_notes, bench_table

    with terminal.progress("Opening the original") as on_progress:
        report = measuring.bench(**arguments, on_progress=on_progress)
    if as_json:
        terminal.print_json(report)
        return
    terminal.print_table(bench_table(report))
    for line in bench_notes(report):
        terminal.print_line(line)
