"""Follows a decomposed cache forward, from the graph output to the matrix product that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.dialects.constants import integers, scalar
from tq_onnx.graph.dialects.site import (
    PRESENT,
    Dims,
    GraphView,
    NoMatch,
    passes_through,
    rank,
    static_dim,
)

_MAX_STEPS: Final = 24

_RESHAPES: Final[dict[tuple[Dims, int], Dims]] = {
    (("B", "N", "G", "S", "D"), 4): ("B", "H", "S", "D"),
    (("B", "N", "G", "S", "D"), 3): ("BH", "S", "D"),
    (("B", "N", "S", "D"), 5): ("B", "N", "1", "S", "D"),
    (("B", "N", "S", "D"), 3): ("BN", "S", "D"),
    (("B", "H", "S", "D"), 3): ("BH", "S", "D"),
    (("BH", "D", "S"), 4): ("B", "H", "D", "S"),
    (("BN", "D", "S"), 4): ("B", "N", "D", "S"),
    (("BH", "S", "D"), 4): ("B", "H", "S", "D"),
    (("BN", "S", "D"), 4): ("B", "N", "S", "D"),
}
"""What a Reshape to a given rank makes of a cache: the only sensible reading of each."""


@dataclass(frozen=True, eq=False)
class Route:
    """The way of a cache to its matrix product.

    Attributes:
        views: all values on the way and their dimensions.
        factor: product of the constants that it is multiplied by.
        matmul: the matrix product, whose second operand the cache is.
        dims: dimensions of that operand.
    """

    views: Mapping[ir.Value, Dims]
    factor: float
    matmul: ir.Node
    dims: Dims


def follow(state: ir.Value, view: GraphView) -> Route:
    """Follows a cache ``[B, N, S, D]`` to the one MatMul that reads it.

    Raises:
        NoMatch: it is read twice, not at all, or changed on the way.
    """
    value, dims, factor = state, PRESENT, 1.0
    views = {state: dims}
    for _ in range(_MAX_STEPS):
        node, index = _reader(value, view)
        if node.op_type == "MatMul" and node.domain == "":
            if index != 1:
                raise NoMatch("its cache is the first operand of a matrix product", node)
            return Route(views, factor, node, dims)
        if node.op_type in ("Mul", "Div") and node.domain == "":
            number = scalar(node.inputs[1 - index])
            if not number or (node.op_type == "Div" and index != 0):
                raise NoMatch("its cache is multiplied by something that is not constant", node)
            factor *= number if node.op_type == "Mul" else 1 / number
        elif index == 0:
            dims = _through(node, dims)
        else:
            raise NoMatch(f"its cache goes into {node.op_type}, not into a matrix product", node)
        value = node.outputs[0]
        views[value] = dims
    raise NoMatch("its cache does not reach a matrix product", value.producer())


def _reader(value: ir.Value, view: GraphView) -> tuple[ir.Node, int]:
    readers = [(node, index) for node, index in view.consumers(value) if node.op_type != "Shape"]
    if not readers:
        raise NoMatch("its cache is returned, but no attention reads it", value.producer())
    if len(readers) > 1:
        names = ", ".join(node.op_type for node, _ in readers)
        raise NoMatch(f"its cache is read more than once, by {names}", readers[0][0])
    return readers[0]


def _through(node: ir.Node, dims: Dims) -> Dims:
    """Dimensions of a view of a view."""
    if passes_through(node):
        return dims
    if node.domain == "":
        if node.op_type == "Cast":
            return dims
        if node.op_type == "Unsqueeze" and dims == PRESENT and _axes(node) == (2,):
            return ("B", "N", "1", "S", "D")
        if node.op_type == "Expand" and dims == ("B", "N", "1", "S", "D"):
            return ("B", "N", "G", "S", "D")
        if node.op_type == "Reshape":
            return _reshaped(node, dims)
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm", ())
            if sorted(perm) == list(range(len(dims))):
                return tuple(dims[axis] for axis in perm)
    raise NoMatch(
        f"its cache with the layout {', '.join(dims)} goes into {node.op_type}, "
        "which is not a known way to repeat heads",
        node,
    )


def _axes(node: ir.Node) -> tuple[int, ...] | None:
    axes = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else tuple(axis + 5 if axis < 0 else axis for axis in axes)


def _reshaped(node: ir.Node, dims: Dims) -> Dims:
    output = node.outputs[0]
    size = rank(output)
    if size is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        size = static_dim(node.inputs[1], 0)
    result = _RESHAPES.get((dims, size or 0))
    if result is None:
        raise NoMatch(f"its cache with the layout {', '.join(dims)} is reshaped", node)
    source = node.inputs[0]
    assert source is not None
    for letter in ("N", "H", "D", "1"):
        if letter not in result:
            continue
        found = static_dim(output, result.index(letter))
        expected = static_dim(source, dims.index(letter)) if letter in dims else None
        expected = 1 if letter == "1" else expected
        if found is not None and expected is not None and found != expected:
            raise NoMatch(
                f"its cache is reshaped from {source.shape} to {output.shape}, "
                f"which is not {', '.join(result)}",
                node,
            )
    return result
