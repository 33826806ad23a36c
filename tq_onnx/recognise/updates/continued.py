"""The graph input that an update of a cache continues."""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import FLOATS, rank
from tq_onnx.recognise.caches import Anchor, Dims, check_precision, past_input


def taken(anchor: Anchor, past: ir.Value, dims: Dims) -> tuple[ir.Value, dict[ir.Value, Dims]]:
    """Return the graph input that an update continues, and the values on the way to the update."""
    source = past_input(past)
    if source is None:
        raise NoMatch(f"cache {anchor.present.name} does not continue a graph input", anchor.node)
    graph_input, passed = source
    check_precision(anchor, passed)
    if rank(graph_input) != len(dims):
        raise NoMatch(f"cache {graph_input.name} is not of rank {len(dims)}", anchor.node)
    if graph_input.dtype not in FLOATS:
        raise NoMatch(f"cache {graph_input.name} is quantised already", anchor.node)
    return graph_input, dict.fromkeys(passed, dims)
