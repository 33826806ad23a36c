"""Name the sizes that a rewrite left open, so that viewers show names and not question marks.

The nodes of a conversion know heads and head size; batch and tokens follow from what stands before
them. Names are those of the graph's inputs. A name that shape inference made up
(``unk__7``) is not passed on: post-processors leave such names in files, where one name may stand
for two sizes, and ONNX Runtime puts values of one name into one buffer.
"""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.sizes import add, walk


def name_sizes(model: ir.Model) -> None:
    """Fill in the unknown sizes of values between the nodes, in place.

    What the model tells is kept, and so are the outputs of the graph, which are a promise to
    callers.

    Args:
        model: its nodes are in topological order.
    """
    graph = model.graph
    names = {size for value in graph.inputs for size in sizes(value) or ()}
    for _, value, inferred in walk(graph):
        if inferred is None or value.dtype is None or value.is_graph_output():
            continue
        known = tuple(size if isinstance(size, int) or size in names else None for size in inferred)
        add(value, known)
