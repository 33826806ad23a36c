"""Follow a cache forward, from the node that makes it to the one that computes with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import integers, scalar
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import FUSED, PRODUCTS, kind
from tq_onnx.graph.values import keeps_numbers, rank, static_dim
from tq_onnx.recognise.caches import Dims, Route
from tq_onnx.recognise.site import GraphView

_MAX_STEPS: Final = 24
_MAX_ROUTES: Final = 256

_RESHAPES: Final[dict[tuple[Dims, int], Dims]] = {
    (("B", "N", "G", "S", "D"), 4): ("B", "H", "S", "D"),
    (("B", "N", "G", "S", "D"), 3): ("BH", "S", "D"),
    (("B", "N", "S", "D"), 5): ("B", "N", "1", "S", "D"),
    (("B", "N", "S", "D"), 3): ("BN", "S", "D"),
    (("B", "H", "S", "D"), 3): ("BH", "S", "D"),
    (("B", "N", "D", "S"), 3): ("BN", "D", "S"),
    (("B", "H", "D", "S"), 3): ("BH", "D", "S"),
    (("BH", "D", "S"), 4): ("B", "H", "D", "S"),
    (("BN", "D", "S"), 4): ("B", "N", "D", "S"),
    (("BH", "S", "D"), 4): ("B", "H", "S", "D"),
    (("BN", "S", "D"), 4): ("B", "N", "S", "D"),
    (("B", "S", "N", "G", "D"), 4): ("B", "S", "H", "D"),
    (("B", "S", "N", "G", "D"), 3): ("B", "S", "HD"),
    (("B", "S", "N", "D"), 5): ("B", "S", "N", "1", "D"),
    (("B", "S", "N", "D"), 3): ("B", "S", "ND"),
    (("B", "S", "H", "D"), 3): ("B", "S", "HD"),
    (("B", "S", "ND"), 4): ("B", "S", "N", "D"),
    (("B", "S", "HD"), 4): ("B", "S", "H", "D"),
}
"""Meaning of a Reshape of a cache to a given rank: the only sensible one of each."""

_TELLING: Final = frozenset({"1", "H", "N"})
"""Dimensions that a Reshape makes and that tell how, by their size: others are symbolic, or -1."""

_REPEATABLE: Final[dict[Dims, Dims]] = {
    ("B", "N", "S", "D"): ("B", "N", "1", "S", "D"),
    ("B", "S", "N", "D"): ("B", "S", "N", "1", "D"),
}
"""Where a dimension has to be put in for heads to be repeated one by one."""


def follow(
    state: ir.Value, dims: Dims, view: GraphView, skip: Collection[ir.Node] = ()
) -> list[Route]:
    """Follow a cache to the matrix products or fused operators that read it.

    There is one, or several in the order of the graph where layers share the cache.
    """
    routes: list[Route] = []
    _follow(state, {state: dims}, 1.0, view, skip=skip, routes=routes)
    return routes


def _follow(
    value: ir.Value,
    views: Mapping[ir.Value, Dims],
    factor: float,
    view: GraphView,
    *,
    skip: Collection[ir.Node],
    routes: list[Route],
) -> None:
    if len(views) > _MAX_STEPS or len(routes) > _MAX_ROUTES:
        raise NoMatch("the cache does not reach a matrix product", value.producer())
    for node, index in _readers(value, view, skip):
        if kind(node) in PRODUCTS or kind(node) in FUSED:
            routes.append(Route(views, factor, node, index, views[value]))
            continue
        dims, scaled = views[value], factor
        if kind(node) in ("Mul", "Div"):
            number = scalar(node.inputs[1 - index])
            if not number or (node.op_type == "Div" and index != 0):
                raise NoMatch("the cache is multiplied by something that is not constant", node)
            scaled *= number if node.op_type == "Mul" else 1 / number
        elif index == 0:
            dims = _through(node, dims)
        else:
            raise NoMatch(f"the cache goes into {node.op_type}, not into a matrix product", node)
        output = node.outputs[0]
        _follow(output, {**views, output: dims}, scaled, view, skip=skip, routes=routes)


def refuse_nested(node: ir.Node, view: GraphView) -> None:
    """Refuse attention inside control flow, which may compute it any number of times, or never."""
    if node.graph is not view.graph:
        raise NoMatch(
            f"{node.op_type} computes with a cache inside a subgraph (of If, Loop or Scan): "
            "export the model without control flow around attention",
            node,
        )


def _readers(
    value: ir.Value, view: GraphView, skip: Collection[ir.Node]
) -> list[tuple[ir.Node, int]]:
    readers = [
        (node, index)
        for node, index in view.consumers(value)
        if node.op_type != "Shape" and node not in skip
    ]
    for node, _ in readers:
        refuse_nested(node, view)
    if not readers:
        raise NoMatch("the cache is returned, but no attention reads it", value.producer())
    kinds = [node.op_type for node, _ in readers]
    if len(set(kinds)) > 1:
        names = ", ".join(kinds)
        raise NoMatch(f"the cache is read more than once, by {names}", readers[0][0])
    return readers


def _through(node: ir.Node, dims: Dims) -> Dims:
    """Return the dimensions of a view of a view."""
    if keeps_numbers(node):
        return dims
    what = kind(node)
    if what == "Unsqueeze" and dims in _REPEATABLE:
        wider = _REPEATABLE[dims]
        if _axes(node, len(wider)) == (wider.index("1"),):
            return wider
    elif what == "Squeeze" and "1" in dims and _axes(node, len(dims)) == (dims.index("1"),):
        return tuple(dim for dim in dims if dim != "1")
    elif (what == "Expand" and "1" in dims) or (what == "Tile" and _repeats(node, dims)):
        return tuple("G" if dim == "1" else dim for dim in dims)
    elif what == "Reshape":
        return _reshaped(node, dims)
    elif what == "Transpose":
        perm = node.attributes.get_ints("perm", ())
        if sorted(perm) == list(range(len(dims))):
            return tuple(dims[axis] for axis in perm)
    raise NoMatch(
        f"the cache with the layout {', '.join(dims)} goes into {node.op_type}, "
        "which is not a known way to repeat heads",
        node,
    )


def _axes(node: ir.Node, size: int) -> tuple[int, ...] | None:
    axes = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else tuple(axis + size if axis < 0 else axis for axis in axes)


def _repeats(node: ir.Node, dims: Dims) -> bool:
    """Return True if a Tile repeats nothing but the heads."""
    counts = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return (
        counts is not None
        and len(counts) == len(dims)
        and all(count == 1 or dim == "1" for count, dim in zip(counts, dims, strict=True))
    )


def _reshaped(node: ir.Node, dims: Dims) -> Dims:
    output = node.outputs[0]
    size = rank(output)
    if size is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        size = static_dim(node.inputs[1], 0)
    result = _RESHAPES.get((dims, size or 0))
    if result is None:
        raise NoMatch(f"the cache with the layout {', '.join(dims)} is reshaped", node)
    source = node.inputs[0]
    assert source is not None
    expected = _sizes(source, dims)
    for axis, letter in enumerate(result):
        size = static_dim(output, axis)
        if size is None and dims[0] == "B" and letter in _TELLING - {*dims}:
            raise NoMatch(f"the graph does not say how the cache {source.shape} is reshaped", node)
        if size is not None and letter in expected and size != expected[letter]:
            raise NoMatch(
                f"the cache is reshaped from {source.shape} to {output.shape}, "
                f"which is not {', '.join(result)}",
                node,
            )
    merged = dims[0] == "B" != result[0]
    if merged and _first(source) == _first(output) and expected.get(dims[1]) != 1:
        # The first dimension is the batch still: others have been merged than these two.
        raise NoMatch(f"the cache with the layout {', '.join(dims)} keeps the batch", node)
    return result


def _sizes(source: ir.Value, dims: Dims) -> dict[str, int]:
    """Return known sizes of the dimensions, and of those that a Reshape may make of them."""
    sizes = {"1": 1}
    for axis, letter in enumerate(dims):
        size = static_dim(source, axis)
        if size is not None:
            sizes[letter] = size
    for merged, left, right in (("H", "N", "G"), ("HD", "H", "D"), ("ND", "N", "D")):
        if left in sizes and right in sizes:
            sizes.setdefault(merged, sizes[left] * sizes[right])
    return sizes


def _first(value: ir.Value) -> int | str | None:
    """Return the first dimension; a number of its own where it is not known."""
    if value.shape is None:
        return None
    dim = value.shape[0]
    return dim if isinstance(dim, int) else dim.value or f"{value.name} has any"
