"""Export a checkpoint by transformers' own exporter (``transformers.exporters``).

The folder receives ``prefill.onnx``, ``decode.onnx`` and their weights. What they look like:

* dynamic caches: ``decode.onnx`` takes ``input.past_key_values.layers.N.keys`` and returns
  ``output.past_key_values.layers.N.keys``; ``prefill.onnx`` has no past;
* ``--cache static``: caches of ``--capacity`` tokens, written by ScatterND at
  ``cumulative_length``, a scalar input and output of every layer; the mask is a bool
  ``[batch, 1, tokens, capacity]``;
* ``--fusions cpu``: ``com.microsoft.GroupQueryAttention`` with a bias in ``prefill.onnx``;
* ``--fusions cuda``: ``com.microsoft.MultiHeadAttention`` in both.

The example's mask has padding in it: the exporter drops ``attention_mask`` where it is all ones.

Example::

    python models/export_transformers.py models/qwen3-tiny qwen3-transformers --fusions cuda
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.exporters import OnnxConfig, OnnxExporter

CACHES = ("dynamic", "static")
FUSIONS = ("none", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "float16": torch.float16}

# Sizes of the example prompt, and the padding on the left of its first row.
BATCH, TOKENS, PADDING = 2, 6, 2


def export(
    model_dir: Path,
    output: Path,
    *,
    opset: int = 20,
    dtype: str = "float32",
    cache: str = "dynamic",
    capacity: int = 32,
    fusions: str = "none",
) -> None:
    """Export the checkpoint in ``model_dir`` into the folder ``output``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``prefill.onnx`` and ``decode.onnx``.
        opset: operator set of ai.onnx.
        dtype: one of ``DTYPES``, of weights, caches and logits.
        cache: one of ``CACHES``; with "static" all shapes are fixed, as that cache is meant.
        capacity: tokens that a static cache holds.
        fusions: one of ``FUSIONS``: the provider of ONNX Runtime to fuse operators for.
    """
    decoder = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype]).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, decoder.config.vocab_size, (BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    static = cache == "static"
    config = OnnxConfig(
        opset_version=opset,
        dynamic=not static,
        ort_fusions=None if fusions == "none" else fusions,
    )
    generation = GenerationConfig(
        cache_implementation="static", max_cache_len=capacity, do_sample=False
    )
    exported = OnnxExporter().export_for_generation(
        decoder,
        {"input_ids": ids, "attention_mask": mask},
        config,
        multi_token_decode=not static,
        generation_config=generation if static else None,
    )
    exported.save_pretrained(output)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--cache", choices=CACHES, default="dynamic")
    parser.add_argument("--capacity", type=int, default=32, help="tokens of a static cache")
    parser.add_argument("--fusions", choices=FUSIONS, default="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    export(
        options.model_dir,
        options.output,
        opset=options.opset,
        dtype=options.dtype,
        cache=options.cache,
        capacity=options.capacity,
        fusions=options.fusions,
    )
    print(options.output / "decode.onnx")


if __name__ == "__main__":
    main()
