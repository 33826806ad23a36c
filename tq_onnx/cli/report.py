"""``tq-onnx report``: what conversions cost in quality. See ``tq_onnx.measure.report``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.errors import ModelFileError, UsageError

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
def report(
    *,
    original: Path,
    converted: tuple[Path, ...],
    text: Path | None,
    tokens: int,
    context: int,
    stride: int | None,
    tokenizer: Path | None,
    threads: int | None,
    no_library: bool,
    peers: bool,
    layers: bool,
    picture: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Measure what each CONVERTED model of one ORIGINAL costs in quality.

    Every model reads the text through onnxruntime, its caches really written and read: perplexity,
    KL divergence and agreement against the original, cache bytes, and for each layer the error of
    keys, values and attention. Models may also be folders with one decoder each. The original's
    predictions are kept in a temporary file, 4 bytes for each token and vocabulary entry.

    \b
    Example:
      tq-onnx report model.onnx model.int4.onnx model.int3.onnx --text book.txt --picture cost.svg
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import model_tokens
    from tq_onnx.measure.picture import check_picture, draw_quality
    from tq_onnx.measure.report import report as run
    from tq_onnx.measure.tables import to_page

    if picture is not None:
        check_picture(picture)
    if markdown is not None:
        _check_page(markdown)
    original = find_model(original)
    models = [find_model(path) for path in converted]
    ids, source = model_tokens((original, *models), text, tokens, tokenizer)
    with terminal.progress("Opening the original") as on_progress:
        found = run(
            original,
            models,
            ids,
            source=source,
            context=context,
            stride=stride,
            library=not no_library,
            threads=threads,
            peers=peers,
            on_progress=on_progress,
        )
    if picture is not None:
        draw_quality(found, picture)
    if markdown is not None:
        markdown.write_text(to_page(found, _link(markdown, picture)), encoding="utf-8")
    if as_json:
        terminal.print_json(found)
    else:
        _print(found, layers=layers)


def _check_page(path: Path) -> None:
    """Refuses a page that could not be written, or might be a model."""
    if path.suffix.lower() != ".md":
        raise UsageError("a page of Markdown ends with .md", where=str(path))
    if not path.parent.is_dir():
        raise ModelFileError("there is no such folder", where=str(path.parent))


def _link(page: Path, picture: Path | None) -> str | None:
    """Where a page finds its picture."""
    if picture is None:
        return None
    return Path(os.path.relpath(picture.resolve(), page.resolve().parent)).as_posix()


def _print(found: ComparisonReport, *, layers: bool) -> None:
    from tq_onnx.measure.tables import layer_table, report_notes, report_table

    terminal.print_table(report_table(found))
    if layers:
        for model in (model for model in found.models if model.layers):
            terminal.print_table(layer_table(model, found.layer_tokens))
    for line in report_notes(found):
        terminal.print_line(line)
