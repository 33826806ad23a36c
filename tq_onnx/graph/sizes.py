"""Sizes that onnx's own shape inference does not tell: one pass over the graph, front to back.

onnx gives up all dimensions after an operator that it does not know (ONNX Runtime's optimizer makes
such ones), and after a Slice whose ends are computed, which is what rotary embeddings look like in
traced graphs. Here each operator that stands between a projection and its attention has a rule, and
short lists of integers (``Shape``, ``Gather``, ``Concat``, arithmetic) are followed through the
graph. A size is a number, a name that stands for one and the same number, or None.

A rule tells what must be so if the graph is valid, or nothing; nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.dialects.constants import attribute_int, integers

Size = int | str | None
Sizes = tuple[Size, ...]

_MAX_LIST: Final = 16
_COMPARISONS: Final = frozenset(
    {"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN"}
)
_BROADCAST: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "BiasGelu", "FastGelu"}
) | (_COMPARISONS - {"Not", "IsNaN"})
_SAME: Final = frozenset(
    {
        *("Cast", "CastLike", "Identity", "Neg", "Sqrt", "Reciprocal", "Tanh", "Sigmoid", "Softmax"),
        *("Not", "IsNaN", "Exp", "Sin", "Cos", "Abs", "Relu", "Gelu", "QuickGelu", "Dropout"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"),
    }
)
"""Operators whose first output is like their first input."""
_ARITHMETIC: Final[dict[str, Callable[[int, int], int | None]]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a // b if a >= 0 and b > 0 else None,
}


def refine(graph: ir.Graph, untold: set[ir.Value]) -> None:
    """Tells more sizes and types.

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
    """What is known of the values before a node."""

    def __init__(self) -> None:
        self._numbers: dict[ir.Value, Sizes | None] = {}

    def numbers(self, value: ir.Value | None) -> Sizes | None:
        """A short list of integers; a scalar is a list of one."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = integers(value)
        return self._numbers[value]

    def follow_numbers(self, node: ir.Node, output: ir.Value) -> None:
        """Remembers the integers that a node makes."""
        if node.domain != "":
            return
        found = _NUMBERS.get(node.op_type, _nothing)(self, node)
        if found is not None and 0 < len(found) <= _MAX_LIST:
            self._numbers[output] = found

    def sizes_of_result(self, node: ir.Node) -> Sizes | None:
        """Shape of a node's first output."""
        if node.op_type in _SAME:
            return sizes(_input(node, 0))
        if node.op_type in _BROADCAST:
            return _broadcast([sizes(value) for value in node.inputs])
        return _SHAPES.get(node.op_type, _nothing)(self, node)


    def sizes_of_parts(self, node: ir.Node) -> list[Sizes | None]:
        """Shapes of the outputs of a Split."""
        shape = sizes(_input(node, 0))
        if shape is None:
            return [None] * len(node.outputs)
        axis = attribute_int(node, "axis", 0) % len(shape)
        parts = self.numbers(_input(node, 1)) or (None,) * len(node.outputs)
        return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


