"""The activation of Gemma, ``Tanh`` and small powers, by operators that the device has.

The provider has neither Tanh nor Exp. ``Swish`` has an exponential in it: with a = |x| + tiny,

    tanh(x) = x * tanh(a) / a,    tanh(a) = 2 sigmoid(2 a) - 1 = Swish(2 a) / a - 1

which divides by nothing that is zero. Its error is a few 1e-7, where tanh is 1 at most. GELU by
tanh is one Swish with a factor that depends on x and is never zero:

    gelu(x) = x * sigmoid(g x) = Swish(g x) / g,    g = 2 sqrt(2 / pi) (1 + 0.044715 x^2)

float32 alone: in float16 the numbers in between overflow, and infinity over infinity is no number.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import scalar
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import label, substitute
from tq_onnx.ops.domain import DOMAIN, MICROSOFT
from tq_onnx.ops.operators import Swish

_TINY: Final = 1e-6
_SLOPE: Final = 2 * math.sqrt(2 / math.pi)
_CUBIC: Final = 0.044715


def lower_tanh(model: ir.Model, build: Builder) -> int:
    """Replace every Tanh, every GELU by tanh, and squares and cubes of floats.

    Args:
        model: a converted model; changed in place, what is left without a reader stays.

    Returns:
        how many were replaced.
    """
    count = 0
    for node in list(model.graph):
        source = node.inputs[0] if node.inputs else None
        if source is None or source.dtype is not ir.DataType.FLOAT:
            continue
        with build.before(node, label(node)):
            lowered = _made(node, source, _Elementwise(build, source))
        if lowered is None:
            continue
        substitute(node.outputs[0], lowered)
        count += 1
    return count


def _made(node: ir.Node, x: ir.Value, do: _Elementwise) -> ir.Value | None:
    """Return what is computed instead of a node; None to leave it."""
    if kind(node) == "Tanh":
        size = do.add(do.op("Abs", x), _TINY)
        of_size = do.add(do.op("Div", do.swish(do.times(size, 2.0)), size), -1.0)
        return do.op("Mul", x, do.op("Div", of_size, size))
    if _is_gelu(node):
        square = do.op("Mul", x, x)
        steepness = do.times(do.add(do.times(square, _CUBIC), 1.0), _SLOPE)
        return do.op("Div", do.swish(do.op("Mul", x, steepness)), steepness)
    if kind(node) == "Pow" and (power := scalar(node.inputs[1])) in (2, 3):
        square = do.op("Mul", x, x)
        return square if power == 2 else do.op("Mul", square, x)
    return None


def _is_gelu(node: ir.Node) -> bool:
    if kind(node) == f"{MICROSOFT}.FastGelu":
        return len(node.inputs) == 1 or node.inputs[1] is None
    return kind(node) == "Gelu" and node.attributes.get_string("approximate") == "tanh"


class _Elementwise:
    """Makes nodes whose outputs have the shape of one value."""

    def __init__(self, build: Builder, like: ir.Value) -> None:
        self._build = build
        self._shape = sizes(like)

    def op(self, op_type: str, *inputs: ir.Value, domain: str = "") -> ir.Value:
        return self._build.op(
            op_type,
            inputs,
            op_type.lower(),
            dtype=ir.DataType.FLOAT,
            shape=self._shape,
            domain=domain,
        )

    def add(self, value: ir.Value, number: float) -> ir.Value:
        return self.op("Add", value, self._number(number))

    def times(self, value: ir.Value, number: float) -> ir.Value:
        return self.op("Mul", value, self._number(number))

    def swish(self, value: ir.Value) -> ir.Value:
        return self.op(Swish.name, value, domain=DOMAIN)

    def _number(self, number: float) -> ir.Value:
        return self._build.constant(f"tq.float.{number:.9g}", np.float32(number))
