"""Export a checkpoint by ``optimum-cli export onnx`` of optimum-onnx.

Torch's legacy exporter is inside, so the graph is much like that of ``export_legacy``; the mask is
made once a layer.

Arguments after the two folders go to the exporter as they are.

Example::

    python models/export_optimum.py models/qwen3-tiny qwen3-optimum --dtype fp16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import transformers4
from command_line import run_module


def export(model_dir: Path, output: Path, *arguments: str) -> None:
    """Export the checkpoint in ``model_dir`` into the folder ``output``, as ``model.onnx``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``model.onnx`` and what belongs to it.
        arguments: more for the exporter; without ``--dtype``, weights become float32.

    Raises:
        RuntimeError: the exporter failed; the message ends with what it printed.
    """
    dtype = () if "--dtype" in arguments else ("--dtype", "fp32")
    with transformers4.readable(model_dir) as checkpoint:
        run_module(
            "optimum.commands.optimum_cli",
            *("export", "onnx", "--model", str(checkpoint)),
            *("--task", "text-generation-with-past", *dtype, *arguments, str(output)),
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    options, arguments = parser.parse_known_args()
    export(options.model_dir, options.output, *arguments)
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
