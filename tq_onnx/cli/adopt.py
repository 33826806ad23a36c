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
    help=f"{flags.PLATFORM}  [default: that of the wheel, else this machine's]",
)
@click.option("--wheel", type=flags.FilePath(), help=flags.WHEEL)
@flags.as_json
def adopt(*, folder: Path, platform: str | None, wheel: Path | None, as_json: bool) -> None:
    """Replace the operator library in a converted folder of onnxruntime-genai.

    Reads the library of this installation, or that in a wheel. Writes it to FOLDER, a folder that
    `tq-onnx convert` wrote, and removes the library that was there. The models do not depend on the
    platform and stay unchanged.

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
    removed = [name for name in report.replaced if name != report.library]
    terminal.print_facts(
        [
            ("folder", folder),
            ("platform", report.platform),
            ("library", f"{report.library} ({report.bytes_written:,} bytes written)"),
            ("from", report.source),
            *(("removed", name) for name in removed),
        ]
    )
