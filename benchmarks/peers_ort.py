"""ONNX Runtime's own attention with a cache, and a matrix product that says what it could reach."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from contender import Array, Step, normal, repeated
from onnxmodel import OnnxStep, OrtPrepared

from tests.operatormodels import OperatorModel

F32, F16, U8, I8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8, ir.DataType.INT8
I32, I64 = ir.DataType.INT32, ir.DataType.INT64
MICROSOFT = "com.microsoft"
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
        types = dict.fromkeys(("query", "key", "value"), float_type)
        types |= dict.fromkeys(("past_key", "past_value"), cache_type)
        types |= dict.fromkeys(("seqlens_k", "total_sequence_length"), I32)
        attributes: dict[str, str | int | float] = {
            "num_heads": step.query_heads,
            "kv_num_heads": heads,
            "scale": step.scale,
        }
        scales: dict[str, Array] = {}
        if self._cache.startswith("int"):
            bits = BITS[self._cache]
            kind = "PER_CHANNEL" if self._per_channel else "PER_TENSOR"
            attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
            shape = (1, heads, 1, size) if self._per_channel else (1,)
            steps = np.full(shape, 4 / (2 ** (bits - 1) - 1), np.float32)
            scales = {"k_scale": steps, "v_scale": steps}
        model = OperatorModel(constants=scales)
        operands: list[ir.Value | None] = [model.input(*each) for each in types.items()]
        if scales:
            operands += [*[None] * 5, *(model.input(name, F32) for name in scales)]
        outputs = {"output": float_type, "present_key": cache_type, "present_value": cache_type}
        model.node("GroupQueryAttention", operands, outputs, attributes, domain=MICROSOFT)
        rows = _rows(self._cache, size)
        cache_shape = (step.batch, heads, step.context, rows.shape[-1])
        answer = (step.batch, new, step.query_heads * size)
        return OnnxStep(
            model.build(outputs, opsets={MICROSOFT: 1}).SerializeToString(),
            {
                "query": normal(answer, dtype),
                "key": normal((step.batch, new, heads * size), dtype, 1),
                "value": normal((step.batch, new, heads * size), dtype, 2),
                "seqlens_k": np.full(step.batch, step.context - 1, np.int32),
                "total_sequence_length": np.array(step.context, np.int32),
            },
            {
                "past_key": ("present_key", repeated(rows, cache_shape)),
                "past_value": ("present_value", repeated(rows, cache_shape)),
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
        model = OperatorModel()
        query = model.input("query", F32)
        length = model.input("past_length", I64)
        presents = []
        for role in ("key", "value"):
            scatter_inputs = [model.input(f"past_{role}", F32), model.input(role, F32), length]
            present = {f"present_{role}": F32}
            presents.append(model.node("TensorScatter", scatter_inputs, present, {"axis": 2}))
        operands = [query, *presents, None, None, None, model.input("total_length", I64)]
        model.node("Attention", operands, {"output": F32}, {"is_causal": 0, "scale": step.scale})
        rows = _rows("float32", step.head_size)
        shape = (step.batch, step.kv_heads, step.context, step.head_size)
        answer = (step.batch, step.query_heads, step.new, step.head_size)
        new = (step.batch, step.kv_heads, step.new, step.head_size)
        return OnnxStep(
            model.build(
                ["output", "present_key", "present_value"], opsets={"": 24}
            ).SerializeToString(),
            {
                "query": normal(answer),
                "key": normal(new, seed=1),
                "value": normal(new, seed=2),
                "past_length": np.full(step.batch, step.past, np.int64),
                "total_length": np.full(step.batch, step.context, np.int64),
            },
            {
                "past_key": ("present_key", repeated(rows, shape)),
                "past_value": ("present_value", repeated(rows, shape)),
            },
            (answer, np.dtype(np.float32)),
        )


class MatMul:
    """One large float32 MatMul with the multiply-adds of the attention, for the machine's peak."""

    most_copies = 1

    def version(self) -> str:
        """Of onnxruntime."""
        return str(ort.__version__)

    def cache_bytes(self, step: Step) -> int:
        """Bytes of its second matrix; it has no cache."""
        return _inner(step) ** 2 * 4

    def prepare(self, step: Step, threads: int, copies: int) -> OrtPrepared:
        """A session with the product ``[M, K] [K, K]``."""
        inner = _inner(step)
        shape = (max(1, step.multiply_adds // inner**2), inner)
        model = OperatorModel()
        operands = [model.input(name, F32) for name in ("a", "b")]
        model.node("MatMul", operands, {"output": F32}, {})
        inputs = {"a": repeated(normal((128, inner)), shape), "b": normal((inner, inner), seed=1)}
        serialised = model.build(["output"]).SerializeToString()
        return OrtPrepared(
            OnnxStep(serialised, inputs, {}, (shape, np.dtype(np.float32))), threads, copies
        )


def _inner(step: Step) -> int:
    """Long enough for any kernel, and so long that the other side fits into memory."""
    return 1024 if step.multiply_adds < 2**34 else 2048


def _rows(cache: str, head_size: int) -> Array:
    rng = np.random.default_rng(0)
    if cache == "int8":
        return rng.integers(-127, 128, (128, head_size), dtype=np.int8)
    if cache == "int4":
        return rng.integers(0, 256, (128, head_size // 2), dtype=np.uint8)
    return normal((128, head_size), cache)