def sizes(value: ir.Value | None) -> Sizes | None:
    """The dimensions of a value as far as they are told; None if not even their number is."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


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
    elif node.op_type in _BROADCAST or node.op_type in _SAME or node.op_type in (*_SHAPES, "Split"):
        source = _input(node, 1 if node.op_type in ("Where", "CastLike") else 0)
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


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _nothing(known: _Known, node: ir.Node) -> Sizes | None:
    return None


def _broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    parts = [shape for shape in shapes if shape is not None]
    if not parts or len(parts) != len(shapes):
        return None
    longest = max(len(shape) for shape in parts)
    aligned = [(1,) * (longest - len(shape)) + shape for shape in parts]
    return tuple(_common(column) for column in zip(*aligned, strict=True))


def _common(column: tuple[Size, ...]) -> Size:
    """The size that broadcasting gives: a number above 1 always wins."""
    wide = {size for size in column if size != 1}
    numbers = [size for size in wide if isinstance(size, int)]
    if numbers:
        return numbers[0]
    return wide.pop() if len(wide) == 1 else (None if wide else 1)


def _transposed(known: _Known, node: ir.Node) -> Sizes | None:
    shape = sizes(_input(node, 0))
    perm = node.attributes.get_ints("perm", ())
    if shape is None or sorted(perm) != list(range(len(shape))):
        return None
    return tuple(shape[axis] for axis in perm)


def _reshaped(known: _Known, node: ir.Node) -> Sizes | None:
    shape, target = sizes(_input(node, 0)), known.numbers(_input(node, 1))
    if target is None:
        count = sizes(_input(node, 1))
        return (None,) * count[0] if count and isinstance(count[0], int) else None
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
    """The size that -1 stands for: what all sizes give, over what the others take."""
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


def _unsqueezed(known: _Known, node: ir.Node) -> Sizes | None:
    shape, axes = sizes(_input(node, 0)), known.numbers(_input(node, 1))
    if shape is None or axes is None or not all(isinstance(axis, int) for axis in axes):
        return None
    size = len(shape) + len(axes)
    new = {int(axis) % size for axis in axes if axis is not None}
    rest = iter(shape)
    return tuple(1 if axis in new else next(rest, None) for axis in range(size))


def _joined(known: _Known, node: ir.Node) -> Sizes | None:
    shapes = [shape for shape in map(sizes, node.inputs) if shape is not None]
    if not shapes or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    size = len(shapes[0])
    along = attribute_int(node, "axis", 0) % size
    result: list[Size] = []
    for axis in range(size):
        column = [shape[axis] for shape in shapes]
        numbers = [item for item in column if isinstance(item, int)]
        if axis == along:
            result.append(sum(numbers) if len(numbers) == len(node.inputs) else None)
        else:
            result.append(numbers[0] if numbers else next(iter(column)))
    return tuple(result)


def _sliced(known: _Known, node: ir.Node) -> Sizes | None:
    shape = sizes(_input(node, 0))
    starts, ends, axes = (known.numbers(_input(node, index)) for index in (1, 2, 3))
    if shape is None or axes is None:
        return None
    result = list(shape)
    steps = known.numbers(_input(node, 4)) or (1,) * len(axes)
    for index, axis in enumerate(axes):
        if not isinstance(axis, int):
            return (None,) * len(shape)
        size, length = shape[axis], None
        if isinstance(size, int) and starts is not None and ends is not None:
            start, end, step = starts[index], ends[index], steps[index]
            if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
                length = len(range(size)[start:end:step])
        result[axis] = length
    return tuple(result)


def _product(known: _Known, node: ir.Node) -> Sizes | None:
    left, right = sizes(_input(node, 0)), sizes(_input(node, 1))
    if left is None or right is None or min(len(left), len(right)) < 2:
        return None
    if node.attributes.get_int("transBatchA", 0) or node.attributes.get_int("transBatchB", 0):
        return None
    rows = left[-1 if node.attributes.get_int("transA", 0) else -2]
    columns = right[-2 if node.attributes.get_int("transB", 0) else -1]
    batch = _broadcast([left[:-2], right[:-2]])
    return None if batch is None else (*batch, rows, columns)


def _quantised_product(known: _Known, node: ir.Node) -> Sizes | None:
    shape = sizes(_input(node, 0))
    return None if shape is None else (*shape[:-1], attribute_int(node, "N", 0) or None)


def _expanded(known: _Known, node: ir.Node) -> Sizes | None:
    return _broadcast([sizes(_input(node, 0)), known.numbers(_input(node, 1))])


def _shape(known: _Known, node: ir.Node) -> Sizes | None:
    asked = sizes(_input(node, 0))
    if asked is None:
        return None
    end = attribute_int(node, "end", len(asked))
    return asked[attribute_int(node, "start", 0) : end]


def _gathered(known: _Known, node: ir.Node) -> Sizes | None:
    items, indices = known.numbers(_input(node, 0)), known.numbers(_input(node, 1))
    if items is None or indices is None or attribute_int(node, "axis", 0) != 0:
        return None
    chosen = [index for index in indices if isinstance(index, int)]
    if len(chosen) != len(indices) or not all(-len(items) <= i < len(items) for i in chosen):
        return None
    return tuple(items[index] for index in chosen)


def _listed(known: _Known, node: ir.Node) -> Sizes | None:
    result: list[Size] = []
    for value in node.inputs:
        part = known.numbers(value)
        if part is None:
            length = sizes(value)
            if not length or not isinstance(length[0], int):
                return None
            part = (None,) * length[0]
        result += part
    return tuple(result)


def _part(known: _Known, node: ir.Node) -> Sizes | None:
    items = known.numbers(_input(node, 0))
    starts, ends, axes, steps = (known.numbers(_input(node, index)) for index in (1, 2, 3, 4))
    if items is None or starts is None or ends is None or axes not in ((0,), None):
        return None
    start, end, step = starts[0], ends[0], (steps or (1,))[0]
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int)):
        return None
    return items[start:end:step]


def _taken_over(known: _Known, node: ir.Node) -> Sizes | None:
    return known.numbers(_input(node, 0))


def _computed(known: _Known, node: ir.Node) -> Sizes | None:
    left, right = known.numbers(_input(node, 0)), known.numbers(_input(node, 1))
    if left is None or right is None:
        return None
    length = max(len(left), len(right))
    if {len(left), len(right)} - {1, length}:
        return None
    left, right = left * (length // len(left)), right * (length // len(right))
    rule = _ARITHMETIC[node.op_type]
    return tuple(
        rule(a, b) if isinstance(a, int) and isinstance(b, int) else None
        for a, b in zip(left, right, strict=True)
    )


_Rule = Callable[[_Known, ir.Node], Sizes | None]
_SHAPES: Final[dict[str, _Rule]] = {
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Unsqueeze": _unsqueezed,
    "Concat": _joined,
    "Slice": _sliced,
    "MatMul": _product,
    "FusedMatMul": _product,
    "MatMulNBits": _quantised_product,
    "Expand": _expanded,
}
_NUMBERS: Final[dict[str, _Rule]] = {
    "Shape": _shape,
    "Gather": _gathered,
    "Concat": _listed,
    "Slice": _part,
    **dict.fromkeys(("Cast", "Identity", "Unsqueeze", "Squeeze"), _taken_over),
    **dict.fromkeys(_ARITHMETIC, _computed),
}
