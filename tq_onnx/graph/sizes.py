"""Sizes that onnx's own shape inference does not tell: one pass over the graph, front to back.

onnx gives up all dimensions after an operator that it does not know (ONNX Runtime's optimizer makes
such ones), and after a Slice whose ends are computed, which is what rotary embeddings look like in
traced graphs. Here each operator that stands between a projection and its attention has a rule, and
short lists of integers (``Shape``, ``Gather``, ``Concat``, arithmetic) are followed through the
graph. A size is a number, a name that stands for one and the same number, or None.
``tq_onnx.graph.sizerules`` holds the rules.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.sizerules import (
    NUMBERS,
    SHAPES,
    Sizes,
    broadcast,
    nothing,
    operand,
    sizes,
)

_MAX_LIST: Final = 16
_COMPARISONS: Final = frozenset(
    {"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN"}
)
_BROADCAST: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "BiasGelu", "FastGelu"}
) | (_COMPARISONS - {"Not", "IsNaN"})
_SAME: Final = frozenset(
    {
        *("Cast", "CastLike", "Identity", "Neg", "Sqrt", "Reciprocal", "Tanh", "Sigmoid"),
        *("Softmax", "Not", "IsNaN", "Exp", "Sin", "Cos", "Abs", "Relu"),
        *("Gelu", "QuickGelu", "Dropout"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"),
    }
)
"""Operators whose first output is like their first input."""


def refine(graph: ir.Graph, untold: set[ir.Value]) -> None:
    """Fill in more sizes and types.

    Args:
        graph: in topological order; its nodes' outputs get what is missing.
        untold: values about which the model itself says nothing: their sizes may be replaced by
            numbers. Of others only unknown dimensions are filled in.
    """
    known = _Known()
    for node in graph:
        if not node.outputs:
            continue
        output = node.outputs[0]
        known.follow_numbers(node, output)
        if node.op_type == "Split":
            told = zip(node.outputs, known.sizes_of_parts(node), strict=False)
        else:
            told = zip(node.outputs, [known.sizes_of_result(node)], strict=False)
        for value, found in told:
            _tell_type(node, value)
            if found is not None and value.dtype is not None:
                _tell_shape(value, found, replace=value in untold)


class _Known:
    """The known sizes and integers of the values before a node."""

    def __init__(self) -> None:
        self._numbers: dict[ir.Value, Sizes | None] = {}

    def numbers(self, value: ir.Value | None) -> Sizes | None:
        """Return a short list of integers; a scalar is a list of one."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = integers(value)
        return self._numbers[value]

    def follow_numbers(self, node: ir.Node, output: ir.Value) -> None:
        """Remember the integers that a node makes."""
        if node.domain != "":
            return
        found = NUMBERS.get(node.op_type, nothing)(self.numbers, node)
        if found is not None and 0 < len(found) <= _MAX_LIST:
            self._numbers[output] = found

    def sizes_of_result(self, node: ir.Node) -> Sizes | None:
        """Return the shape of a node's first output."""
        if node.op_type in _SAME:
            return sizes(operand(node, 0))
        if node.op_type in _BROADCAST:
            return broadcast([sizes(value) for value in node.inputs])
        return SHAPES.get(node.op_type, nothing)(self.numbers, node)

    def sizes_of_parts(self, node: ir.Node) -> list[Sizes | None]:
        """Return the shapes of the outputs of a Split."""
        shape = sizes(operand(node, 0))
        if not shape:
            return [None] * len(node.outputs)
        axis = attribute_int(node, "axis", 0) % len(shape)
        parts = self.numbers(operand(node, 1)) or (None,) * len(node.outputs)
        return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


def _tell_type(node: ir.Node, output: ir.Value) -> None:
    if output.dtype is not None:
        return
    dtype = None
    if node.op_type == "Cast":
        dtype = ir.DataType(attribute_int(node, "to", 0)) if "to" in node.attributes else None
    elif node.op_type in ("Shape", "Size"):
        dtype = ir.DataType.INT64
    elif node.op_type in _COMPARISONS:
        dtype = ir.DataType.BOOL
    elif node.op_type in _BROADCAST or node.op_type in _SAME or node.op_type in (*SHAPES, "Split"):
        source = operand(node, 1 if node.op_type in ("Where", "CastLike") else 0)
        dtype = None if source is None else source.dtype
    if dtype is not None:
        output.type = ir.TensorType(dtype)


def _tell_shape(output: ir.Value, found: Sizes, *, replace: bool) -> None:
    told = sizes(output)
    if told is None:
        output.shape = ir.Shape(found)
    elif len(told) == len(found):
        merged = [
            there if here is None or (replace and isinstance(there, int)) else here
            for here, there in zip(told, found, strict=True)
        ]
        if any(
            isinstance(here, int) and isinstance(there, int) and here != there
            for here, there in zip(told, found, strict=True)
        ):
            return
        if merged != list(told):
            output.shape = ir.Shape(merged)
