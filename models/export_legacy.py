"""Export a checkpoint by ``torch.onnx.export(dynamo=False)``, the exporter of TorchScript.

Inputs and outputs are those of ``torch_decoder``. The attention is MatMul, Softmax, MatMul with
some 300 nodes of shape arithmetic a layer; opset 17 is the newest this exporter was finished for.

``--tokens 1`` traces a step of one token, as examples often do. The graph then holds shapes folded
for one token, and takes no other number of them.

Example::

    python models/export_legacy.py models/qwen3-tiny model.onnx --opset 17 --attention sdpa
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from torch_decoder import (
    ATTENTION_FORMS,
    DTYPES,
    MASK_AXES,
    NEW,
    PAST_AXES,
    PRESENT_AXES,
    TOKENS_AXES,
    CachesAsPairs,
    example_step,
    load_decoder,
    past_names,
    present_names,
)

OPSETS = (14, 15, 16, 17)


class CachesAsTensors(CachesAsPairs):
    """The same decoder for a tracer that takes and returns tensors only: key, value, key, ..."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *caches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the logits, then the caches after this step."""
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        logits, present = super().forward(input_ids, attention_mask, position_ids, pairs)
        return (logits, *(tensor for pair in present for tensor in pair))


def export(
    model_dir: Path,
    output: Path,
    *,
    opset: int = 17,
    attention: str = "sdpa",
    dtype: str = "float32",
    tokens: int = NEW,
) -> None:
    """Export the checkpoint in ``model_dir`` to ``output``.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: the ``.onnx`` file, weights inside.
        opset: one of ``OPSETS``.
        attention: one of ``torch_decoder.ATTENTION_FORMS``.
        dtype: one of ``torch_decoder.DTYPES``, of weights, caches and logits.
        tokens: number of tokens of the traced step; 1 makes a graph for one token.
    """
    decoder = load_decoder(model_dir, attention=attention, dtype=dtype)
    step = example_step(decoder.config, dtype=dtype, tokens=tokens)
    past, present = past_names(decoder.config), present_names(decoder.config)
    axes = TOKENS_AXES if tokens > 1 else {0: TOKENS_AXES[0]}
    caches = [tensor for pair in step.past_key_values for tensor in pair]
    with torch.no_grad(), warnings.catch_warnings():
        # One warning for every Python value that becomes a constant.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            CachesAsTensors(decoder),
            (step.input_ids, step.attention_mask, step.position_ids, *caches),
            str(output),
            dynamo=False,
            opset_version=opset,
            input_names=["input_ids", "attention_mask", "position_ids", *past],
            output_names=["logits", *present],
            dynamic_axes={
                "input_ids": axes,
                "attention_mask": MASK_AXES,
                "position_ids": axes,
                "logits": axes,
                **dict.fromkeys(past, PAST_AXES),
                **dict.fromkeys(present, PRESENT_AXES),
            },
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("output", type=Path, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, choices=OPSETS, default=17)
    parser.add_argument("--attention", choices=ATTENTION_FORMS, default="sdpa")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--tokens", type=int, default=NEW, help="tokens of the traced step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    export(
        options.model_dir,
        options.output,
        opset=options.opset,
        attention=options.attention,
        dtype=options.dtype,
        tokens=options.tokens,
    )
    print(options.output)


if __name__ == "__main__":
    main()
