"""Follows the channels of a norm forwards to all that reads them
(``tq_onnx.conversion.channels``)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir

from tq_onnx.conversion.channels import STEPS, Channels, Ids, Way
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank
from tq_onnx.ops.domain import DOMAIN

_HALVES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(eq=False)
class Reached:
    """Where channels have come.

    Attributes:
        ends: the inputs of TurboQuant nodes that they reach, as node, input and channels.
        halves: whether some value on the way is of half precision.
    """

    ends: list[tuple[ir.Node, int, Channels]] = field(default_factory=list)
    halves: bool = False


def follow_channels(start: ir.Value, ids: Ids, way: Way) -> Reached:
    """Follows the channels that lie along the last axis of a value to all that reads them.

    Args:
        start: the value.
        ids: its channels.
        way: the graph; its ties grow.

    Raises:
        NoMatch: some reader does not keep channels apart, or is no node of the graph itself.
    """
    size = rank(start)
    if size is None:
        raise NoMatch("has an unknown rank", start.producer())
    reached = Reached()
    held: dict[ir.Value, Channels] = {}
    pending: list[int] = []
    nodes: dict[int, ir.Node] = {}

    def put(value: ir.Value, channels: Channels) -> None:
        if value.is_graph_output():
            raise NoMatch("is an output of the model", value.producer())
        held[value] = channels
        reached.halves = reached.halves or value.dtype in _HALVES
        for use in value.uses():
            node = use.node
            if node.op_type in ("Shape", "Size") and node.domain == "":
                continue
            if node.domain == DOMAIN:
                reached.ends.append((node, use.idx, channels))
            elif node.graph is not way.graph:
                raise NoMatch("is read inside of a subgraph", node)
            elif node in way.order and way.order[node] not in nodes:
                nodes[way.order[node]] = node
                heapq.heappush(pending, way.order[node])

    put(start, Channels(size - 1, ids))
    while pending:
        node = nodes[heapq.heappop(pending)]
        step = STEPS.get(kind(node))
        if step is None:
            raise NoMatch(f"goes through {node.op_type}", node)
        inputs = [None if value is None else held.get(value) for value in node.inputs]
        for output, channels in zip(node.outputs, step(node, inputs, way), strict=False):
            put(output, channels)
    return reached
