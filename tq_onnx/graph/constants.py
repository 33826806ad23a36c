"""Numbers in a graph: scalars and short integer lists, never a weight.

A tensor is only read when its shape says that it is small, so large external weights stay on
disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import onnx_ir as ir

_MAX_DEPTH: Final = 16
_MAX_LIST: Final = 16

_UNARY: Final[dict[str, Callable[[float], float]]] = {
    "Identity": lambda a: a,
    "Cast": lambda a: a,
    "CastLike": lambda a: a,
    "Neg": lambda a: -a,
    "Sqrt": lambda a: a**0.5 if a >= 0 else float("nan"),
    "Reciprocal": lambda a: 1 / a if a else float("nan"),
}
_BINARY: Final[dict[str, Callable[[float, float], float]]] = {
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b if b else float("nan"),
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Pow": lambda a, b: float(np.power(a, b)),
}
_EXACT: Final = frozenset({"Identity", "Neg", "Mul", "Add", "Sub"})
"""Nodes that compute the same with integers as with floating-point numbers."""
_RESHAPES: Final = frozenset({"Identity", "Squeeze", "Unsqueeze"})
"""Nodes that keep a list as it is."""
_PARTS: Final = frozenset({"Shape", "Gather", "Slice", "Squeeze", "Unsqueeze"})
"""Nodes that choose one of the sizes of a value."""


def scalar(value: ir.Value | None) -> float | None:
    """Return the number that a one-element value always has; None if it is not constant."""
    number = _scalar(value, _MAX_DEPTH)
    return None if number is None or math.isnan(number) else number


def _scalar(value: ir.Value | None, depth: int) -> float | None:
    if value is None or depth == 0:
        return None
    tensor = _tensor(value)
    if tensor is not None:
        plain = tensor.dtype.is_integer() or tensor.dtype.is_floating_point()
        return float(tensor.numpy().reshape(())) if tensor.size == 1 and plain else None
    node = value.producer()
    return None if node is None or node.domain != "" else _made(node, depth)


def _made(node: ir.Node, depth: int) -> float | None:
    """Return the number that a node always makes."""
    if node.op_type in _PARTS:
        return _size(node.outputs[0], depth)
    if not (node.op_type in _EXACT or _computes_with_floats(node)):
        return None
    if node.op_type in _UNARY:
        operand = _scalar(node.inputs[0], depth - 1)
        return None if operand is None else _UNARY[node.op_type](operand)
    if node.op_type in _BINARY:
        left, right = (_scalar(item, depth - 1) for item in node.inputs[:2])
        return None if left is None or right is None else _BINARY[node.op_type](left, right)
    return None


def _computes_with_floats(node: ir.Node) -> bool:
    """Return True if a node does not round to integers."""
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0)).is_floating_point()
    dtype = node.outputs[0].dtype
    return dtype is not None and dtype.is_floating_point()


def _size(value: ir.Value | None, depth: int) -> int | None:
    """Return the one size that a part of a Shape always is, such as the head size of a query."""
    node = None if value is None else value.producer()
    if node is None or depth == 0 or node.domain != "" or not node.inputs:
        return None
    if node.op_type in ("Squeeze", "Unsqueeze", "Identity"):
        return _size(node.inputs[0], depth - 1)
    source = node.inputs[0]
    sizes = _sizes(None if source is None else source.producer())
    if node.op_type == "Shape":
        elements = _sizes(node)
    elif node.op_type == "Gather" and attribute_int(node, "axis", 0) == 0:
        chosen = integers(node.inputs[1]) or ()
        elements = [sizes[index] for index in chosen if -len(sizes) <= index < len(sizes)]
    elif node.op_type == "Slice" and len(node.inputs) < 5:
        bounds = [integers(bound) for bound in node.inputs[1:]]
        starts, ends = [bound[0] if bound else None for bound in bounds[:2]]
        along = len(bounds) < 3 or bounds[2] in ((0,), (-1,))
        elements = sizes[starts:ends] if along and None not in (starts, ends) else []
    else:
        return None
    return elements[0] if len(elements) == 1 else None


def _sizes(node: ir.Node | None) -> list[int | None]:
    """Return what a Shape node tells, with None for sizes that differ between calls."""
    if node is None or (node.domain, node.op_type) != ("", "Shape"):
        return []
    source = node.inputs[0]
    if source is None or source.shape is None:
        return []
    shape = [size if isinstance(size, int) else None for size in source.shape]
    return shape[attribute_int(node, "start", 0) : attribute_int(node, "end", len(shape))]


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return a constant list of integers; None if it is not constant, or long."""
    tensor = None if value is None else _tensor(_unshaped(value))
    if tensor is None or tensor.size > _MAX_LIST or not tensor.dtype.is_integer():
        return None
    return tuple(int(item) for item in tensor.numpy().reshape(-1))


def _unshaped(value: ir.Value) -> ir.Value:
    """Return what a value is another shape of: exporters that fold no constants write axes so."""
    for _ in range(_MAX_DEPTH):
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _RESHAPES:
            break
        source = node.inputs[0] if node.inputs else None
        if source is None:
            break
        value = source
    return value


def is_empty(value: ir.Value | None) -> bool:
    """Return True if a value is constant and has no elements."""
    tensor = None if value is None else _tensor(value)
    return tensor is not None and tensor.size == 0


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    if value.const_value is not None and not value.is_graph_input():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "":
        return None
    for name, attribute in node.attributes.items():
        if name == "value":
            # Not as_tensor(), which asks whether the value has all parts of a tensor's protocol.
            tensor: ir.TensorProtocol = attribute.value
            return tensor if attribute.type == ir.AttributeType.TENSOR else None
        if name in ("value_int", "value_float", "value_ints", "value_floats"):
            return ir.tensor(np.array(attribute.value))
    return None


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute, or its default."""
    return node.attributes.get_int(name, default)


def attribute_float(node: ir.Node, name: str, default: float) -> float:
    """Return a float attribute, or its default."""
    return node.attributes.get_float(name, default)
