"""``tq-onnx view``: show a model in Netron, opened at the first converted layer."""

from __future__ import annotations

import sys
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from tq_onnx.cli import flags, terminal


@click.command()
@click.argument("model", type=flags.FilePath())
@click.option(
    "--port",
    type=flags.Whole(0, 65535),
    default=0,
    show_default="any free port",
    help="Serve the page on this port, to this machine only.",
)
@click.option(
    "--browser/--no-browser",
    default=True,
    show_default=True,
    help="Open the page in the default browser.",
)
def view(*, model: Path, port: int, browser: bool) -> None:
    """Show the graph of MODEL in Netron, opened at the first converted layer.

    Reads an original or a converted model, or a folder with one decoder. Prints the address of the
    page, and serves it until Ctrl-C. Needs netron (`pip install 'tq-onnx[view]'`).

    \b
    Example:
      tq-onnx view model.int4.onnx
      tq-onnx view model.int4.onnx --no-browser --port 8080
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.viewing import served

    path = find_model(model)
    with suppress(KeyboardInterrupt), served(path, port=port) as address:
        terminal.print_line(address)
        sys.stdout.flush()
        if browser:
            webbrowser.open(address)
        while True:
            time.sleep(3600)
