"""The table of embeddings: ``Gather`` from the device's memory by token ids on the host."""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.values import rank, substitute
from tq_onnx.ops.operators import Gather


def lower_embedding(model: ir.Model, build: Builder) -> int:
    """Replace every Gather of rows of a floating-point matrix by ids ``[B, T]`` or ``[T]``.

    Returns:
        how many were replaced.
    """
    count = 0
    for node in list(model.graph):
        if node.domain != "" or node.op_type != "Gather" or attribute_int(node, "axis", 0) != 0:
            continue
        table, ids = node.inputs
        output = node.outputs[0]
        if table is None or ids is None or rank(table) != 2 or rank(ids) not in (1, 2):
            continue
        if table.dtype not in ELEMENTS or ids.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        with build.before(node, "embedding"):
            if ids.dtype is not ir.DataType.INT64:
                ids = build.op("Cast", [ids], "ids", dtype=ir.DataType.INT64, to=7)
            inputs = {Gather.data: table, Gather.indices: ids}
            rows = build.operator(Gather, inputs, dtype=output.dtype)
            rows.shape = output.shape
        substitute(output, rows)
        count += 1
    return count
