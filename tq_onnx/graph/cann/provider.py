"""What CANNExecutionProvider runs when it runs operators one by one (``enable_cann_graph=0``).

Read off onnxruntime-cann 1.24.4: a node of floats that is not listed here goes to the CPU, its
inputs and outputs are copied between host and device, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.dialects.traces import label
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

_OWN: Final = frozenset({ENCODE, ATTENTION, *DECODER})
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
    """Whether a value is of floating-point numbers, or may be: where a graph does not tell."""
    return value.dtype not in _NOT_FLOATS


def left_over(model: ir.Model) -> Iterator[str]:
    """What the provider would not run, or not rightly: a clause for each such node."""
    opset = model.opset_imports.get("", 0)
    if opset > NEWEST_OPSET:
        yield f"its opset is {opset}, newer than {NEWEST_OPSET}"
    caches = {v for v in model.graph.inputs if v.dtype is ir.DataType.UINT8}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in _OWN:
            continue
        read = [value for value in node.inputs if value in caches]
        if read:
            yield f"{label(node)} ({node.op_type}) reads {read[0].name}, which is on the device"
        if not any(is_float(value) for value in node.outputs):
            continue
        if node.domain != "" or node.op_type not in CLAIMED:
            yield f"{label(node)} ({_name(node)}) computes floats and has no kernel there"
        elif node.op_type in _VIEWS and node.outputs[0].is_graph_output():
            yield f"{label(node)} ({node.op_type}) is an output, copied before it is computed"
        elif node.op_type in _BROADCASTING and not _has_full_operand(node):
            yield f"{label(node)} ({node.op_type}) broadcasts both operands, which it does wrongly"


def declare_old_opset(model: ir.Model) -> None:
    """Declares the opset that the provider knows, if all nodes mean the same in it."""
    opset = model.opset_imports.get("", 0)
    standard = {node.op_type for node in model.graph if node.domain == ""}
    if opset > NEWEST_OPSET and standard <= UNCHANGED:
        model.opset_imports[""] = NEWEST_OPSET


def _has_full_operand(node: ir.Node) -> bool:
    """Whether one operand has the output's shape, so that only the other is broadcast.

    The operand whose every dimension is at least the other's; unknown ones are different unless
    their names are the same. Operands of one rank and the same names need no broadcast at all.
    """
    one, other = (None if v is None else v.shape for v in node.inputs)
    if one is None or other is None:
        return False
    return _covers(one, other) or _covers(other, one)


def _covers(one: ir.Shape, other: ir.Shape) -> bool:
    if one.rank() < other.rank():
        return False
    pairs = zip(reversed(list(one)), reversed(list(other)), strict=False)
    return all(its in (mine, 1) for mine, its in pairs)


def _name(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
