"""Export a checkpoint by ``olive run``, with examples/olive/recipe.json.

The recipe's first passes build the model and quantise its weights; the last one converts the cache.
It runs only with ``--package-config``, the file of ``tq-onnx olive-config``: without, the folder
receives what the conversion begins with.

Example::

    python models/export_olive.py models/qwen3-tiny qwen3-olive
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from command_line import run_module

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "olive" / "recipe.json"


def export(model_dir: Path, output: Path, package_config: Path | None = None) -> None:
    """Run the recipe.

    Args:
        model_dir: folder of the checkpoint.
        output: folder for the model and what belongs to it.
        package_config: with the pass of tq-onnx.

    Raises:
        RuntimeError: Olive failed; the message ends with what it printed.
    """
    recipe = json.loads(RECIPE.read_text(encoding="utf-8"))
    recipe["input_model"]["model_path"] = str(model_dir.resolve())
    recipe["output_dir"] = str(output.resolve())
    arguments = []
    if package_config is None:
        recipe["passes"].pop("cache")
    else:
        arguments = ["--package-config", str(package_config)]
    os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        recipe["cache_dir"] = str(Path(folder, "cache"))
        path = Path(folder, "recipe.json")
        path.write_text(json.dumps(recipe), encoding="utf-8")
        run_module("olive", "run", "--config", str(path), *arguments)
    if not (output / "model.onnx").is_file():
        raise RuntimeError("olive run made no model")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--package-config", type=Path, metavar="FILE")
    options = parser.parse_args()
    export(options.model_dir, options.output, options.package_config)
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
