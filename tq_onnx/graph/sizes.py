"""Sizes that onnx's own shape inference does not tell: one walk over the graph, front to back.

onnx gives up all dimensions after an operator that it does not know (ONNX Runtime's optimizer makes
such ones), and after a Slice whose ends are computed, which is what rotary embeddings look like in
traced graphs. Here each operator that stands between a projection and its attention has a rule, and
short lists of integers (``Shape``, ``Gather``, ``Concat``, arithmetic) are followed through the
graph. A size is a number, a name that stands for one and the same number, or None.

``sizerules``, ``quantisedsizes`` and ``numberrules`` hold the rules, ``walk`` applies them.
``refine`` adds what a model does not tell; ``follow`` puts what follows in the place of what was
told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from tq_onnx.files.declarations import MAX_DIMENSION, is_holdable
from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.numberrules import NUMBERS
from tq_onnx.graph.quantisedsizes import QUANTISED_SHAPES, TYPED, TYPED_BY
from tq_onnx.graph.sizerules import COMPARISONS, SHAPES, Sizes, nothing, operand, sizes

_MAX_LIST: Final = 16
_RULES: Final = {**SHAPES, **QUANTISED_SHAPES}
_TYPED_BY: Final = {**dict.fromkeys(SHAPES, 0), "Split": 0, "Where": 1, "CastLike": 1} | {
    **dict.fromkeys(QUANTISED_SHAPES, 0),
    **TYPED_BY,
}
"""The input whose element type an operator's first output has."""
_MIXES: Final = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that broadcast sizes of several names to one that has none."""
_SKIPS: Final = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""They return the sum that they normalise, as their last output."""


def refine(graph: ir.Graph, untold: set[ir.Value]) -> None:
    """Tell more sizes and types.

    Args:
        graph: in topological order; its nodes' outputs get what is missing.
        untold: values about which the model itself says nothing: their sizes may be replaced by
            numbers. Of others only unknown dimensions are filled in.
    """
    for node, value, inferred in walk(graph):
        _tell_type(node, value)
        if inferred is not None and value.dtype is not None:
            add(value, inferred, replace=value in untold)
            _name_unknown(value, node)


def _name_unknown(output: ir.Value, node: ir.Node) -> None:
    """Name the sizes that rules cannot tell, as inference names what it cannot compute.

    By its name a size is known to be the same in what is made of this value, so that the rest of a
    Reshape can be divided by it.
    """
    shape = sizes(output)
    if shape is not None and None in shape and node.op_type in _MIXES:
        named = (
            f"{output.name}[{axis}]" if size is None else size for axis, size in enumerate(shape)
        )
        output.shape = ir.Shape(tuple(named))


def follow(graph: ir.Graph) -> None:
    """Tell every value the sizes that follow from those before it, by the names of the inputs.

    Shape inference gives a new name to whatever it cannot compute, and the nodes of a replaced part
    told more than their substitute's neighbours know. What follows takes the place of what was
    told, unless nothing does or the two contradict.
    """
    for _, value, inferred in walk(graph):
        if inferred is not None:
            _replace(value, inferred)


def walk(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, Sizes | None]]:
    """Yield nodes, outputs and the sizes that follow from what the values before are told now.

    The caller may set the sizes of an item before it asks for the next one.
    """
    known: dict[ir.Value, Sizes | None] = {}

    def numbers(value: ir.Value | None) -> Sizes | None:
        """Return a short list of integers; a scalar is a list of one."""
        if value is None:
            return None
        if value not in known:
            known[value] = integers(value)
        return known[value]

    for node in graph:
        if not node.outputs:
            continue
        if node.domain == "":
            elements = NUMBERS.get(node.op_type, nothing)(numbers, node)
            if elements is not None and 0 < len(elements) <= _MAX_LIST:
                known[node.outputs[0]] = elements
        if node.op_type == "Split":
            for value, part in zip(
                node.outputs, _parts(node, numbers(operand(node, 1))), strict=False
            ):
                yield node, value, part
        else:
            yield node, node.outputs[0], _RULES.get(node.op_type, nothing)(numbers, node)
            for value in node.outputs[1:]:
                further = _further(node, value)
                if further is not None:
                    yield node, value, further


def _further(node: ir.Node, output: ir.Value) -> Sizes | None:
    """Return the shape of an output that is not the first, and is of the type that rules tell."""
    if node.op_type == "DynamicQuantizeLinear":
        return ()
    if node.op_type == "TopK":
        return _RULES["TopK"](integers, node)
    summed = node.op_type in _SKIPS and output is node.outputs[-1] and len(node.outputs) == 4
    return sizes(operand(node, 0)) if summed else None


def _parts(node: ir.Node, lengths: Sizes | None) -> list[Sizes | None]:
    """Return the shapes of the outputs of a Split."""
    shape = sizes(operand(node, 0))
    if not shape:
        return [None] * len(node.outputs)
    axis, count = attribute_int(node, "axis", 0) % len(shape), len(node.outputs)
    size = shape[axis]
    is_even = operand(node, 1) is None and "split" not in node.attributes
    if is_even and isinstance(size, int) and size % count == 0:
        lengths = (size // count,) * count
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in lengths or (None,) * count]


def _tell_type(node: ir.Node, output: ir.Value) -> None:
    if output.dtype is not None:
        return
    dtype = None
    if node.op_type == "Cast":
        dtype = ir.DataType(attribute_int(node, "to", 0)) if "to" in node.attributes else None
    elif node.op_type in ("Shape", "Size") or (node.op_type == "TopK" and output.index()):
        dtype = ir.DataType.INT64
    elif node.op_type in COMPARISONS:
        dtype = ir.DataType.BOOL
    elif node.op_type in TYPED:
        dtype = TYPED[node.op_type][output.index() or 0]
    elif node.op_type in _TYPED_BY:
        source = operand(node, _TYPED_BY[node.op_type])
        dtype = None if source is None else source.dtype
    if dtype is not None:
        output.type = ir.TensorType(dtype)


def add(output: ir.Value, inferred: Sizes, *, replace: bool = False) -> None:
    """Fill in what is unknown; with ``replace`` numbers take the place of names, too.

    What no model may declare, and a damaged one makes inference find, stays unknown.
    """
    inferred = tuple(
        None if isinstance(size, int) and not 0 <= size <= MAX_DIMENSION else size
        for size in inferred
    )
    shape = sizes(output)
    merged = inferred
    if shape is not None:
        if not _agree(shape, inferred):
            return
        merged = tuple(
            new_size if size is None or (replace and isinstance(new_size, int)) else size
            for size, new_size in zip(shape, inferred, strict=True)
        )
    if merged != shape and is_holdable(size for size in merged if isinstance(size, int)):
        output.shape = ir.Shape(merged)


def _replace(output: ir.Value, inferred: Sizes) -> None:
    """Keep nothing of what was told but numbers, and what nothing is known of otherwise."""
    shape = sizes(output)
    if shape is None:
        output.shape = ir.Shape(inferred)
    elif _agree(shape, inferred):
        output.shape = ir.Shape(
            size if new_size is None or isinstance(size, int) else new_size
            for size, new_size in zip(shape, inferred, strict=True)
        )


def _agree(shape: Sizes, inferred: Sizes) -> bool:
    """Return True if two shapes have as many dimensions, and no two numbers that differ."""
    return len(shape) == len(inferred) and all(
        size == new_size
        for size, new_size in zip(shape, inferred, strict=True)
        if isinstance(size, int) and isinstance(new_size, int)
    )
