"""Export a Qwen3 checkpoint by the model builder of onnxruntime-genai.

Runs ``python -m onnxruntime_genai.models.builder`` as users run it. What the attention becomes:

========= ==== ================================================================================
precision ep   attention
========= ==== ================================================================================
fp32      cpu  ``com.microsoft.GroupQueryAttention`` with the rotary embedding inside
int4      cpu  the same, with weights as ``com.microsoft.MatMulNBits``
fp16      cuda the same, with the q_norm and k_norm weights as its inputs 14 and 15
int4      cuda both
========= ==== ================================================================================

The folder receives ``model.onnx``, ``model.onnx.data``, ``genai_config.json`` and, where the
checkpoint has one, the tokenizer's files.

Example::

    python models/export_genai.py models/qwen3-tiny qwen3-genai --precision fp32 --ep cpu
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PRECISIONS = ("fp32", "fp16", "int4")
EXECUTION_PROVIDERS = ("cpu", "cuda")


def export(model_dir: Path, output: Path, *, precision: str = "fp32", ep: str = "cpu") -> None:
    """Export the checkpoint in ``model_dir`` into the folder ``output``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``model.onnx`` and what belongs to it.
        precision: one of ``PRECISIONS``.
        ep: one of ``EXECUTION_PROVIDERS``; it decides the form of the graph. Nothing runs on it.

    Raises:
        RuntimeError: the builder failed; the message ends with what it printed.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-m", str(model_dir), "-i", str(model_dir), "-o", str(output)]
        command += ["-p", precision, "-e", ep, "-c", cache]
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the builder exited with {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--ep", choices=EXECUTION_PROVIDERS, default="cpu")
    options = parser.parse_args()
    export(options.model_dir, options.output, precision=options.precision, ep=options.ep)
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
