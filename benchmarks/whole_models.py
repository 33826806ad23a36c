"""Whole models for end_to_end.py: of the shape of Qwen3-0.6B, with random weights.

``make_model`` saves a checkpoint with transformers and exports it with the model builder of
onnxruntime-genai, whose fused GroupQueryAttention with a shared buffer is the strongest loop that
ONNX Runtime has on a CPU. It needs torch, transformers and onnxruntime-genai; a model that is in
the folder already needs none of them.

``with_cache`` gives such a model one of ONNX Runtime's own quantised caches.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.session import make_session

REPOSITORY = Path(__file__).resolve().parents[1]
QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
WEIGHTS = {"float32": "fp32", "int4": "int4"}
"""What the builder calls them; its int4 is MatMulNBits in blocks of 32."""

_STORED = {"int8": (8, ir.DataType.INT8, "int8", 1), "int4": (4, ir.DataType.UINT8, "uint8", 2)}
"""Bits, type of the cache, the same in numpy, coordinates in an element."""

_SCALES = 12
"""Where GroupQueryAttention takes the scales of its keys; those of its values come next."""

_LARGEST = 4.0
"""Standard deviations that the scales leave room for; speed does not depend on it."""


def make_model(work: Path, weights: str, layers: int) -> Path:
    """The model file, made if it is not there.

    Args:
        work: folder for everything; 1.2 GB for the checkpoint, 2.4 GB for float32, 0.4 GB for int4.
        weights: one of ``WEIGHTS``.
        layers: number of layers; that of Qwen3-0.6B is 28.
    """
    model = work / f"{weights}-{layers}" / "model.onnx"
    if model.is_file():
        return model
    checkpoint = work / f"checkpoint-{layers}"
    if not (checkpoint / "config.json").is_file():
        _save_checkpoint(checkpoint, layers)
    sys.path.insert(0, str(REPOSITORY / "models"))
    from export_genai import export

    # Exported elsewhere and then moved, so that what is there is whole.
    part = model.parent.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    export(checkpoint, part, precision=WEIGHTS[weights])
    part.replace(model.parent)
    return model


def _save_checkpoint(folder: Path, layers: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **(QWEN3_06B | {"num_hidden_layers": layers}))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    # The builder insists on a tokenizer; this one's ids are not the model's.
    for file in (REPOSITORY / "models" / "qwen3-tiny").glob("tokenizer*.json"):
        shutil.copyfile(file, folder / file.name)


def with_cache(original: OpenModel, cache: str, *, threads: int | None) -> OpenModel:
    """Opens a model of the builder with a quantised cache of ONNX Runtime, one scale per tensor.

    Args:
        original: the model as it is; nothing is written.
        cache: int8 or int4.
        threads: threads within an operator.

    Raises:
        UnsupportedModelError: its attention is not GroupQueryAttention, or this onnxruntime has no
            such cache.
    """
    path, signature = original.path, original.signature
    bits, dtype, numpy_type, packed = _STORED[cache]
    model = ir.load(path)
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if 2 * len(nodes) != len(signature.caches):
        raise UnsupportedModelError("its attention is not GroupQueryAttention", where=str(path))
    step = ir.tensor(np.full(1, _LARGEST / (2 ** (bits - 1) - 1), np.float32), name="cache_scale")
    scale = ir.Value(
        name="cache_scale", type=ir.TensorType(step.dtype), shape=step.shape, const_value=step
    )
    model.graph.register_initializer(scale)
    for node in nodes:
        node.resize_inputs(_SCALES + 2)
        for index in range(2):
            node.replace_input_with(_SCALES + index, scale)
        node.attributes["k_quant_type"] = ir.AttrString("k_quant_type", "PER_TENSOR")
        node.attributes["v_quant_type"] = ir.AttrString("v_quant_type", "PER_TENSOR")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", bits)
        for value in (*node.inputs[3:5], *node.outputs[1:3]):
            assert value is not None
            value.type = ir.TensorType(dtype)
    session = make_session(
        ir.to_proto(model).SerializeToString(),
        library=False,
        threads=threads,
        external_data=path.parent,
    )
    caches = tuple(
        replace(spec, type_name=numpy_type, row=spec.row // packed) for spec in signature.caches
    )
    return OpenModel(path, session, replace(signature, caches=caches))
