"""Know what CANNExecutionProvider runs one by one (``enable_cann_graph=0``).

Read off onnxruntime-cann 1.24.4: a floating-point node that is not listed here goes to the CPU, its
inputs and outputs are copied between host and device, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.sizerules import Sizes, sizes
from tq_onnx.graph.values import label
from tq_onnx.ops.domain import ATTENTION, DECODER, DOMAIN, ENCODE

CLAIMED: Final = frozenset(
    {
        *("Abs", "Neg", "Floor", "Ceil", "Reciprocal", "Sqrt", "Log", "Erf", "Round", "Sin", "Cos"),
        *("Relu", "Identity", "Add", "Sub", "Mul", "Div", "MatMul", "Flatten", "Cast", "Reshape"),
    }
)
"""Operators of the default domain, for float32 and float16. MatMul of vectors is not among them."""

NEWEST_OPSET: Final = 18
"""Kernels are registered for versions of operators up to this one; Reshape and Cast have newer."""

UNCHANGED: Final = frozenset(
    {
        *CLAIMED,
        *("Shape", "Slice", "Gather", "Concat", "Squeeze", "Unsqueeze", "Range", "Expand"),
        *("Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"),
        *("ReduceMin", "ReduceMax", "ReduceSum", "Min", "Max", "ConstantOfShape", "Transpose"),
    }
)
"""Operators that later opsets than that gave further types, and attributes with defaults, only."""

ELEMENTS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""Element types that our own kernels for CANN take."""

WITHOUT: Final = 'leave out `target="cann"`'
_EXPORT: Final = "export it in float32 or float16"
_DEQUANTISED: Final = "export its weights in float32 or float16"
_INLINED: Final = "inline its functions, as onnx.inliner.inline_local_functions does"
_QUANTISED: Final = frozenset(
    {
        *("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "QMoE", "DequantizeLinear"),
        *("MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"),
    }
)
_NEW_ATTRIBUTES: Final = ("saturate", "round_mode")
"""Of Cast, since opsets 19 and 24."""

_OPERATORS: Final = frozenset({ENCODE, ATTENTION, *DECODER})
_VIEWS: Final = frozenset({"Reshape", "Flatten", "Identity"})
_BROADCASTING: Final = frozenset({"Add", "Sub", "Mul", "Div"})
_NOT_FLOATS: Final = frozenset(
    {
        *(ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8),
        *(ir.DataType.UINT64, ir.DataType.UINT32, ir.DataType.UINT16, ir.DataType.UINT8),
        *(ir.DataType.BOOL, ir.DataType.STRING),
    }
)


def is_float(value: ir.Value) -> bool:
    """Return True if a value is floating-point, or may be where a graph does not tell."""
    return value.dtype not in _NOT_FLOATS


@dataclass(frozen=True)
class LeftOver:
    """A node that the provider would not run correctly."""

    what: str  #: a clause
    fix: str = WITHOUT  #: what the user can do


def left_over(model: ir.Model) -> Iterator[LeftOver]:
    """Yield what the provider would not run correctly: nodes in graph order, then the opset."""
    caches = {v for v in model.graph.inputs if v.dtype is ir.DataType.UINT8}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in _OPERATORS:
            continue
        name = f"{label(node)} ({_name(node)})"
        read = [value for value in node.inputs if value in caches]
        if read:
            yield LeftOver(f"{name} reads {read[0].name}, which is on the device")
        if not any(is_float(value) for value in node.outputs):
            continue
        if node.domain != "" or node.op_type not in CLAIMED:
            fix = _DEQUANTISED if node.op_type in _QUANTISED else WITHOUT
            if node.op_identifier() in model.functions:
                fix = _INLINED
            yield LeftOver(f"{name} is floating-point and has no kernel there", fix)
            continue
        other_floats = [
            v for v in (*node.inputs, *node.outputs) if v is not None and _is_other_float(v)
        ]
        if other_floats:
            yield LeftOver(f"{name} has numbers of the type {other_floats[0].dtype}", _EXPORT)
        elif node.op_type in _VIEWS and node.outputs[0].is_graph_output():
            yield LeftOver(f"{name} is an output, copied before it is computed")
        elif node.op_type in _BROADCASTING and not _has_full_operand(node):
            yield LeftOver(f"{name} broadcasts both operands, which the provider does wrongly")
    opset = model.opset_imports.get("", 0)
    if opset > NEWEST_OPSET:
        newer = [n for n in model.graph if n.domain == "" and not _is_unchanged(n)]
        what = f" for {label(newer[0])} ({newer[0].op_type})" if newer else ""
        yield LeftOver(
            f"the opset is {opset}, and {NEWEST_OPSET} is the newest{what}",
            f"export it with opset {NEWEST_OPSET}",
        )


def _is_other_float(value: ir.Value) -> bool:
    return value.dtype is not None and is_float(value) and value.dtype not in ELEMENTS


def declare_old_opset(model: ir.Model) -> None:
    """Declare the opset that the provider knows, if all nodes mean the same in it."""
    standard = [node for node in model.graph if node.domain == ""]
    if model.opset_imports.get("", 0) <= NEWEST_OPSET or not all(map(_is_unchanged, standard)):
        return
    for node in standard:
        for name in _NEW_ATTRIBUTES:
            node.attributes.pop(name, None)
    model.opset_imports[""] = NEWEST_OPSET


def _is_unchanged(node: ir.Node) -> bool:
    """Return True if a node means the same in an older opset, which lacks some attributes."""
    # Both are about types of 8 bits and less, of which a Cast here makes none.
    return node.op_type in UNCHANGED and not any(
        value.dtype is not None and value.dtype.is_floating_point() and value.dtype.bitwidth <= 8
        for value in node.outputs
    )


def _has_full_operand(node: ir.Node) -> bool:
    """Return True if one operand has the output's shape, so that only the other is broadcast.

    The operand whose every dimension is at least the other's; unknown ones are different unless
    their names are the same. Operands of one rank and the same names need no broadcast at all.
    """
    first, second = (sizes(value) for value in node.inputs)
    if first is None or second is None:
        return False
    return _covers(first, second) or _covers(second, first)


def _covers(wide: Sizes, narrow: Sizes) -> bool:
    if len(wide) < len(narrow):
        return False
    pairs = zip(reversed(wide), reversed(narrow), strict=False)
    return all(size == 1 or (size is not None and size == full) for full, size in pairs)


def _name(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
