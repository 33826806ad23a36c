"""The parts of every export are recognised, and its logits stay what they were."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.ascend.lowering.parts import finish
from tests.decoders.running import EXACT, Decoder, batch, convert, load, session
from tq_onnx.ascend.lowering.claims import is_float
from tq_onnx.ascend.lowering.layout import lower_layout
from tq_onnx.ascend.lowering.rmsnormalization import lower_norms
from tq_onnx.ascend.lowering.rotary import lower_rotary
from tq_onnx.ascend.lowering.swish import lower_swish
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import integers
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DOMAIN

POSITIONS = 64
QWEN = (9, 4, 2)
"""Norms, rotary embeddings and activations of two layers with norms of queries and keys."""
FOUND = {
    "dynamo-op18-eager": QWEN,
    "dynamo-op18-sdpa": QWEN,
    "dynamo-op18-sdpa-hd128-fp16": QWEN,
    "dynamo-op20-sdpa": QWEN,
    "dynamo-op23-sdpa": QWEN,
    "dynamo-op24-sdpa": QWEN,
    "genai-cpu-fp32": QWEN,
    "genai-cuda-fp16": QWEN,
    "genai-dml-fp16": QWEN,
    "genai09-cpu-fp32": QWEN,
    "genai-cpu-int4": QWEN,
    "legacy-op14-eager": QWEN,
    "legacy-op17-sdpa": QWEN,
    "legacy-op17-sdpa-fp16": QWEN,
    "mobius-default": QWEN,
    "optimum": QWEN,
    "hf-prefill": QWEN,
    "hf-static-prefill": QWEN,
    "mobius-static": QWEN,
    "dynamo-llama": (5, 4, 2),
    "dynamo-phi3": (5, 4, 2),
    # The tanh of a GELU is no SiLU.
    "dynamo-gemma2": (9, 4, 0),
    "dynamo-gemma3": (13, 4, 0),
    # No kernel for CANN takes it.
    "dynamo-op18-sdpa-bf16": (0, 0, 0),
}
RUNNABLE = (
    *("dynamo-op18-sdpa", "dynamo-llama", "dynamo-phi3", "dynamo-gemma2", "dynamo-gemma3"),
    *("genai-cpu-int4", "hf-prefill"),
)
"""Above all those that cannot be lowered as a whole, see ``test_lower``."""
ALLOWED = {
    *("Where", "Not", "Cast", "Mul", "Add", "ReduceSum", "Constant", "Expand", "Unsqueeze"),
    *("Slice", "Gather", "MatMul", "Reshape"),
}
"""What masks are made of, embeddings, and what the provider claims itself."""
PLAIN = [
    name
    for name, found in FOUND.items()
    if found == QWEN and not any(part in name for part in ("int4", "prefill", "moe"))
]


def lower(model: ir.Model) -> tuple[int, int, int]:
    fill_shapes(model)
    build = Builder(model.graph)
    found = (
        lower_norms(model, build),
        lower_rotary(model, build, POSITIONS),
        lower_swish(model, build),
    )
    lower_layout(model, build)
    return found


@pytest.mark.parametrize("name", FOUND)
def test_every_part_is_found(name: str) -> None:
    model = load(name)
    convert(model, "raw")
    assert lower(model) == FOUND[name]
    finish(model)
    # What has been replaced has gone as a whole.
    assert lower(model) == (0, 0, 0)


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_else_computes_floats(name: str) -> None:
    model = load(name)
    convert(model, "raw")
    lower(model)
    finish(model)
    left = {
        node.op_type for node in model.graph if node.domain != DOMAIN and is_float(node.outputs[0])
    }
    assert left <= ALLOWED
    reshapes = [node for node in model.graph if node.op_type == "Reshape"]
    assert all(
        integers(node.inputs[1]) is not None for node in reshapes if is_float(node.outputs[0])
    )


@pytest.mark.parametrize("name", RUNNABLE)
def test_logits_stay_as_they_were(name: str) -> None:
    model = load(name)
    plan = convert(model, "raw")
    data, size = batch(12, 2), plan.layers[0].head_size
    expected = Decoder(session(model), size=2, head_size=size).run(data)
    lower(model)
    finish(model)
    found = Decoder(session(model), size=2, head_size=size).run(data)
    assert np.abs(found - expected).max() <= EXACT * np.abs(expected).max()
