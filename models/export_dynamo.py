"""Export a checkpoint by ``torch.onnx.export(dynamo=True)``, with key/value caches.

Inputs and outputs are those of ``torch_decoder``. What the attention becomes:

========= ====== =============================================================================
attention opset  attention
========= ====== =============================================================================
sdpa      18, 20 MatMul, Softmax, MatMul; the scale's square root on the query and on the key
eager     any    the same with one Mul after the first MatMul
sdpa      23, 24 ``ai.onnx.Attention`` without caches; Concat and repeat outside
========= ====== =============================================================================

The exporter cannot take a ``DynamicCache``, so a wrapper passes the caches as a list of pairs.

Of the nodes' metadata only the module scopes stay. Stack traces name files of the machine that
exported, and the rest is larger than the graph.

Example::

    python models/export_dynamo.py models/qwen3-tiny model.onnx --opset 18 --attention sdpa
"""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx_ir as ir
import torch
from torch_decoder import (
    ATTENTION_FORMS,
    DTYPES,
    MASK_AXES,
    PAST_AXES,
    TOKENS_AXES,
    CachesAsPairs,
    example_step,
    load_decoder,
    past_names,
    present_names,
)

OPSETS = (18, 20, 23, 24)

#: From this many bytes on, weights go to OUT.onnx.data.
EXTERNAL_FROM_BYTES = 8 << 20

DROPPED_METADATA = (
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",
)


def export(
    model_dir: Path,
    output: Path,
    *,
    opset: int = 18,
    attention: str = "sdpa",
    dtype: str = "float32",
) -> None:
    """Export the checkpoint in ``model_dir`` to ``output``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: the ``.onnx`` file; large weights go beside it, to ``NAME.onnx.data``.
        opset: one of ``OPSETS``.
        attention: one of ``torch_decoder.ATTENTION_FORMS``.
        dtype: one of ``torch_decoder.DTYPES``, of weights, caches and logits.
    """
    decoder = load_decoder(model_dir, attention=attention, dtype=dtype)
    config = decoder.config
    step = example_step(config, dtype=dtype)
    caches = [(PAST_AXES, PAST_AXES) for _ in step.past_key_values]
    program = torch.onnx.export(
        CachesAsPairs(decoder),
        (step.input_ids, step.attention_mask, step.position_ids, step.past_key_values),
        dynamo=True,
        opset_version=opset,
        input_names=["input_ids", "attention_mask", "position_ids", *past_names(config)],
        output_names=["logits", *present_names(config)],
        dynamic_shapes=(TOKENS_AXES, MASK_AXES, TOKENS_AXES, caches),
        optimize=True,
        verbose=False,
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    trim_metadata(program.model)
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    program.save(output, external_data=weights >= EXTERNAL_FROM_BYTES)


def trim_metadata(model: ir.Model) -> None:
    """Remove the metadata of ``DROPPED_METADATA`` from every node."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for key in DROPPED_METADATA:
            node.metadata_props.pop(key, None)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, choices=OPSETS, default=18)
    parser.add_argument("--attention", choices=ATTENTION_FORMS, default="sdpa")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    export(
        options.model_dir,
        options.output,
        opset=options.opset,
        attention=options.attention,
        dtype=options.dtype,
    )
    print(options.output)


if __name__ == "__main__":
    main()
