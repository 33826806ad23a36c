"""Derive the sizes and types of the outputs of quantised operators.

onnx's inference knows few of them, and gives up all that follows. Post-processors leave them in the
place of MatMul, Gather, Add and others: MatMulNBitsQuantizer, MatMulBnb4Quantizer,
``quantize_dynamic``, ``quantize_static`` and ONNX Runtime's optimizer. All are read as
``onnxruntime/core/graph/contrib_ops/quantization_defs.cc`` and ``contrib_defs.cc`` declare them.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.sizerules import (
    Numbers,
    Rule,
    Sizes,
    broadcast,
    chosen,
    joined,
    matrix_product,
    operand,
    same,
    sizes,
)

_BITS_OF_A_BYTE: Final = 8
_GROUP: Final = 3
"""Inputs of a tensor in the QLinear operators: numbers, scale, zero point."""


def _packed_product(numbers: Numbers, node: ir.Node) -> Sizes | None:
    """Return the shape of a product with a packed weight, whose columns the attribute N tells."""
    shape = sizes(operand(node, 0))
    return None if not shape else (*shape[:-1], attribute_int(node, "N", 0) or None)


def _integer_product(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return matrix_product(sizes(operand(node, 0)), sizes(operand(node, 1)))


def _linear_product(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return matrix_product(sizes(operand(node, 0)), sizes(operand(node, _GROUP)))


def _linear_gemm(numbers: Numbers, node: ir.Node) -> Sizes | None:
    turned = (bool(attribute_int(node, name, 0)) for name in ("transA", "transB"))
    return matrix_product(sizes(operand(node, 0)), sizes(operand(node, _GROUP)), *turned)


def _linear_pair(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return broadcast([sizes(operand(node, 0)), sizes(operand(node, _GROUP))])


def _linear_choice(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return broadcast([sizes(operand(node, index)) for index in (0, 1, 1 + _GROUP)])


def _linear_concat(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return joined(node, node.inputs[2::_GROUP])


def _packed_rows(numbers: Numbers, node: ir.Node) -> Sizes | None:
    table, indices = operand(node, 0), sizes(operand(node, 1))
    shape = sizes(table)
    if table is None or not shape or table.dtype is None:
        return None
    if table.dtype is ir.DataType.UINT8 and isinstance(shape[-1], int):
        codes = _BITS_OF_A_BYTE // max(attribute_int(node, "bits", 4), 1)
        shape = (*shape[:-1], shape[-1] * codes)
    return chosen(shape, indices, attribute_int(node, "gather_axis", 0))


QUANTISED_SHAPES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _packed_product),
    **dict.fromkeys(
        ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _integer_product
    ),
    "QLinearMatMul": _linear_product,
    "QGemm": _linear_gemm,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _linear_pair),
    "QLinearWhere": _linear_choice,
    "QLinearConcat": _linear_concat,
    "GatherBlockQuantized": _packed_rows,
    **dict.fromkeys(
        ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QuantizeLinear"), same
    ),
    **dict.fromkeys(("DequantizeLinear", "DynamicQuantizeLinear"), same),
}
"""Shapes of first outputs."""

TYPED_BY: Final = {
    "DequantizeLinear": 1,
    "GatherBlockQuantized": 2,
    "MatMulIntegerToFloat": 2,
    "QuantizeLinear": 2,
    "QLinearConcat": 1,
    "QLinearMatMul": 7,
    "QLinearWhere": 1,
}
"""The input whose element type the first output has, where it is not the first one."""

TYPED: Final = {
    "DynamicQuantizeLinear": (ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8),
    "MatMulInteger": (ir.DataType.INT32,),
}
"""Element types of outputs that do not depend on inputs."""
