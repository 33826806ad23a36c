"""ONNX Runtime's own attention with a cache: GroupQueryAttention and Attention of opset 24."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from contender import Array, Step, normal, repeated
from onnxmodel import MICROSOFT, OnnxStep, OrtPrepared, constant, model, value

F32, F16, U8, I8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8, ir.DataType.INT8
I32, I64 = ir.DataType.INT32, ir.DataType.INT64
BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}


class GroupQueryAttention:
    """GroupQueryAttention with its shared buffer."""

    most_copies = None

    def __init__(self, cache: str, per_channel: bool = False) -> None:
        """Chooses the cache.

        Args:
            cache: float32, float16, int8 or int4; everything else is float32 with the last two.
            per_channel: a scale for each channel, in place of one for all.
        """
        self._cache, self._per_channel = cache, per_channel

    def version(self) -> str:
        """Of onnxruntime."""
        return str(ort.__version__)

    def cache_bytes(self, step: Step) -> int:
        """Codes only: the scales are part of the model."""
        return step.vectors * step.head_size * BITS[self._cache] // 8

    def prepare(self, step: Step, threads: int, copies: int) -> OrtPrepared:
        """A session with the operator."""
        return OrtPrepared(self._model(step), threads, copies)

    def _model(self, step: Step) -> OnnxStep:
        size, heads, new = step.head_size, step.kv_heads, step.new
        float_type, dtype = (F16, np.float16) if self._cache == "float16" else (F32, np.float32)
        cache_type = {"int8": I8, "int4": U8}.get(self._cache, float_type)
        inputs = [
            value("query", float_type, 3),
            value("key", float_type, 3),
            value("value", float_type, 3),
            value("past_key", cache_type, 4),
            value("past_value", cache_type, 4),
            value("seqlens_k", I32, 1),
            value("total_sequence_length", I32, 0),
        ]
        attributes: dict[str, str | int | float] = {
            "num_heads": step.query_heads,
            "kv_num_heads": heads,
            "scale": step.scale,
        }
        operands: list[ir.Value | None] = list(inputs)
        scales = []
        if self._cache.startswith("int"):
            bits = BITS[self._cache]
            kind = "PER_CHANNEL" if self._per_channel else "PER_TENSOR"
            attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
            shape = (1, heads, 1, size) if self._per_channel else (1,)
            steps = np.full(shape, 4 / (2 ** (bits - 1) - 1), np.float32)
            scales = [constant("k_scale", steps), constant("v_scale", steps)]
            operands += [*[None] * 5, *scales]
        node = ir.node(
            "GroupQueryAttention", operands, attributes, domain=MICROSOFT, version=1, num_outputs=3
        )
        rows = _rows(self._cache, size)
        kept = (step.batch, heads, step.context, rows.shape[-1])
        answer = (step.batch, new, step.query_heads * size)
        return OnnxStep(
            model(
                inputs,
                [node],
                [
                    (node.outputs[0], "output", float_type),
                    (node.outputs[1], "present_key", cache_type),
                    (node.outputs[2], "present_value", cache_type),
                ],
                scales,
                opsets={"": 18, MICROSOFT: 1},
            ),
            {
                "query": normal(answer, dtype),
                "key": normal((step.batch, new, heads * size), dtype, 1),
                "value": normal((step.batch, new, heads * size), dtype, 2),
                "seqlens_k": np.full(step.batch, step.context - 1, np.int32),
                "total_sequence_length": np.array(step.context, np.int32),
            },
            {
                "past_key": ("present_key", repeated(rows, kept)),
                "past_value": ("present_value", repeated(rows, kept)),
            },
            (answer, np.dtype(dtype)),
        )


class Attention:
    """Attention of opset 24 with TensorScatter, float32: the cache stays in its buffer."""

    most_copies = None

    def version(self) -> str:
        """Of onnxruntime."""
        return str(ort.__version__)

    def cache_bytes(self, step: Step) -> int:
        """Of float32."""
        return step.vectors * step.head_size * 4

    def prepare(self, step: Step, threads: int, copies: int) -> OrtPrepared:
        """A session with the three nodes."""
        return OrtPrepared(self._model(step), threads, copies)

    def _model(self, step: Step) -> OnnxStep:
        names = ("query", "key", "value", "past_key", "past_value")
        inputs = {name: value(name, F32, 4) for name in names}
        inputs |= {name: value(name, I64, 1) for name in ("past_length", "total_length")}
        scatters = [
            ir.node(
                "TensorScatter",
                [inputs[f"past_{role}"], inputs[role], inputs["past_length"]],
                {"axis": 2},
            )
            for role in ("key", "value")
        ]
        presents = [node.outputs[0] for node in scatters]
        node = ir.node(
            "Attention",
            [inputs["query"], *presents, None, None, None, inputs["total_length"]],
            {"is_causal": 0, "scale": step.scale},
        )
        rows = _rows("float32", step.head_size)
        kept = (step.batch, step.kv_heads, step.context, step.head_size)
        answer = (step.batch, step.query_heads, step.new, step.head_size)
        new = (step.batch, step.kv_heads, step.new, step.head_size)
        return OnnxStep(
            model(
                list(inputs.values()),
                [*scatters, node],
                [
                    (node.outputs[0], "output", F32),
                    (presents[0], "present_key", F32),
                    (presents[1], "present_value", F32),
                ],
                opsets={"": 24},
            ),
            {
                "query": normal(answer),
                "key": normal(new, seed=1),
                "value": normal(new, seed=2),
                "past_length": np.full(step.batch, step.past, np.int64),
                "total_length": np.full(step.batch, step.context, np.int64),
            },
            {
                "past_key": ("present_key", repeated(rows, kept)),
                "past_value": ("present_value", repeated(rows, kept)),
            },
            (answer, np.dtype(np.float32)),
        )


def _rows(cache: str, head_size: int) -> Array:
    rng = np.random.default_rng(0)
    if cache == "int8":
        return rng.integers(-127, 128, (128, head_size), dtype=np.int8)
    if cache == "int4":
        return rng.integers(0, 256, (128, head_size // 2), dtype=np.uint8)
    return normal((128, head_size), cache)
