"""RMS norms, as one node or spelled out, as ``RMSNormalization``.

    Y = X / sqrt(mean(X^2, last axis) + epsilon) * scale

Recognised are SimplifiedLayerNormalization, RMSNormalization of ONNX 23, com.microsoft's
SkipSimplifiedLayerNormalization (whose sum becomes an Add), and arithmetic: squares by Pow or Mul,
their mean along the last axis, a constant epsilon, the root by Sqrt or Pow, over or times one over
it, times a constant weight on either side. Casts between float types may stand anywhere in it; the
operator computes in float32 and rounds once. Everything else is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.headnorms import above_casts, constant_channels
from tq_onnx.graph.builder import MICROSOFT, Builder
from tq_onnx.graph.constants import (
    attribute_float,
    attribute_int,
    integers,
    scalar,
)
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import label, rank, static_dim, substitute
from tq_onnx.ops.domain import DOMAIN, RMS_NORMALIZATION
from tq_onnx.targets.cann.claims import ELEMENTS

_SKIP: Final = f"{MICROSOFT}.SkipSimplifiedLayerNormalization"
_EPSILONS: Final = {
    "SimplifiedLayerNormalization": 1e-5,
    f"{MICROSOFT}.SimplifiedLayerNormalization": 1e-5,
    "RMSNormalization": 1e-5,
    _SKIP: 1e-12,
}
"""Norms of one node, and the epsilon of each that does not tell its own."""


@dataclass(frozen=True, eq=False)
class _Norm:
    """A norm.

    Attributes:
        source: X; for a norm of a sum, its first summand.
        added: the other summands.
        weight: a value ``[E]`` of the type of X, or what it always is.
        epsilon: what is added to the mean.
        output: Y.
        total: the output that is the sum; None if there is none.
    """

    source: ir.Value
    added: tuple[ir.Value, ...]
    weight: ir.Value | npt.NDArray[Any]
    epsilon: float
    output: ir.Value
    total: ir.Value | None = None


def lower_norms(model: ir.Model, build: Builder) -> int:
    """Replaces every RMS norm with a constant weight.

    Args:
        model: a converted model whose values have shapes; changed in place, what is left without a
            reader stays.
        build: of the model's graph.

    Returns:
        how many were replaced.
    """
    count = 0
    for node in list(model.graph):
        norm = _one_node(node) or _spelled_out(node)
        if norm is not None:
            with build.before(node, label(node)):
                _replace(norm, build)
            count += 1
    return count


def _replace(norm: _Norm, build: Builder) -> None:
    source, output, weight = norm.source, norm.output, norm.weight
    for value in norm.added:
        source = build.op(
            "Add", [source, value], "sum", dtype=output.dtype, shape=sizes(norm.source)
        )
    if norm.total is not None:
        substitute(norm.total, source)
    if not isinstance(weight, ir.Value):
        weight = build.constant(f"tq.norm_weight.{output.name}", weight)
    made = build.op(
        RMS_NORMALIZATION,
        [source, weight],
        RMS_NORMALIZATION,
        dtype=norm.source.dtype,
        shape=sizes(source),
        domain=DOMAIN,
        epsilon=norm.epsilon,
    )
    if norm.source.dtype is not output.dtype:
        made = build.op(
            "Cast",
            [made],
            "narrow",
            dtype=output.dtype,
            shape=sizes(source),
            to=int(output.dtype or 0),
        )
    substitute(output, made)


def _one_node(node: ir.Node) -> _Norm | None:
    """A norm that is a node of its own."""
    if kind(node) not in _EPSILONS:
        return None
    skips, output = kind(node) == _SKIP, node.outputs[0]
    inputs = [*node.inputs, *[None] * 4][:4]
    source, (added, weight, bias) = inputs[0], inputs[1:] if skips else (None, *inputs[1:3])
    total = node.outputs[3] if skips and len(node.outputs) > 3 else None
    scale = None if source is None else _weight(weight, source)
    if source is None or scale is None or (added is not None) != skips:
        return None
    if not _is_plain(node, total) or (bias is not None and not skips):
        return None
    summands = tuple(value for value in (added, bias) if value is not None)
    if any(value.dtype is not output.dtype for value in (source, *summands)):
        return None
    epsilon = attribute_float(node, "epsilon", _EPSILONS[kind(node)])
    return _Norm(source, summands, scale, epsilon, output, total)


def _is_plain(node: ir.Node, total: ir.Value | None) -> bool:
    """Whether a norm is of the last axis, in float32, and only its result and sum are read."""
    output = node.outputs[0]
    others = [value for value in node.outputs[1:] if value is not total]
    return (
        output.dtype in ELEMENTS
        and attribute_int(node, "axis", -1) in (-1, (rank(output) or 0) - 1)
        and attribute_int(node, "stash_type", 1) == ir.DataType.FLOAT
        and not any(value.uses() or value.is_graph_output() for value in others)
    )


def _spelled_out(node: ir.Node) -> _Norm | None:
    """A norm whose last step, the product with its weight, a node is."""
    output = node.outputs[0]
    if kind(node) != "Mul" or output.dtype not in ELEMENTS:
        return None
    for index in (0, 1):
        found = _normalised(node.inputs[1 - index])
        if found is None:
            continue
        numbers, epsilon = found
        source = _source(numbers, output)
        scale = None if source is None else _weight(node.inputs[index], source)
        if source is not None and scale is not None:
            return _Norm(source, (), scale, epsilon, output)
    return None


def _source(numbers: ir.Value, output: ir.Value) -> ir.Value | None:
    """X in the type of Y; or else in a wider one, and Y is rounded to its own."""
    held = _widened(numbers)
    same = [value for value in held if value.dtype is output.dtype]
    wider = [v for v in held if v.dtype in ELEMENTS and _holds(v.dtype, output.dtype)]
    return next(iter((*same[-1:], *wider[-1:])), None)


def _weight(value: ir.Value | None, source: ir.Value) -> ir.Value | npt.NDArray[Any] | None:
    """A constant weight of as many elements as X has along its last axis, in its type."""
    width = static_dim(source, -1)
    if value is None or width is None:
        return None
    as_it_is = value.dtype is source.dtype and sizes(value) == (width,)
    if as_it_is and value.is_initializer() and not value.is_graph_input():
        return value
    array = constant_channels(value, width)
    if array is None or source.dtype is None:
        return None
    exact = _holds(source.dtype, ir.DataType.from_numpy(array.dtype))
    return array.astype(source.dtype.numpy()).reshape(width) if exact else None


def _normalised(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """The numbers X and the epsilon of X / sqrt(mean(X^2) + epsilon)."""
    node = above_casts(value)
    if node is None or kind(node) not in ("Mul", "Div"):
        return None
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        numbers, factor = node.inputs[index], node.inputs[1 - index]
        found = _mean_square(_below_root(factor, inverse=node.op_type == "Mul"))
        if numbers is not None and found is not None:
            squared, epsilon = found
            if _widened(squared)[-1] is _widened(numbers)[-1]:
                return numbers, epsilon
    return None


def _below_root(value: ir.Value | None, *, inverse: bool) -> ir.Value | None:
    """What a value is the root of, or one over the root of."""
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
    """The numbers X and the epsilon of mean(X^2) + epsilon."""
    node = above_casts(value)
    if node is None or kind(node) != "Add":
        return None
    for index in (0, 1):
        epsilon, mean = scalar(node.inputs[index]), above_casts(node.inputs[1 - index])
        if epsilon is not None and epsilon >= 0 and mean is not None and _is_last_mean(mean):
            numbers = _square(above_casts(mean.inputs[0]))
            return None if numbers is None else (numbers, epsilon)
    return None


def _is_last_mean(node: ir.Node) -> bool:
    """Whether a node is the mean along the last axis, which it keeps."""
    if kind(node) != "ReduceMean" or attribute_int(node, "keepdims", 1) != 1:
        return False
    given = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = node.attributes.get_ints("axes", ()) or given
    size = rank(node.outputs[0])
    return axes is not None and size is not None and tuple(axes) in ((-1,), (size - 1,))


def _square(node: ir.Node | None) -> ir.Value | None:
    """What a node squares."""
    if node is None or kind(node) not in ("Pow", "Mul"):
        return None
    base, other = node.inputs
    if base is None or other is None:
        return None
    if node.op_type == "Pow":
        return base if scalar(other) == 2 else None
    return base if _widened(base)[-1] is _widened(other)[-1] else None


def _widened(value: ir.Value) -> list[ir.Value]:
    """A value, and above it the same numbers in types that hold no more."""
    values = [value]
    while True:
        node = values[-1].producer()
        if node is None or kind(node) not in ("Cast", "Identity"):
            return values
        source = node.inputs[0]
        if source is None or not _holds(values[-1].dtype, source.dtype):
            return values
        values.append(source)


def _holds(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Whether every number of one float type is one of the other."""
    if wide is None or narrow is None or not narrow.is_floating_point():
        return False
    return wide is narrow or (wide in _WIDE and narrow.bitwidth < wide.bitwidth)


_WIDE: Final = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
