"""Derive the integers of each operator's first output from those of its inputs.

A rule returns what follows for every valid graph, or nothing; see ``tq_onnx.graph.sizerules``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.sizerules import (
    MOST_SIZES,
    Numbers,
    Rule,
    Size,
    Sizes,
    length_of,
    operand,
    sizes,
)

_ARITHMETIC: Final[dict[str, Callable[[int, int], int | None]]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a // b if a >= 0 and b > 0 else None,
    "Equal": lambda a, b: int(a == b),
}


def _shape(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    if shape is None:
        return None
    end = attribute_int(node, "end", len(shape))
    return shape[attribute_int(node, "start", 0) : end]


def _gathered(numbers: Numbers, node: ir.Node) -> Sizes | None:
    items, indices = numbers(operand(node, 0)), numbers(operand(node, 1))
    if items is None or indices is None or attribute_int(node, "axis", 0) != 0:
        return None
    chosen = [index for index in indices if isinstance(index, int)]
    if len(chosen) != len(indices) or not all(-len(items) <= i < len(items) for i in chosen):
        return None
    return tuple(items[index] for index in chosen)


def _listed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    result: list[Size] = []
    for value in node.inputs:
        part = numbers(value)
        if part is None:
            length = length_of(value)
            if length is None:
                return None
            part = (None,) * length
        result += part
    return tuple(result)


def _part(numbers: Numbers, node: ir.Node) -> Sizes | None:
    items = numbers(operand(node, 0))
    starts, ends, axes, steps = (numbers(operand(node, index)) for index in (1, 2, 3, 4))
    if items is None or not starts or not ends or axes not in ((0,), None):
        return None
    start, end, step = starts[0], ends[0], (steps or (1,))[0]
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int)):
        return None
    return items[start:end:step] if step else None


def _taken_over(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return numbers(operand(node, 0))


def _computed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    left, right = numbers(operand(node, 0)), numbers(operand(node, 1))
    if left is None or right is None:
        return None
    length = max(len(left), len(right))
    if not length or {len(left), len(right)} - {1, length}:
        return None
    left, right = left * (length // len(left)), right * (length // len(right))
    rule = _ARITHMETIC[node.op_type]
    return tuple(
        rule(a, b) if isinstance(a, int) and isinstance(b, int) else None
        for a, b in zip(left, right, strict=True)
    )


def _flattened(numbers: Numbers, node: ir.Node) -> Sizes | None:
    items, target = numbers(operand(node, 0)), numbers(operand(node, 1))
    return items if items is not None and target in ((-1,), (len(items),)) else None


def _repeated(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = numbers(operand(node, 0))
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        return None
    attribute = node.attributes.get("value")
    tensor = None if attribute is None else attribute.as_tensor()
    if tensor is None or tensor.dtype is not ir.DataType.INT64 or tensor.size != 1:
        return None
    return (int(tensor.numpy().reshape(-1)[0]),) * shape[0] if 0 <= shape[0] <= MOST_SIZES else None


def _selected(numbers: Numbers, node: ir.Node) -> Sizes | None:
    columns = [numbers(value) for value in node.inputs]
    length = max((len(column) for column in columns if column is not None), default=0)
    parts = [
        column * length if len(column) == 1 else column for column in columns if column is not None
    ]
    if len(parts) != 3 or any(len(part) != length for part in parts):
        return None
    return tuple(
        (yes if where else no) if isinstance(where, int) else None
        for where, yes, no in zip(*parts, strict=True)
    )


def _one_hot(numbers: Numbers, node: ir.Node) -> Sizes | None:
    """Return the list of one index."""
    index, depth, levels = (numbers(operand(node, slot)) for slot in range(3))
    if index is None or depth is None or levels is None or (len(index), len(depth)) != (1, 1):
        return None
    place, length = index[0], depth[0]
    if not (isinstance(place, int) and isinstance(length, int) and 0 < length <= MOST_SIZES):
        return None
    if (
        sizes(operand(node, 0)) not in ((), (1,))
        or len(levels) != 2
        or not -length <= place < length
    ):
        return None
    return tuple(levels[int(at == place % length)] for at in range(length))


NUMBERS: Final[dict[str, Rule]] = {
    "Shape": _shape,
    "Gather": _gathered,
    "Concat": _listed,
    "Slice": _part,
    "Reshape": _flattened,
    "ConstantOfShape": _repeated,
    "Where": _selected,
    "OneHot": _one_hot,
    **dict.fromkeys(("Cast", "Identity", "Unsqueeze", "Squeeze"), _taken_over),
    **dict.fromkeys(_ARITHMETIC, _computed),
}
