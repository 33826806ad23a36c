"""Export a checkpoint by the model builder of onnxruntime-genai, 0.18 or 0.9.

Runs ``python -m onnxruntime_genai.models.builder`` as users run it. What 0.18 makes of attention:

========= ============ ========================================================================
precision ep           attention
========= ============ ========================================================================
fp32      cpu          ``com.microsoft.GroupQueryAttention`` with the rotary embedding inside
int4      cpu          the same, with weights as ``com.microsoft.MatMulNBits``
fp16      cpu          ``com.microsoft.MultiHeadAttention``, caches and repeat outside
fp16      cuda, webgpu GroupQueryAttention, the q_norm and k_norm weights as inputs 14 and 15
int4      cuda, webgpu both
fp16      dml          GroupQueryAttention with the rotary embedding outside
========= ============ ========================================================================

Builder 0.9 keeps the norms outside, and for webgpu the rotary embedding too.

The folder receives ``model.onnx``, ``model.onnx.data``, ``genai_config.json`` and, where the
checkpoint has one, the tokenizer's files.

Example::

    python models/export_genai.py models/qwen3-tiny qwen3-genai --precision fp32 --ep cpu
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import transformers4
from command_line import run_module

PRECISIONS = ("fp32", "fp16", "int4")
EXECUTION_PROVIDERS = ("cpu", "cuda", "dml", "webgpu", "NvTensorRtRtx")


def export(
    model_dir: Path,
    output: Path,
    *,
    precision: str = "fp32",
    ep: str = "cpu",
    extra: tuple[str, ...] = (),
) -> None:
    """Export the checkpoint in ``model_dir`` into the folder ``output``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``model.onnx`` and what belongs to it.
        precision: one of ``PRECISIONS``.
        ep: one of ``EXECUTION_PROVIDERS``; it decides the form of the graph. Nothing runs on it.
        extra: the builder's extra options, ``name=value`` each.

    Raises:
        RuntimeError: the builder failed; the message ends with what it printed.
    """
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        if version("transformers").startswith("4."):
            model_dir = stack.enter_context(transformers4.readable(model_dir))
        run_module(
            "onnxruntime_genai.models.builder",
            *("-m", str(model_dir), "-i", str(model_dir), "-o", str(output)),
            *("-p", precision, "-e", ep, "-c", cache),
            *(("--extra_options", *extra) if extra else ()),
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--ep", choices=EXECUTION_PROVIDERS, default="cpu")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=VALUE", help="option of the builder"
    )
    options = parser.parse_args()
    export(
        options.model_dir,
        options.output,
        precision=options.precision,
        ep=options.ep,
        extra=tuple(options.extra),
    )
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
