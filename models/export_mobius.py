"""Export a checkpoint by mobius (mobius-onnx), which builds graphs by hand for opset 24.

The attention is ``ai.onnx.Attention`` with past and present inside; with ``--static-cache``
TensorScatter writes caches ``key_cache.N`` of a fixed capacity; ``--optimize
group_query_attention`` gives ``com.microsoft.GroupQueryAttention``.

Arguments after the two folders go to ``mobius build`` as they are.

Example::

    python models/export_mobius.py models/qwen3-tiny qwen3-mobius --static-cache --max-seq-len 64
"""

from __future__ import annotations

import argparse
from pathlib import Path

from command_line import run_module


def export(model_dir: Path, output: Path, *arguments: str) -> None:
    """Export the checkpoint in ``model_dir`` into the folder ``output``, as ``model.onnx``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``model.onnx`` and its weights.
        arguments: more for the exporter; without ``--dtype``, weights become float32.

    Raises:
        RuntimeError: the exporter failed; the message ends with what it printed.
    """
    dtype = () if "--dtype" in arguments else ("--dtype", "f32")
    # The graph is named after the checkpoint as it is given: by its last part, not a whole path.
    checkpoint = model_dir.resolve()
    run_module(
        *("mobius", "build", "--config", checkpoint.name, *dtype, *arguments),
        str(output.resolve()),
        folder=checkpoint.parent,
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
