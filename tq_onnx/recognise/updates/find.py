"""Recognise the update of a cache at the node that makes the cache.

==============  =====================================================  =========================
form            graph                                                  tokens before this call
==============  =====================================================  =========================
grown           ``Concat(past, rows, axis of the tokens)``             the size of ``past``
scattered       ``TensorScatter(past, rows, write_indices)``           ``write_indices``
written         ``ScatterND(past, start + [0 .. T - 1], rows)``        ``start``, one integer
==============  =====================================================  =========================
"""

from __future__ import annotations

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import static_dim
from tq_onnx.recognise.caches import Anchor, Update
from tq_onnx.recognise.site import GraphView
from tq_onnx.recognise.updates.continued import taken
from tq_onnx.recognise.updates.scatter import SCATTER_ND, written
from tq_onnx.recognise.updates.tensorscatter import TENSOR_SCATTER, scattered


def find_update(anchor: Anchor, view: GraphView) -> Update | None:
    """Read the update at the node of an anchor; None if it is not an update."""
    if kind(anchor.node) == SCATTER_ND:
        return written(anchor, view)
    if not view.takes_caches:
        return None
    if kind(anchor.node) == "Concat":
        return _grown(anchor)
    if kind(anchor.node) == TENSOR_SCATTER:
        return scattered(anchor)
    return None


def _grown(anchor: Anchor) -> Update:
    node, dims = anchor.node, anchor.dims
    axis = attribute_int(node, "axis", 0)
    grows = dims[axis] if len(node.inputs) == 2 and -len(dims) <= axis < len(dims) else ""
    if grows == "N":
        raise NoMatch(
            f"cache {anchor.present.name} grows along its second dimension, as in the layout "
            "[batch, tokens, heads, head size]: export with caches "
            "[batch, heads, tokens, head size]",
            node,
        )
    if grows not in ("S", "C"):
        raise NoMatch(
            f"the cache is made by a Concat of {len(node.inputs)} along axis {axis}", node
        )
    past, rows = node.inputs
    if past is None or rows is None:
        raise NoMatch("the cache is made by a Concat with a missing input", node)
    graph_input, views = taken(anchor, past, tuple("P" if dim == "S" else dim for dim in dims))
    tokens = static_dim(graph_input, dims.index("S"))
    if tokens is not None:
        raise NoMatch(
            f"cache {graph_input.name} was exported with a fixed length of {tokens} tokens", node
        )
    return Update(graph_input, rows, tuple("T" if dim == "S" else dim for dim in dims), views)
