"""Sinks of decomposed attention: a column beside the scores that no value belongs to (gpt-oss).

::

    column = Expand(sinks [1, H, 1, 1], [B, H, T, 1])
    joined = Concat(scores, column, axis=-1)               [B, H, T, S + 1]
    p      = Softmax(joined - ReduceMax(joined))           [B, H, T, S + 1]
    output = MatMul(Slice(p, 0, -1, axis=-1), values)      [B, H, T, D]

That there is one column only follows from the product: it has to leave as many columns as values.
Subtracting the largest score of a query changes no probability.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import FLOATS, keeps_numbers, rank, static_dim

_LAST: Final = (-1, 3)
_MAX_STEPS: Final = 8


def sinks_beside(node: ir.Node, index: int) -> ir.Value:
    """Return the sinks that a Concat puts beside the scores: ``[1, H, 1, 1]``."""
    joins = len(node.inputs) == 2 and index == 0 and attribute_int(node, "axis", 0) in _LAST
    value = node.inputs[1] if joins else None
    for _ in range(_MAX_STEPS):
        if value is None:
            break
        sizes = [static_dim(value, axis) for axis in range(rank(value) or 0)]
        if len(sizes) == 4 and (sizes[0], *sizes[2:]) == (1, 1, 1) and value.dtype in FLOATS:
            return value
        maker = value.producer()
        if maker is None or not (kind(maker) == "Expand" or keeps_numbers(maker)):
            break
        value = maker.inputs[0]
    raise NoMatch("the scores go through Concat, which does not add one sink for each head", node)


def shifted(readers: list[tuple[ir.Node, int]]) -> ir.Value | None:
    """Return the scores less the largest of each query; None if the readers do not compute that."""
    largest = [node for node, _ in readers if kind(node) == "ReduceMax"]
    less = [node for node, index in readers if kind(node) == "Sub" and index == 0]
    if len(readers) != 2 or len(largest) != 1 or len(less) != 1:
        return None
    of_each = largest[0].outputs[0]
    axes = largest[0].attributes.get_ints("axes", ()) or (
        integers(largest[0].inputs[1]) if len(largest[0].inputs) > 1 else None
    )
    alone = [use.node for use in of_each.uses()] == less and not of_each.is_graph_output()
    keeps = attribute_int(largest[0], "keepdims", 1) == 1 and tuple(axes or ()) in (
        (-1,),
        (3,),
    )
    return less[0].outputs[0] if alone and keeps and less[0].inputs[1] is of_each else None


def drops_the_last(node: ir.Node) -> bool:
    """Return True if a Slice leaves all columns of the probabilities but the last."""
    if kind(node) != "Slice" or len(node.inputs) < 4:
        return False
    starts, ends, axes, *steps = (integers(value) for value in node.inputs[1:])
    plain = starts == (0,) and ends == (-1,) and axes in ((-1,), (3,))
    return plain and steps in ([], [(1,)])
