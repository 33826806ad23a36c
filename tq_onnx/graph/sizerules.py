"""Derive the sizes of each operator's first output from its inputs.

A rule returns what follows for every valid graph, or nothing; it never guesses. Its arguments are
the known integers of a value, in order; a scalar is a list of one.
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


def sizes(value: ir.Value | None) -> Sizes | None:
    """Return the dimensions of a value as far as the graph tells them; None without a rank."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def length_of(value: ir.Value | None) -> int | None:
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


def same(numbers: Numbers, node: ir.Node) -> Sizes | None:
    """Return the shape of the first input."""
    return sizes(operand(node, 0))


def chosen(shape: Sizes | None, indices: Sizes | None, axis: int) -> Sizes | None:
    """Return the shape of what indices choose along an axis."""
    if not shape or indices is None or not -len(shape) <= axis < len(shape):
        return None
    at = axis % len(shape)
    return (*shape[:at], *indices, *shape[at + 1 :])


def _rows(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return chosen(sizes(operand(node, 0)), sizes(operand(node, 1)), attribute_int(node, "axis", 0))


def _transposed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    perm = node.attributes.get_ints("perm", ())
    if shape is None or sorted(perm) != list(range(len(shape))):
        return None
    return tuple(shape[axis] for axis in perm)


def _reshaped(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, target = sizes(operand(node, 0)), numbers(operand(node, 1))
    if target is None:
        count = length_of(operand(node, 1))
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
    dims = iter(shape)
    return tuple(1 if axis in new else next(dims, None) for axis in range(size))


def _joined(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return joined(node, node.inputs)


def joined(node: ir.Node, parts: Sequence[ir.Value | None]) -> Sizes | None:
    """Return the shape of values that a node joins along its axis."""
    shapes = [shape for shape in map(sizes, parts) if shape is not None]
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
            result.append(sum(known) if len(known) == len(parts) else None)
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
    if any(bounds is not None and len(bounds) != len(axes) for bounds in (starts, ends, steps)):
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
    if attribute_int(node, "transBatchA", 0) or attribute_int(node, "transBatchB", 0):
        return None
    turned = (bool(attribute_int(node, name, 0)) for name in ("transA", "transB"))
    return matrix_product(left, right, *turned)


def matrix_product(
    left: Sizes | None, right: Sizes | None, left_turned: bool = False, right_turned: bool = False
) -> Sizes | None:
    """Return the shape of a product of matrices, which may be turned first."""
    if left is None or right is None or min(len(left), len(right)) < 2:
        return None
    batch = broadcast([left[:-2], right[:-2]])
    if batch is None:
        return None
    return (*batch, left[-1 if left_turned else -2], right[-2 if right_turned else -1])


def _reduced(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape = sizes(operand(node, 0))
    if not shape:
        return shape
    axes_input = operand(node, 1)
    axes = numbers(axes_input) if axes_input is not None else node.attributes.get_ints("axes", ())
    if axes is None or not all(isinstance(axis, int) for axis in axes):
        return None
    if not axes and attribute_int(node, "noop_with_empty_axes", 0):
        return shape
    gone = {int(axis) % len(shape) for axis in axes if axis is not None} or set(range(len(shape)))
    if attribute_int(node, "keepdims", 1):
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _topmost(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, count = sizes(operand(node, 0)), numbers(operand(node, 1))
    if not shape or not count:
        return None
    axis = attribute_int(node, "axis", -1) % len(shape)
    return (*shape[:axis], count[0], *shape[axis + 1 :])


def _squeezed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, axes = sizes(operand(node, 0)), numbers(operand(node, 1))
    if not shape or not axes or not all(isinstance(axis, int) for axis in axes):
        return None
    gone = {int(axis) % len(shape) for axis in axes if axis is not None}
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _convolved(numbers: Numbers, node: ir.Node) -> Sizes | None:
    """Return the shape of a convolution; lengths with paddings that are not spelled out: None."""
    shape, weight = sizes(operand(node, 0)), sizes(operand(node, 1))
    if shape is None or weight is None or len(shape) != len(weight) or len(shape) < 3:
        return None
    axes = len(shape) - 2
    strides = tuple(node.attributes.get_ints("strides", ())) or (1,) * axes
    dilations = tuple(node.attributes.get_ints("dilations", ())) or (1,) * axes
    pads = tuple(node.attributes.get_ints("pads", ())) or (0,) * (2 * axes)
    plain = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    plain &= (len(strides), len(dilations), len(pads)) == (axes, axes, 2 * axes)
    plain &= min(strides) > 0
    lengths: list[Size] = []
    for axis in range(axes):
        size, kernel, length = shape[axis + 2], weight[axis + 2], None
        if plain and isinstance(size, int) and isinstance(kernel, int):
            room = size + pads[axis] + pads[axis + axes] - dilations[axis] * (kernel - 1) - 1
            length = room // strides[axis] + 1
        lengths.append(length)
    return (shape[0], weight[0], *lengths)


def _expanded(numbers: Numbers, node: ir.Node) -> Sizes | None:
    target = numbers(operand(node, 1))
    if target is not None and any(isinstance(size, int) and size < 0 for size in target):
        return None
    return broadcast([sizes(operand(node, 0)), target])


def _repeated(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, repeats = sizes(operand(node, 0)), numbers(operand(node, 1))
    if shape is None or repeats is None or len(shape) != len(repeats):
        return None
    pairs = zip(shape, repeats, strict=True)
    return tuple(size if count == 1 else _known_product((size, count)) for size, count in pairs)


def _padded(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, pads = sizes(operand(node, 0)), numbers(operand(node, 1))
    if shape is None or pads is None or len(pads) != 2 * len(shape):  # or it names axes
        return None
    sides = zip(shape, pads[: len(shape)], pads[len(shape) :], strict=True)
    return tuple(
        size
        if before == after == 0
        else size + before + after
        if isinstance(size, int) and isinstance(before, int) and isinstance(after, int)
        else None
        for size, before, after in sides
    )


def _flattened(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, axis = sizes(operand(node, 0)), attribute_int(node, "axis", 1)
    if shape is None or not -len(shape) <= axis <= len(shape):
        return None
    at = axis if axis >= 0 else axis + len(shape)
    return _known_product(shape[:at]), _known_product(shape[at:])


def _known_product(shape: Sizes) -> int | None:
    known = [size for size in shape if isinstance(size, int)]
    return prod(known) if len(known) == len(shape) else None


def _one_hot(numbers: Numbers, node: ir.Node) -> Sizes | None:
    shape, depth = sizes(operand(node, 0)), numbers(operand(node, 1))
    if shape is None or depth is None or len(depth) != 1:
        return None
    axis = attribute_int(node, "axis", -1) % (len(shape) + 1)
    return (*shape[:axis], depth[0], *shape[axis:])


def _filled(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return numbers(operand(node, 0))


def _indexed(numbers: Numbers, node: ir.Node) -> Sizes | None:
    return sizes(operand(node, 1))


def _counted(numbers: Numbers, node: ir.Node) -> Sizes | None:
    start, end, step = (numbers(operand(node, index)) or (None,) for index in range(3))
    if start == (0,) and step == (1,) and isinstance(end[0], str):
        return end
    if not (isinstance(start[0], int) and isinstance(end[0], int) and isinstance(step[0], int)):
        return (None,)
    # Not the length of a range, which has to fit into an integer of C.
    return (max(0, -((start[0] - end[0]) // step[0])) if step[0] else None,)


COMPARISONS: Final = frozenset(
    {"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN"}
)
"""Operators whose output is truth values."""
_BROADCAST: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "Max", "Min", "BiasGelu", "FastGelu"}
) | (COMPARISONS - {"Not", "IsNaN"})
_SHAPE_KEEPING: Final = frozenset(
    {
        *("Cast", "CastLike", "Identity", "Neg", "Sqrt", "Reciprocal", "Tanh", "Sigmoid"),
        *("Softmax", "Not", "IsNaN", "Exp", "Sin", "Cos", "Abs", "Relu"),
        *("Gelu", "QuickGelu", "Swish", "Dropout", "Erf", "Log", "Clip", "Floor", "Ceil", "Round"),
        *("Sign", "Softplus", "LeakyRelu", "Elu", "HardSwish", "HardSigmoid", "Mish", "LogSoftmax"),
        *("CumSum", "Trilu", "ScatterND", "ScatterElements", "MoE", "QMoE"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"),
        *("MoE", "QMoE"),
        Attention.name,
    }
)
"""Operators whose first output is like their first input."""
REDUCTIONS: Final = frozenset(
    f"Reduce{name}"
    for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
)

SHAPES: Final[dict[str, Rule]] = {
    **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys(_SHAPE_KEEPING, same),
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Unsqueeze": _unsqueezed,
    "Concat": _joined,
    "Slice": _sliced,
    "MatMul": _product,
    "FusedMatMul": _product,
    **dict.fromkeys(REDUCTIONS, _reduced),
    "TopK": _topmost,
    "Squeeze": _squeezed,
    **dict.fromkeys(("Conv", "ConvInteger"), _convolved),
    "Expand": _expanded,
    "Tile": _repeated,
    "Pad": _padded,
    "ConstantOfShape": _filled,
    "OneHot": _one_hot,
    "Flatten": _flattened,
    "GatherElements": _indexed,
    "Gather": _rows,
    "Range": _counted,
}
