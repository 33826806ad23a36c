"""Export a Qwen3 checkpoint by ``torch.onnx.export(dynamo=True)``, with key/value caches.

What comes out has the names that Hugging Face decoders have:

* inputs ``input_ids`` ``[batch_size, sequence_length]``, ``attention_mask``
  ``[batch_size, total_sequence_length]``, ``position_ids`` ``[batch_size, sequence_length]``, all
  int64, and ``past_key_values.N.key`` / ``past_key_values.N.value``
  ``[batch_size, num_key_value_heads, past_sequence_length, head_dim]``;
* outputs ``logits`` and ``present.N.key`` / ``present.N.value``.

The exporter cannot take a ``DynamicCache``, so a wrapper passes the caches as a list of pairs.

Of the nodes' metadata only the module scopes stay. Stack traces name files of the machine that
exported, and the rest is larger than the graph.

Example::

    python models/export_dynamo.py models/qwen3-tiny model.onnx --opset 18 --attention sdpa
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

OPSETS = (18, 20)
ATTENTION_FORMS = ("sdpa", "eager")
DTYPES = {"float32": torch.float32, "float16": torch.float16}

#: From this many bytes on, weights go to OUT.onnx.data.
EXTERNAL_FROM_BYTES = 8 << 20

# Sizes of the example input; all different, so that no two dimensions are taken for one.
BATCH, PAST, NEW = 2, 5, 3

DROPPED_METADATA = (
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",
)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CachesAsPairs(torch.nn.Module):
    """A decoder that takes and returns its caches as ``(key, value)`` pairs, one per layer."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        """Wrap ``decoder``."""
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Pairs,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the logits and the caches after this step."""
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past_key_values):
            cache.update(key, value, layer)
        result = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return result.logits, [(layer.keys, layer.values) for layer in cache.layers]


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
        attention: one of ``ATTENTION_FORMS``, the implementation inside transformers.
        dtype: one of ``DTYPES``, of weights, caches and logits.
    """
    decoder = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation=attention, dtype=DTYPES[dtype]
    ).eval()
    config = decoder.config
    layers = range(config.num_hidden_layers)
    shape = (BATCH, config.num_key_value_heads, PAST, config.head_dim)
    generator = torch.Generator().manual_seed(0)

    def random_cache() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    positions = torch.arange(PAST, PAST + NEW)[None].expand(BATCH, NEW).contiguous()
    arguments = (
        torch.randint(3, config.vocab_size, (BATCH, NEW), generator=generator),
        torch.ones(BATCH, PAST + NEW, dtype=torch.long),
        positions,
        [(random_cache(), random_cache()) for _ in layers],
    )
    tokens = {0: "batch_size", 1: "sequence_length"}
    total = {0: "batch_size", 1: "total_sequence_length"}
    cache = {0: "batch_size", 2: "past_sequence_length"}
    program = torch.onnx.export(
        CachesAsPairs(decoder),
        arguments,
        dynamo=True,
        opset_version=opset,
        input_names=["input_ids", "attention_mask", "position_ids"]
        + [f"past_key_values.{n}.{part}" for n in layers for part in ("key", "value")],
        output_names=["logits"]
        + [f"present.{n}.{part}" for n in layers for part in ("key", "value")],
        dynamic_shapes=(tokens, total, tokens, [(cache, cache) for _ in layers]),
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
