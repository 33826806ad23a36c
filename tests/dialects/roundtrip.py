"""Oracle for decomposed attention: the original graph, its new cache rows quantised and decoded.

The nodes of the original attention stay; only what goes into the caches is replaced by what a
TurboQuant cache would give back. So a converted model must agree with it but for float noise.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.plan import LayerPlan, Plan


def insert_roundtrip(model: ir.Model, plan: Plan) -> None:
    """Puts every new row through the codec; in place. Layers are told by the outputs' names."""
    build = Builder(model.graph)
    for output in list(model.graph.outputs):
        found = re.fullmatch(r"present\.(\d+)\.(key|value)", output.name or "")
        if found is None:
            continue
        layer = plan.layers[int(found[1])]
        bits = layer.key_bits if found[2] == "key" else layer.value_bits
        concat = output.producer()
        assert concat is not None and concat.op_type == "Concat"
        rows = concat.inputs[1]
        assert rows is not None
        with build.before(concat, f"roundtrip.{found[0]}"):
            matrix = make_rotation(plan.rotation, layer.head_size, layer.layer, plan.seed)
            concat.replace_input_with(1, _roundtrip(build, rows, matrix, bits))


def roundtrip_rows(
    graph: ir.Graph, node: ir.Node, plan: Plan, layer: LayerPlan, *, bits: int
) -> None:
    """Puts what a node reads first, floats ``[..., D]``, through a layer's codec; in place."""
    build = Builder(graph)
    rows = node.inputs[0]
    assert rows is not None
    with build.before(node, f"roundtrip.{node.outputs[0].name}"):
        matrix = make_rotation(plan.rotation, layer.head_size, layer.layer, plan.seed)
        node.replace_input_with(0, _roundtrip(build, rows, matrix, bits))


def _roundtrip(build: Builder, rows: ir.Value, matrix: np.ndarray, bits: int) -> ir.Value:
    book = lloyd_max(bits, matrix.shape[0])
    size = matrix.shape[0]
    seed = abs(hash(matrix.tobytes()))
    forward = build.constant(f"R.{seed}", matrix)
    backward = build.constant(f"Rt.{seed}", np.ascontiguousarray(matrix.T))
    centroids = build.constant(f"c.{bits}.{size}", book.centroids)
    boundaries = build.constant(f"t.{bits}.{size}", book.boundaries)
    f32, i64 = ir.DataType.FLOAT, ir.DataType.INT64

    def op(kind: str, *inputs: ir.Value, dtype: ir.DataType = f32, **attributes: int) -> ir.Value:
        return build.op(kind, inputs, kind, dtype=dtype, **attributes)

    def norm(value: ir.Value) -> ir.Value:
        # ReduceL2 takes its axes in another way before opset 18.
        return op("Sqrt", op("ReduceSum", op("Mul", value, value), last, keepdims=1))

    last = build.integers(-1)
    vectors = op("Cast", rows, to=int(f32))
    norms = norm(vectors)
    rotated = op("MatMul", op("Div", vectors, norms), forward)
    above = op("GreaterOrEqual", op("Unsqueeze", rotated, last), boundaries, dtype=ir.DataType.BOOL)
    codes = op("ReduceSum", op("Cast", above, dtype=i64, to=int(i64)), last, dtype=i64, keepdims=0)
    chosen = op("Gather", centroids, codes)
    scales = op("Div", norms, norm(chosen))
    half = op("Cast", scales, dtype=ir.DataType.FLOAT16, to=int(ir.DataType.FLOAT16))
    decoded = op("MatMul", op("Mul", chosen, op("Cast", half, to=int(f32))), backward)
    assert rows.dtype is not None
    return op("Cast", decoded, dtype=rows.dtype, to=int(rows.dtype))
