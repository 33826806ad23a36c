"""Lower nodes that only move numbers: transpositions, shapes, parts of packed projections.

- Transposed weights become constants. A Split, or Slices along the last axis, of a projection by a
  constant weight becomes a projection by a part of the weight
  (``tq_onnx.ascend.lowering.projections``).
- A Reshape to a computed shape gets a constant one: 0 where a size stays, at most one -1.
- Of Reshapes in a row one is left, or none, also where a norm stands between them; likewise of two
  Transposes, and Casts to the same type go.
- Transposes of tokens and heads, [0, 2, 1, 3], become ``Transpose``.

Sizes are those that follow from the inputs (``tq_onnx.graph.sizes.follow``). A Reshape of
which more than one size is not known to be one of its operand's is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.ascend.lowering.projections import bake_transposes, divide_projections
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import integers
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import Sizes, sizes
from tq_onnx.graph.sizes import follow
from tq_onnx.graph.values import label, substitute
from tq_onnx.ops.operators import RmsNormalization, Transpose

_TURN: Final = (0, 2, 1, 3)


def lower_layout(model: ir.Model, build: Builder) -> int:
    """Replace what a decoder does to layouts.

    Args:
        model: a converted model, its arithmetic replaced already; changed in place, what is left
            without a reader stays.

    Returns:
        how many nodes were replaced, or found to do nothing.
    """
    graph = model.graph
    count = bake_transposes(graph, build) + divide_projections(graph, build)
    follow(graph)
    steps: tuple[Callable[[ir.Node, Builder], bool], ...] = (_cast, _reshape, _transpose)
    for node in list(graph):
        # A node that has lost its readers would only be replaced for nothing.
        if node.domain == "" and any(map(_is_read, node.outputs)):
            count += any(step(node, build) for step in steps)
    for node in list(graph):
        count += _own_transpose(node, build)
    return count


def _cast(node: ir.Node, build: Builder) -> bool:
    """Drop a Cast to the type that its operand has."""
    del build
    source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    if kind(node) != "Cast" or source is None or source.dtype is not output.dtype:
        return False
    return source.dtype is not None and _bypass(output, source)


def _reshape(node: ir.Node, build: Builder) -> bool:
    """Give a Reshape a constant shape, and the operand of the Reshapes before it."""
    source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    target = sizes(output)
    if kind(node) != "Reshape" or source is None or target is None:
        return False
    if output.dtype not in ELEMENTS:
        return False
    origin = _origin(source, target)
    if _is_complete(origin, target):
        return _bypass(output, origin)
    with build.before(node, label(node)):
        reshaped = _before_norm(origin, output, target, build)
        constant = origin is source and integers(node.inputs[1]) is not None
        if reshaped is None and not constant:
            reshaped = _reshaped(origin, output, target, build)
    if reshaped is not None:
        substitute(output, reshaped)
    return reshaped is not None


def _origin(value: ir.Value, target: Sizes) -> ir.Value:
    """Return the value before Reshapes that are not needed."""
    while not _is_complete(value, target):
        maker = value.producer()
        above = maker.inputs[0] if maker is not None and kind(maker) == "Reshape" else None
        if above is None or _constant_shape(sizes(above), target) is None:
            break
        value = above
    return value


def _is_complete(value: ir.Value, target: Sizes) -> bool:
    """Return True if a value has the sizes that are wanted, for certain."""
    return None not in target and sizes(value) == target


def _reshaped(origin: ir.Value, output: ir.Value, target: Sizes, build: Builder) -> ir.Value | None:
    if _is_complete(origin, target):
        return origin
    dims = _constant_shape(sizes(origin), target)
    if dims is None:
        return None
    shape = build.integers(*dims)
    return build.op("Reshape", [origin, shape], "Reshape", dtype=output.dtype, shape=target)


def _before_norm(
    normalised: ir.Value, output: ir.Value, target: Sizes, build: Builder
) -> ir.Value | None:
    """Return the same of what a norm has been given, where that makes one Reshape of two.

    Exporters give heads to a norm of heads in one row with tokens, and take them apart after it.
    """
    norm = normalised.producer()
    if norm is None or not RmsNormalization.is_node(norm):
        return None
    norm_input, width = RmsNormalization.X.of(norm), sizes(normalised)
    if norm_input is None or not width or not target or width[-1] != target[-1] or not width[-1]:
        return None
    origin = _origin(norm_input, target)
    if origin is norm_input or len(normalised.uses()) != 1 or normalised.is_graph_output():
        return None
    heads = _reshaped(origin, output, target, build)
    if heads is None:
        return None
    return build.operator(
        RmsNormalization,
        {RmsNormalization.X: heads, RmsNormalization.scale: RmsNormalization.scale.of(norm)},
        dtype=output.dtype,
        shape=target,
        epsilon=norm.attributes["epsilon"].as_float(),
    )


def _constant_shape(source: Sizes | None, target: Sizes | None) -> tuple[int, ...] | None:
    """Return the constant shape that makes one of the other; None if there is none for certain."""
    if source is None or target is None:
        return None
    dims = []
    for axis, size in enumerate(target):
        if isinstance(size, int):
            dims.append(size)
        elif size is not None and axis < len(source) and source[axis] == size:
            dims.append(0)
        else:
            dims.append(-1)
    # A size of 0 that is meant would be read as one that stays.
    if dims.count(-1) > 1 or any(size == 0 for size in target):
        return None
    return tuple(dims)


def _transpose(node: ir.Node, build: Builder) -> bool:
    """Drop two Transposes that undo each other."""
    del build
    source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    maker = None if source is None else source.producer()
    if kind(node) != "Transpose" or maker is None or kind(maker) != "Transpose":
        return False
    origin = maker.inputs[0]
    if origin is None or not _turns(node) or not _turns(maker):
        return False
    return _bypass(output, origin)


def _own_transpose(node: ir.Node, build: Builder) -> bool:
    """Replace a Transpose of tokens and heads by the TurboQuant operator."""
    output = node.outputs[0] if node.outputs else None
    if output is None or kind(node) != "Transpose" or not _turns(node):
        return False
    if output.dtype not in ELEMENTS or not _is_read(output):
        return False
    with build.before(node, label(node)):
        transposed = build.operator(
            Transpose,
            {Transpose.X: node.inputs[0]},
            dtype=output.dtype,
            shape=sizes(output),
            perm=_TURN,
        )
    substitute(output, transposed)
    return True


def _is_read(value: ir.Value) -> bool:
    return value.is_graph_output() or bool(value.uses())


def _turns(node: ir.Node) -> bool:
    return tuple(node.attributes.get_ints("perm", ())) == _TURN


def _bypass(output: ir.Value, source: ir.Value) -> bool:
    """Let readers of a value read what it is the same as; outputs keep their node."""
    if output.is_graph_output():
        return False
    output.replace_all_uses_with(source)
    return True
