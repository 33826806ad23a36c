"""``tq-onnx adopt``: give a converted folder the operator library of another platform."""

from __future__ import annotations

from pathlib import Path

import click

from tq_onnx.api import converting
from tq_onnx.cli import flags, terminal
from tq_onnx.runtime.platforms import PLATFORMS


@click.command()
@click.argument("folder", type=flags.FilePath())
@click.option(
    "--for",
    "platform",
    type=click.Choice(list(PLATFORMS)),
    metavar="PLATFORM",
    help=f"Platform to adopt the folder for: {', '.join(PLATFORMS)}.  [default: that of WHEEL, "
    "or this one]",
)
@click.option("--wheel", type=flags.FilePath(), help=flags.WHEEL)
@flags.as_json
def adopt(*, folder: Path, platform: str | None, wheel: Path | None, as_json: bool) -> None:
    """Give a converted folder of onnxruntime-genai the operator library of a platform.

    FOLDER was written by `tq-onnx convert` and carries the library of the machine that converted
    it. Its models are the same for every platform and stay. Without options it gets the library of
    this installation.

    \b
    Example:
      tq-onnx adopt qwen3-genai-int4/
      tq-onnx adopt qwen3-genai-int4/ --for windows-arm64 --wheel wheels/
      tq-onnx adopt qwen3-genai-int4/ --for macos-arm64 --wheel wheels/ --json
    """
    report = converting.adopt(folder, platform=platform, wheel=wheel)
    if as_json:
        terminal.print_json(report)
        return
    others = [name for name in report.replaced if name != report.library]
    terminal.print_facts(
        [
            ("folder", folder),
            ("platform", report.platform),
            ("library", f"{report.library} ({report.bytes_written:,} bytes written)"),
            ("from", report.source),
            *(("removed", name) for name in others),
        ]
    )
