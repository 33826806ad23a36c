"""Sizes of a decoder whose parts have been replaced, by the names that its inputs have.

Shape inference gives a new name to whatever it cannot compute, and the nodes of a replaced part
told more than their substitute's neighbours know. Here sizes are followed once more from the
inputs to the outputs, through the operators of a lowered decoder. Two sizes of one name are one
and the same number.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.sizerules import NUMBERS, SHAPES, Sizes, broadcast, nothing, operand, sizes
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import Attention, RmsNormalization, RotaryEmbedding, Swish

_BROADCAST: Final = frozenset({"Add", "Sub", "Mul", "Div"})
_SAME: Final = frozenset(
    {
        *(each.name for each in (Attention, RmsNormalization, RotaryEmbedding, Swish)),
        *("Cast", "Identity", "Sigmoid"),
    }
)
"""Operators, ours and those of the same names, whose result is like their first operand."""
_STANDARD: Final = ("", DOMAIN)


def follow_sizes(graph: ir.Graph) -> None:
    """Tells every value of the main graph the sizes that follow from those before it.

    What follows takes the place of what was told, unless nothing does or the two contradict.
    """
    known: dict[ir.Value, Sizes | None] = {}

    def numbers(value: ir.Value | None) -> Sizes | None:
        if value is None:
            return None
        if value not in known:
            known[value] = integers(value)
        return known[value]

    for node in graph:
        if node.domain not in _STANDARD or not node.outputs:
            continue
        output = node.outputs[0]
        if node.domain == "":
            found = NUMBERS.get(node.op_type, nothing)(numbers, node)
            if found:
                known[output] = found
        if node.op_type in _BROADCAST:
            result = broadcast([sizes(value) for value in node.inputs])
        elif node.op_type in _SAME:
            result = sizes(operand(node, 0))
        elif node.op_type == "Gather":
            result = _gathered(node)
        else:
            result = SHAPES.get(node.op_type, nothing)(numbers, node)
        if result is not None:
            _tell(output, result)


def _gathered(node: ir.Node) -> Sizes | None:
    data, indices = sizes(operand(node, 0)), sizes(operand(node, 1))
    if data is None or indices is None or attribute_int(node, "axis", 0) != 0:
        return None
    return (*indices, *data[1:])


def _tell(output: ir.Value, found: Sizes) -> None:
    told = sizes(output)
    if told is None:
        output.shape = ir.Shape(found)
        return
    pairs = list(zip(told, found, strict=False))
    numbers = [pair for pair in pairs if all(isinstance(size, int) for size in pair)]
    if len(told) == len(found) and all(here == there for here, there in numbers):
        merged = [
            here if there is None or isinstance(here, int) else there for here, there in pairs
        ]
        output.shape = ir.Shape(merged)
