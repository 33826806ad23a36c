"""Makes inner values of a graph its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx_ir as ir

_VIEWS: Final = frozenset({"Reshape", "Flatten", "Identity", "Squeeze", "Unsqueeze"})


def expose(graph: ir.Graph, wanted: Mapping[str, ir.TypeAndShape], *, views: bool) -> None:
    """Makes values graph outputs, unless they are.

    Args:
        graph: the graph, which is changed.
        wanted: their names, with their types; shapes are for those that have none.
        views: whether a view of another value may be an output, see ``_negated_twice``.
    """
    values = {
        value.name: value
        for node in graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    present = {value.name for value in graph.outputs}
    for name, told in wanted.items():
        if name in present:
            continue
        value = values[name]
        value.type = told.type
        if value.shape is None:
            value.shape = told.shape
        maker = value.producer()
        if not views and maker is not None and maker.op_type in _VIEWS and _is_float(value):
            value = _negated_twice(graph, value)
        graph.outputs.append(value)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _negated_twice(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """The same numbers under the same name, computed and not copied.

    A view that is an output of the graph cannot share its input's memory. onnxruntime-cann 1.24.4
    then copies that without waiting for the stream on which it is computed.
    """
    name, value.name = value.name, f"{value.name}/view"
    for step in ("once", "twice"):
        node = ir.node("Neg", [value], name=f"{name}/{step}")
        (made,) = node.outputs
        made.type, made.shape = value.type, value.shape
        made.name = name if step == "twice" else f"{name}/{step}"
        graph.append(node)
        value = made
    return value
