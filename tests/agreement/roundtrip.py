"""Oracle for quantised caches: the raw conversion, its new rows quantised and decoded.

Only what goes into the caches is replaced by what a TurboQuant cache would give back. So another
conversion must agree with it but for float noise.

The codecs are written down here once more, in plain nodes and from their formulas
(``tq_onnx.codec.quantise``); only rotations and codebooks are the product's.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotated import PROD, U8, UNIFORM_SIGNED
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK, RAW, UNIFORM
from tq_onnx.graph.builder import Builder
from tq_onnx.plan import LayerPlan, Plan

F32, F16, I64 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64


def roundtrip_rows(
    graph: ir.Graph, node: ir.Node, plan: Plan, layer: LayerPlan, codec: Codec
) -> None:
    """Puts the first input of a node, floats ``[..., D]``, through a layer's codec; in place."""
    if codec.kind == RAW:
        return
    rows = node.inputs[0]
    assert rows is not None and rows.dtype is not None
    build = Builder(graph)
    with build.before(node, f"roundtrip.{node.outputs[0].name}"):
        made = Nodes(build, plan, layer, codec)
        vectors = made.cast(rows, F32)
        node.replace_input_with(0, made.cast(made.through(vectors), rows.dtype))


class Nodes:
    """The nodes of one codec."""

    def __init__(self, build: Builder, plan: Plan, layer: LayerPlan, codec: Codec) -> None:
        self.build = build
        self.plan = plan
        self.layer = layer
        self.codec = codec
        self.corrects = plan.norm_correction and codec.corrects_norm

    def op(
        self, kind: str, *inputs: ir.Value, dtype: ir.DataType = F32, **attributes: int
    ) -> ir.Value:
        return self.build.op(kind, inputs, kind, dtype=dtype, **attributes)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.op("Cast", value, dtype=dtype, to=int(dtype))

    def half(self, value: ir.Value) -> ir.Value:
        """Rounded to float16."""
        return self.cast(self.cast(value, F16), F32)

    def number(self, value: float) -> ir.Value:
        return self.build.constant(f"number.{value!r}", np.float32(value))

    def table(self, name: str, array: np.ndarray) -> ir.Value:
        seed = abs(hash(array.tobytes()))
        return self.build.constant(f"{name}.{seed}", np.ascontiguousarray(array))

    def through(self, vectors: ir.Value) -> ir.Value:
        """Encoded and decoded."""
        kind = self.codec.kind
        if kind == UNIFORM:
            return self.uniform(vectors)
        if kind == Q8_0:
            return self.blocks(vectors)
        if kind == FP8:
            return self.eight_bits(vectors)
        return self.rotated(vectors)

    def rotated(self, vectors: ir.Value) -> ir.Value:
        layer, plan = self.layer, self.plan
        size = layer.head_size
        matrix = rotation_of(self.codec, plan.rotation, size, layer.layer, plan.seed)
        book = codebook_of(self.codec, size)
        last = self.build.integers(-1)
        norms = self.norm(vectors)
        directions = self.op("Div", vectors, norms)
        turned = self.op("MatMul", directions, self.table("R", matrix[:, :size]))
        above = self.op(
            "GreaterOrEqual",
            self.op("Unsqueeze", turned, last),
            self.table("t", book.boundaries),
            dtype=ir.DataType.BOOL,
        )
        codes = self.op("ReduceSum", self.cast(above, I64), last, dtype=I64, keepdims=0)
        chosen = self.op("Gather", self.table("c", book.centroids), codes)
        scales = self.op("Div", norms, self.norm(chosen)) if self.corrects else norms
        if self.codec.kind not in {U8, UNIFORM_SIGNED}:
            scales = self.half(scales)
        back = self.table("Rt", matrix[:, :size].T)
        decoded = self.op("MatMul", self.op("Mul", chosen, scales), back)
        if self.codec.kind != PROD:
            return decoded
        residual = self.op("Sub", vectors, decoded)
        projected = self.op("MatMul", residual, self.table("S", matrix[:, size:]))
        positive = self.op("GreaterOrEqual", projected, self.number(0), dtype=ir.DataType.BOOL)
        signs = self.op("Where", positive, self.number(1), self.number(-1))
        lengths = self.op(
            "Mul", self.half(self.norm(residual)), self.number(math.sqrt(math.pi / 2) / size)
        )
        sketch = self.table("St", matrix[:, size:].T)
        estimate = self.op("MatMul", self.op("Mul", signs, lengths), sketch)
        return self.op("Add", decoded, estimate)

    def eight_bits(self, vectors: ir.Value) -> ir.Value:
        """The nearest of all floats of 8 bits; Cast knows them from opset 19 on only."""
        known = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        last = self.build.integers(-1)
        place = self.op("Unsqueeze", self.op("Abs", vectors), last)
        between = self.table("between", (known[1:] + known[:-1]) / 2)
        above = self.op("Greater", place, between, dtype=ir.DataType.BOOL)
        codes = self.op("ReduceSum", self.cast(above, I64), last, dtype=I64, keepdims=0)
        return self.op(
            "Mul", self.op("Sign", vectors), self.op("Gather", self.table("known", known), codes)
        )

    def norm(self, value: ir.Value) -> ir.Value:
        # ReduceL2 takes its axes in another way before opset 18.
        last = self.build.integers(-1)
        return self.op("Sqrt", self.op("ReduceSum", self.op("Mul", value, value), last, keepdims=1))

    def extreme(self, value: ir.Value, *, largest: bool) -> ir.Value:
        # So do ReduceMax and ReduceMin; TopK has been as it is since opset 11.
        one = self.build.integers(1)
        found, _ = self.build.ops(
            "TopK",
            [value, one],
            "TopK",
            dtype=None,  # of two types
            shapes=[None, None],
            attributes={"axis": -1, "largest": int(largest)},
        )
        return found

    def uniform(self, vectors: ir.Value) -> ir.Value:
        top = self.number((1 << self.codec.bits) - 1)
        low = self.extreme(vectors, largest=False)
        spread = self.op("Sub", self.extreme(vectors, largest=True), low)
        scale = self.op("Div", spread, top)
        codes = self.op("Round", self.op("Div", self.op("Sub", vectors, low), scale))
        return self.op("Add", self.op("Mul", codes, self.half(scale)), self.half(low))

    def blocks(self, vectors: ir.Value) -> ir.Value:
        size = self.layer.head_size
        parts = []
        for start in range(0, size, Q8_0_BLOCK):
            ends = self.build.integers(min(start + Q8_0_BLOCK, size))
            begin, last = self.build.integers(start), self.build.integers(-1)
            block = self.op("Slice", vectors, begin, ends, last)
            top = self.extreme(self.op("Abs", block), largest=True)
            scale = self.op("Div", top, self.number(127))
            codes = self.op("Round", self.op("Div", block, scale))
            parts.append(self.op("Mul", codes, self.half(scale)))
        return self.op("Concat", *parts, axis=-1)
