"""Derive the sizes and integers of each operator's outputs from its inputs.

A rule tells what must be so if the graph is valid, or nothing; none of them guesses. It is given
the integers that are known of a value, in order; a scalar is a list of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.ops.operators import Attention

Size = int | str | None
"""A number, a name that stands for one and the same number, or nothing known."""
Sizes = tuple[Size, ...]
MOST_SIZES: Final = 64
"""Dimensions of a tensor; a list of more is none of sizes."""
Numbers = Callable[[ir.Value | None], Sizes | None]
Rule = Callable[[Numbers, ir.Node], Sizes | None]

_ARITHMETIC: Final[dict[str, Callable[[int, int], int | None]]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a // b if a >= 0 and b > 0 else None,
}


def sizes(value: ir.Value | None) -> Sizes | None:
    """Return the dimensions of a value as far as the graph tells them; None without a rank."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _length(value: ir.Value | None) -> int | None:
    """Return the length of a list; None if it is not known, or too long for a list of sizes."""
    shape = sizes(value)
    length = shape[0] if shape else None
    return length if isinstance(length, int) and length <= MOST_SIZES else None


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node; None if it has none there."""
    return node.inputs[index] if index < len(node.inputs) else None


def nothing(numbers: Numbers, node: ir.Node) -> Sizes | None:
    """Return the rule of all other operators."""
    return None


def broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    """Return the shape that operands of these shapes give; None if one is not known."""
    parts = [shape for shape in shapes if shape is not None]
    if not parts or len(parts) != len(shapes):
        return None
    longest = max(len(shape) for shape in parts)
    aligned = [(1,) * (longest - len(shape)) + shape for shape in parts]
    return tuple(_common(column) for column in zip(*aligned, strict=True))


def _common(column: tuple[Size, ...]) -> Size:
    """Return the size that broadcasting gives: a number above 1 always wins."""
    wide = {size for size in column if size != 1}
    numbers = [size for size in wide if isinstance(size, int)]
    if numbers:
        return numbers[0]
    return wide.pop() if len(wide) == 1 else (None if wide else 1)


def _broadcast(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return broadcast([sizes(value) for value in node.inputs])


def _same(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return sizes(operand(node, 0))


def _rows(numbers: Numbers, node: ir.Node) -> Sizes | None:
    data, indices = sizes(operand(node, 0)), sizes(operand(node, 1))
    if data is None or indices is None or attribute_int(node, "axis", 0) != 0:
        return None
    return (*indices, *data[1:])


def _transposed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    perm = node.attributes.get_ints("perm", ())
    if shape is None or sorted(perm) != list(range(len(shape))):
        return None
    return tuple(shape[axis] for axis in perm)


def _reshaped(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, target = sizes(operand(node, 0)), numbers(operand(node, 1))
    if target is None:
        count = _length(operand(node, 1))
        return None if count is None else (None,) * count
    result: list[Size] = list(target)
    if not attribute_int(node, "allowzero", 0):
        for axis, size in enumerate(result):
            if size == 0:
                result[axis] = shape[axis] if shape is not None and axis < len(shape) else None
    free = [axis for axis, size in enumerate(result) if size == -1]
    if free:
        result[free[0]] = None if shape is None else _quotient(shape, result, free[0])
    return tuple(result)


def _quotient(shape: Sizes, result: Sequence[Size], free: int) -> Size:
    """Return the size that -1 stands for: what all sizes give, over what the others take."""
    above = list(shape)
    below = [size for axis, size in enumerate(result) if axis != free]
    for size in list(below):
        if isinstance(size, str) and size in above:
            above.remove(size)
            below.remove(size)
    if len(above) == 1 and not below:
        return above[0]
    numbers = [size for size in above if isinstance(size, int)]
    divisors = [size for size in below if isinstance(size, int)]
    if len(numbers) != len(above) or len(divisors) != len(below) or not prod(divisors):
        names = [size for size in above if not isinstance(size, int)]
        alone = len(names) == 1 and len(divisors) == len(below)
        return names[0] if alone and prod(numbers) == prod(divisors) else None
    return prod(numbers) // prod(divisors)


def _unsqueezed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, axes = sizes(operand(node, 0)), numbers(operand(node, 1))
    if shape is None or axes is None or not all(isinstance(axis, int) for axis in axes):
        return None
    size = len(shape) + len(axes)
    new = {int(axis) % size for axis in axes if axis is not None}
    rest = iter(shape)
    return tuple(1 if axis in new else next(rest, None) for axis in range(size))


def _joined(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shapes = [shape for shape in map(sizes, node.inputs) if shape is not None]
    if not shapes or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    size = len(shapes[0])
    if not size:
        return None  # scalars cannot be joined
    along = attribute_int(node, "axis", 0) % size
    result: list[Size] = []
    for axis in range(size):
        column = [shape[axis] for shape in shapes]
        known = [item for item in column if isinstance(item, int)]
        if axis == along:
            result.append(sum(known) if len(known) == len(node.inputs) else None)
        else:
            result.append(known[0] if known else next(iter(column)))
    return tuple(result)


def _sliced(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    starts, ends, axes = (numbers(operand(node, index)) for index in (1, 2, 3))
    if shape is None or axes is None:
        return None
    result = list(shape)
    steps = numbers(operand(node, 4)) or (1,) * len(axes)
    if any(given is not None and len(given) != len(axes) for given in (starts, ends, steps)):
        return None
    for index, axis in enumerate(axes):
        if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return (None,) * len(shape)
        size, length = shape[axis], None
        if isinstance(size, int) and starts is not None and ends is not None:
            start, end, step = starts[index], ends[index], steps[index]
            if isinstance(start, int) and isinstance(end, int) and isinstance(step, int) and step:
                length = len(range(size)[start:end:step])
        result[axis] = length
    return tuple(result)


def _product(numbers: Numbers, node: ir.Node) -> Sizes | None:
    left, right = sizes(operand(node, 0)), sizes(operand(node, 1))
    if left is None or right is None or min(len(left), len(right)) < 2:
        return None
    if node.attributes.get_int("transBatchA", 0) or node.attributes.get_int("transBatchB", 0):
        return None
    rows = left[-1 if node.attributes.get_int("transA", 0) else -2]
    columns = right[-2 if node.attributes.get_int("transB", 0) else -1]
    batch = broadcast([left[:-2], right[:-2]])
    return None if batch is None else (*batch, rows, columns)


def _quantised_product(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    return None if shape is None else (*shape[:-1], attribute_int(node, "N", 0) or None)


def _expanded(numbers: Numbers, node: ir.Node) -> Sizes | None:
    target = numbers(operand(node, 1))
    if target is not None and any(isinstance(size, int) and size < 0 for size in target):
        return None
    return broadcast([sizes(operand(node, 0)), target])


def _shape(numbers: Numbers, node: ir.Node) -> Sizes | None:
    asked = sizes(operand(node, 0))
    if asked is None:
        return None
    end = attribute_int(node, "end", len(asked))
    return asked[attribute_int(node, "start", 0) : end]


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
            length = _length(value)
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


COMPARISONS: Final = frozenset(
    {"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN"}
)
"""Operators whose output is truth values."""
_BROADCAST: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "BiasGelu", "FastGelu"}
) | (COMPARISONS - {"Not", "IsNaN"})
_SAME: Final = frozenset(
    {
        *("Cast", "CastLike", "Identity", "Neg", "Sqrt", "Reciprocal", "Tanh", "Sigmoid"),
        *("Softmax", "Not", "IsNaN", "Exp", "Sin", "Cos", "Abs", "Relu"),
        *("Gelu", "QuickGelu", "Swish", "Dropout"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"),
        Attention.name,
    }
)
"""Operators whose first output is like their first input."""

SHAPES: Final[dict[str, Rule]] = {
    **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys(_SAME, _same),
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Unsqueeze": _unsqueezed,
    "Concat": _joined,
    "Slice": _sliced,
    "MatMul": _product,
    "FusedMatMul": _product,
    "MatMulNBits": _quantised_product,
    "Expand": _expanded,
    "Gather": _rows,
}
NUMBERS: Final[dict[str, Rule]] = {
    "Shape": _shape,
    "Gather": _gathered,
    "Concat": _listed,
    "Slice": _part,
    **dict.fromkeys(("Cast", "Identity", "Unsqueeze", "Squeeze"), _taken_over),
    **dict.fromkeys(_ARITHMETIC, _computed),
}
