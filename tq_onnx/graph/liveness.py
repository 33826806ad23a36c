"""Find the nodes that matter, backwards from the wanted values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def live_nodes(values: Iterable[ir.Value | None], cut: Collection[ir.Value] = ()) -> set[ir.Node]:
    """Return the nodes that values depend on, nodes inside subgraphs included.

    Args:
        cut: values that are given, so that nothing is needed to compute them.
    """
    live: set[ir.Node] = set()
    pending = [value for value in values if value is not None and value not in cut]
    while pending:
        node = pending.pop().producer()
        if node is None or node in live:
            continue
        live.add(node)
        for inner in nested_nodes(node):
            live.add(inner)
            pending.extend(v for v in inner.inputs if v is not None and v not in cut)
        for graph in _graphs(node):
            pending.extend(value for value in graph.outputs if value not in cut)
        pending.extend(value for value in node.inputs if value is not None and value not in cut)
    return live


def remove_dead(model: ir.Model) -> None:
    """Remove nodes that no output needs, those that only dead subgraphs read among them."""
    live = live_nodes(model.graph.outputs)
    for node in model.graph:
        for inner in () if node in live else nested_nodes(node):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
    RemoveUnusedNodesPass()(model)


def data_ancestors(values: Iterable[ir.Value]) -> set[ir.Value]:
    """Return all values whose contents flow into the given ones; a Shape node passes nothing on."""
    seen: set[ir.Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None or node.op_type in ("Shape", "Size"):
            continue
        pending.extend(item for item in node.inputs if item is not None)
        for inner in nested_nodes(node):
            pending.extend(item for item in inner.inputs if item is not None)
    return seen


def read_too_early(graph: ir.Graph) -> tuple[ir.Node, ir.Value] | None:
    """Return the first node that reads what is made after it, or by itself, and what it reads.

    Where there is none, every way backwards through the graph ends.
    """
    earlier: set[ir.Node] = set()
    for node in graph:
        for item in (node, *nested_nodes(node)):
            for value in item.inputs:
                maker = None if value is None else value.producer()
                if value is None or maker is None or maker.graph is not graph:
                    continue
                if maker not in earlier:
                    return node, value
        earlier.add(node)
    return None


def nested_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield all nodes inside the subgraphs of a node."""
    for graph in _graphs(node):
        yield from graph.all_nodes()


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()
