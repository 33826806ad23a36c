"""Match RMS norms: operators, and arithmetic.

    Y = X / sqrt(mean(X^2, last axis) + epsilon) * weight

Operators are SimplifiedLayerNormalization, RMSNormalization of ONNX 23 and com.microsoft's
SkipSimplifiedLayerNormalization, which adds to X first. LayerNormalization, which centers X, is
matched too, and told apart. Arithmetic is a product of a weight and of numbers over, or times one
over, a root of a mean along the last axis. Where it is that formula and nothing else, the match has
X and epsilon: squares by Pow or Mul, a constant epsilon, the root by Sqrt or Pow. Casts between
float types may stand anywhere in it.

What a weight has to be is for the caller to say; ``constant_channels`` reads one that the graph may
compute from constants. Weights are read only where their shape says how large they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.graph.constants import attribute_float, attribute_int, integers, scalar
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import above_casts, keeps_numbers, rank, static_dim, widened
from tq_onnx.ops.domain import MICROSOFT

Array = npt.NDArray[Any]

_SKIP: Final = f"{MICROSOFT}.SkipSimplifiedLayerNormalization"
_CENTERED: Final = "LayerNormalization"
_EPSILONS: Final = {
    "SimplifiedLayerNormalization": 1e-5,
    f"{MICROSOFT}.SimplifiedLayerNormalization": 1e-5,
    "RMSNormalization": 1e-5,
    _CENTERED: 1e-5,
    _SKIP: 1e-12,
}
"""Norms of one node, and the epsilon of each that does not tell its own."""

_MAX_STEPS: Final = 16


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """A norm, as far as its form tells."""

    node: ir.Node  #: what multiplies by the weight; the whole norm where that is an operator
    weight_index: int  #: the input of ``node`` that the weight is
    source: ir.Value | None = None  #: X; None where arithmetic is not the formula alone
    epsilon: float = 0.0  #: what is added to the mean
    is_operator: bool = False  #: whether ``node`` is the whole norm
    centers: bool = False  #: whether X is centered first
    summands: tuple[ir.Value, ...] = ()  #: what an operator adds to X first
    bias: ir.Value | None = None  #: what an operator adds to its result; None if nothing
    #: the output of an operator that is X with its summands; None if it has none
    total: ir.Value | None = None

    @property
    def weight(self) -> ir.Value | None:
        """The weight; None if the node lacks it."""
        inputs = self.node.inputs
        return inputs[self.weight_index] if self.weight_index < len(inputs) else None

    @property
    def is_of_last_axis(self) -> bool:
        """True if the mean is along the last axis."""
        if not self.is_operator:
            return True
        last = (rank(self.node.outputs[0]) or 0) - 1
        return attribute_int(self.node, "axis", -1) in (-1, last)


def match_norms(node: ir.Node) -> Iterator[RmsNorm]:
    """Match norms whose last step, the product with the weight, a node is.

    A product may be two: each factor could be the weight of the other.
    """
    if kind(node) in _EPSILONS:
        yield from _operator(node)
    elif kind(node) == "Mul":
        for index in (0, 1):
            normalised = node.inputs[1 - index]
            formula = _formula(normalised)
            if formula is not None:
                yield RmsNorm(node, index, *formula)
            elif _is_over_mean(normalised):
                yield RmsNorm(node, index)


def _operator(node: ir.Node) -> Iterator[RmsNorm]:
    """Match a norm that is a node of its own."""
    inputs = [*node.inputs, *[None] * 4]
    epsilon = attribute_float(node, "epsilon", _EPSILONS[kind(node)])
    if kind(node) != _SKIP:
        bias = next((value for value in inputs[2:] if value is not None), None)
        centers = kind(node) == _CENTERED
        yield RmsNorm(node, 1, inputs[0], epsilon, True, centers, bias=bias)
    elif inputs[1] is not None:
        summands = tuple(value for value in (inputs[1], inputs[3]) if value is not None)
        total = node.outputs[3] if len(node.outputs) > 3 else None
        yield RmsNorm(node, 2, inputs[0], epsilon, True, summands=summands, total=total)


def _formula(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """Return the numbers X and the epsilon of X / sqrt(mean(X^2) + epsilon)."""
    node = above_casts(value)
    if node is None or kind(node) not in ("Mul", "Div"):
        return None
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        numbers, factor = node.inputs[index], node.inputs[1 - index]
        mean_square = _mean_square(_below_root(factor, inverse=node.op_type == "Mul"))
        if numbers is not None and mean_square is not None:
            squared, epsilon = mean_square
            if widened(squared)[-1] is widened(numbers)[-1]:
                return numbers, epsilon
    return None


def _below_root(value: ir.Value | None, *, inverse: bool) -> ir.Value | None:
    """Return the number whose root, or inverse root, a value is."""
    node = above_casts(value)
    if node is None:
        return None
    operator = kind(node)
    if operator == "Pow":
        return node.inputs[0] if scalar(node.inputs[1]) == (-0.5 if inverse else 0.5) else None
    if not inverse:
        return node.inputs[0] if operator == "Sqrt" else None
    if operator == "Reciprocal":
        return _below_root(node.inputs[0], inverse=False)
    if operator == "Div" and scalar(node.inputs[0]) == 1:
        return _below_root(node.inputs[1], inverse=False)
    return None


def _mean_square(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """Return the numbers X and the epsilon of mean(X^2) + epsilon."""
    node = above_casts(value)
    if node is None or kind(node) != "Add":
        return None
    for index in (0, 1):
        epsilon, mean = scalar(node.inputs[index]), above_casts(node.inputs[1 - index])
        if (
            epsilon is not None
            and epsilon >= 0
            and mean is not None
            and _is_last_mean(mean)
            and _keeps_rank(mean)
        ):
            numbers = _square(above_casts(mean.inputs[0]))
            return None if numbers is None else (numbers, epsilon)
    return None


def _is_last_mean(node: ir.Node) -> bool:
    """Return True if a node is the mean along the last axis."""
    if kind(node) != "ReduceMean":
        return False
    numbers = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = node.attributes.get_ints("axes", ()) or numbers
    last = (rank(node.outputs[0]) or 0) - 1
    return axes is not None and tuple(axes) in ((-1,), (last,))


def _keeps_rank(node: ir.Node) -> bool:
    """Return True if a mean keeps the axis that it is of, in a known rank."""
    return attribute_int(node, "keepdims", 1) == 1 and rank(node.outputs[0]) is not None


def _square(node: ir.Node | None) -> ir.Value | None:
    """Return the value that a node squares."""
    if node is None or kind(node) not in ("Pow", "Mul"):
        return None
    base, operand = node.inputs
    if base is None or operand is None:
        return None
    if node.op_type == "Pow":
        return base if scalar(operand) == 2 else None
    return base if widened(base)[-1] is widened(operand)[-1] else None


def _is_over_mean(value: ir.Value | None) -> bool:
    """Return True if a value is numbers times, or over, what some mean along the last axis is."""
    node = above_casts(value)
    if node is None or kind(node) not in ("Mul", "Div"):
        return False
    factors = node.inputs if node.op_type == "Mul" else node.inputs[1:]
    return any(_comes_from_mean(factor) for factor in factors)


def _comes_from_mean(value: ir.Value | None) -> bool:
    for _ in range(_MAX_STEPS):
        node = above_casts(value)
        if node is None or node.domain != "":
            return False
        if node.op_type == "ReduceMean":
            return _is_last_mean(node)
        if node.op_type in ("Sqrt", "Reciprocal"):
            value = node.inputs[0]
        elif node.op_type in ("Add", "Div", "Max", "Pow", "Clip"):
            value = next((item for item in node.inputs if scalar(item) is None), None)
        else:
            return False
    return False


def constant_channels(value: ir.Value | None, head_size: int) -> Array | None:
    """Return the constant ``[D]`` or ``[1, ..., D]`` that a value always is, if it is one."""
    array = _constant(value, head_size, _MAX_STEPS)
    if array is None or array.shape != (1,) * (array.ndim - 1) + (head_size,):
        return None
    return array


def _constant(value: ir.Value | None, size: int, depth: int) -> Array | None:
    """Return a small constant, or what a model makes of one by itself, as 1 + weight or a Cast."""
    if value is None or depth == 0 or value.is_graph_input():
        return None
    node = value.producer()
    tensor = _tensor(value)
    if tensor is not None:
        floating = tensor.dtype.is_floating_point()
        return np.asarray(tensor.numpy()) if tensor.size == size and floating else None
    if node is None or node.domain != "" or not node.inputs:
        return None
    if node.op_type in ("Add", "Mul"):
        return _with_number(node, size, depth)
    return _viewed(node, size, depth)


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    node = value.producer()
    if node is None or kind(node) != "Constant" or "value" not in node.attributes:
        return value.const_value
    # Not as_tensor(), which asks whether the value has all parts of a tensor's protocol.
    tensor: ir.TensorProtocol = node.attributes["value"].value
    return tensor


def _viewed(node: ir.Node, size: int, depth: int) -> Array | None:
    value = node.outputs[0]
    array = _constant(node.inputs[0], size, depth - 1)
    if array is None or node.op_type == "Identity":
        return array
    if keeps_numbers(node):
        return array.astype(ir.DataType(attribute_int(node, "to", 1)).numpy())
    dims = [static_dim(value, axis) for axis in range(rank(value) or 0)]
    shape = [dim for dim in dims if dim is not None]
    views = node.op_type in ("Unsqueeze", "Reshape", "Squeeze") and len(shape) == len(dims)
    return array.reshape(shape) if views and int(np.prod(shape)) == size else None


def _with_number(node: ir.Node, size: int, depth: int) -> Array | None:
    for index in (0, 1):
        array = _constant(node.inputs[index], size, depth - 1)
        number = scalar(node.inputs[1 - index])
        if array is not None and number is not None:
            operand = array.dtype.type(number)
            result = array + operand if node.op_type == "Add" else array * operand
            return np.asarray(result, array.dtype)
    return None
