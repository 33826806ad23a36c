"""Find the inputs that results of nodes depend on, if attention reads caches of codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from tq_onnx.graph.liveness import nested_nodes
from tq_onnx.ops.operators import Attention, Encode


def read_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what the result of a node depends on, once our operators are the paged ones."""
    if Encode.is_node(node):
        values: Iterable[ir.Value | None] = [Encode.vectors.of(node)]
    elif Attention.is_node(node):
        slots = (Attention.query, Attention.key_cache, Attention.value_cache)
        values = [slot.of(node) for slot in slots]
    else:
        values = [*node.inputs, *(v for inner in nested_nodes(node) for v in inner.inputs)]
    yield from (value for value in values if value is not None)


def dependents(
    graph: ir.Graph, values: Iterable[ir.Value], *, by_size: bool = True
) -> set[ir.Value]:
    """Return values and what depends on them.

    Args:
        graph: sorted, as every loaded graph is.
        by_size: True to count what depends only on their sizes.
    """
    varying = set(values)
    for node in graph:
        counts = by_size or node.op_type not in ("Shape", "Size")
        if counts and not varying.isdisjoint(read_values(node)):
            varying.update(node.outputs)
    return varying
