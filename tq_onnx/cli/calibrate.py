"""``tq-onnx calibrate``: statistics of a model on a text. See ``tq_onnx.measure.calibrate``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.errors import UsageError


@click.command()
@click.argument("model", type=click.Path(path_type=Path, readable=False))
@click.option(
    "--text",
    type=click.Path(path_type=Path, readable=False),
    required=True,
    help="UTF-8 text to read, of the kind that the model will see.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: MODEL with .calibration.safetensors]",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=64),
    default=16384,
    show_default=True,
    help="Tokens of the text to read.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens at the start of the text to leave out, to measure quality on them later.",
)
@flags.windows
@flags.tokenizer
@flags.threads
@flags.no_library
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@flags.as_json
def calibrate(
    *,
    model: Path,
    text: Path,
    output: Path | None,
    tokens: int,
    skip: int,
    context: int,
    tokenizer: Path | None,
    threads: int | None,
    no_library: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Gather statistics of an original MODEL, for `convert --calibration`.

    Mean and energy of keys, values and queries go into a small safetensors file: convert makes
    offsets of them, which cost no byte per token, and scales where the model has no norms of
    queries and keys to put them into. MODEL is not changed, and may be a folder with one decoder.

    \b
    Example:
      tq-onnx calibrate model.onnx --text book.txt
      tq-onnx convert model.onnx --calibration model.calibration.safetensors
    """
    from tq_onnx.codec.gathering import FEWEST_TOKENS
    from tq_onnx.conversion.calibrationfile import check_target, write_calibration
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import file_tokens, require_tokenizer

    model = find_model(model)
    target = output or model.with_name(f"{model.stem}.calibration.safetensors")
    check_target(target, overwrite=overwrite)
    words = require_tokenizer(tokenizer, model)
    empty = words.encode("")
    ids = file_tokens(text, words, max(skip, len(empty)) + tokens)
    # What every text begins with, if anything, stands at the beginning of every window.
    begin = _shared(empty, ids)
    ids = ids[max(skip, len(begin)) :][:tokens]
    if len(ids) < FEWEST_TOKENS:
        behind = f"behind the first {skip:,} tokens " if skip else ""
        raise UsageError(
            f"{behind}there are {len(ids)} tokens, and {FEWEST_TOKENS} are the fewest that tell "
            "anything",
            where=str(text),
            fix="skip fewer, or give a longer text" if skip else "give a longer text",
        )
    from tq_onnx.measure.calibrate import calibrate as run

    with terminal.progress("Opening the model") as on_progress:
        found = run(
            model,
            ids,
            context=context,
            begin=begin,
            library=not no_library,
            threads=threads,
            on_progress=on_progress,
        )
    write_calibration(target, found, overwrite=overwrite)
    size = target.stat().st_size
    if as_json:
        terminal.print_json(
            {
                "output": target,
                "bytes": size,
                "layers": len(found.layers),
                "tokens": found.tokens,
                "context": found.context,
                "text_digest": found.text_digest,
            }
        )
        return
    here = shlex.quote(str(model))
    terminal.print_facts(
        [
            ("layers", str(len(found.layers))),
            ("tokens", f"{found.tokens:,} in windows of {found.context:,}"),
            ("output", f"{target} ({size:,} bytes)"),
            ("next", f"tq-onnx convert {here} --calibration {shlex.quote(str(target))}"),
        ]
    )


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    return next(one[:n] for n in range(len(one), -1, -1) if one[:n] == other[:n])
