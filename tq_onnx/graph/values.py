"""Values of a graph: their dimensions, their names, and which nodes leave their numbers alone."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Element types that the operators take."""

_WIDE: Final = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def static_dim(value: ir.Value, axis: int) -> int | None:
    """Return a dimension of a value if it is known as a number."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def rank(value: ir.Value) -> int | None:
    """Return the number of dimensions, if known."""
    return None if value.shape is None else len(value.shape)


def label(node: ir.Node) -> str:
    """Return a node's name, or its output's name where exporters leave nodes nameless."""
    return node.name or node.outputs[0].name or node.op_type


def passes_through(node: ir.Node) -> bool:
    """Return True if a node's output is its first input."""
    return node.domain == "" and (
        node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
    )


def keeps_numbers(node: ir.Node) -> bool:
    """Return True if a node's output is its first input, except for the precision."""
    if (node.domain, node.op_type) == ("", "Cast"):
        # Not a type of 8 bits or less: that is quantisation.
        return node.attributes.get_int("to", 0) in (*FLOATS, ir.DataType.DOUBLE)
    return passes_through(node)


def substitute(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of a value read another one; an output of the graph keeps its name."""
    new.type = new.type or old.type
    if old.is_graph_output():
        old.name, new.name = f"{old.name}/replaced", old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def above_casts(value: ir.Value | None) -> ir.Node | None:
    """Return what makes a value, but for nodes that change its precision at most."""
    node = None if value is None else value.producer()
    while node is not None and keeps_numbers(node):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node


def widened(value: ir.Value) -> list[ir.Value]:
    """Return a value, and above it the same numbers in types that hold no more."""
    values = [value]
    while True:
        node = values[-1].producer()
        if node is None or node.domain != "" or node.op_type not in ("Cast", "Identity"):
            return values
        source = node.inputs[0]
        if source is None or not holds(values[-1].dtype, source.dtype):
            return values
        values.append(source)


def holds(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Return True if every number of one float type is one of the other."""
    if wide is None or narrow is None or not narrow.is_floating_point():
        return False
    return wide is narrow or (wide in _WIDE and narrow.bitwidth < wide.bitwidth)
