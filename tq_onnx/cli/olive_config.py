"""``tq-onnx olive-config``: write the package configuration with which Olive finds our pass."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tq_onnx.cli import flags, terminal


@click.command("olive-config")
@click.argument("output", type=flags.FilePath(), default=Path("olive-tq.json"))
@click.option("--overwrite", is_flag=True, help=flags.OVERWRITE)
def olive_config(output: Path, overwrite: bool) -> None:
    """Write the package configuration with which Olive finds the pass TurboQuantKVCache.

    OUTPUT is a JSON file, by default olive-tq.json. It has the passes of the installed Olive and
    the one of tq-onnx; write it again after an update of Olive.

    \b
    Example:
      tq-onnx olive-config
      olive run --config recipe.json --package-config olive-tq.json
    """
    from tq_onnx.files.save import all_or_nothing
    from tq_onnx.integrations.olivepackage import PASS, package_config

    content = json.dumps(package_config(), indent=2) + "\n"
    with all_or_nothing(output, overwrite=overwrite) as transaction:
        transaction.write(output, [content.encode()])
    terminal.print_line(f"{output}: the passes of Olive, and {PASS}")
