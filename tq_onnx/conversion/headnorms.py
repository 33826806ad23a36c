"""Find the weights of the norms in front of queries and keys, in a converted model.

A converted model is where the search is the same for every dialect: queries are an input of
``TurboQuantDequantAttention``, and new keys one of the encoder whose cache it reads. From there
backwards through what is linear to the one multiplication of normalised numbers by a weight of D
elements: a norm (``tq_onnx.graph.rmsnorm``), or LayerNormalization without a bias. From there
forwards again, because scaling the weight must scale this layer's queries, or keys, and nothing
else; ``tq_onnx.conversion.channels`` tells what becomes of the channels in each node.

Weights are read only where their shape says that they have D elements.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.channels import STEPS, Channels, Ids, Ties, Way
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.rmsnorm import constant_channels, match_norms
from tq_onnx.graph.values import label, rank, static_dim
from tq_onnx.ops.domain import DOMAIN, MICROSOFT
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

Array = npt.NDArray[Any]

_HALVES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LINEAR: Final = frozenset(
    {
        *("Identity", "Cast", "Neg", "Mul", "Div", "Add", "Sub", "Unsqueeze", "Squeeze", "Concat"),
        *("Slice", "Split", "Reshape", "Transpose"),
        *("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding"),
    }
)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of every head.

    Attributes:
        node: what multiplies by the weight.
        index: the input of ``node`` that the weight is.
        weight: in its own element type and shape; D elements.
    """

    node: ir.Node
    index: int
    weight: Array

    @property
    def channels(self) -> npt.NDArray[np.float64]:
        """The weight, float64 ``[D]``."""
        return self.weight.astype(np.float64).reshape(-1)


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """The norms of a layer that may be scaled.

    Attributes:
        layer: index of the layer.
        query: the norm of its queries.
        key: the norm of its keys.
        groups: ``[D]``, the first of the channels that must have one scale with each, as RoPE
            pairs; in the order of the weights, which is that of the operators' queries and keys.
        halves: whether only powers of two leave every rounding as it was.
    """

    layer: int
    query: Norm
    key: Norm
    groups: Ids
    halves: bool


@dataclass(frozen=True)
class NoNorms:
    """A layer whose scores no scales of norm weights would keep.

    Attributes:
        layer: index of the layer.
        reason: why, as a clause.
    """

    layer: int
    reason: str


@dataclass(eq=False)
class _Reached:
    """A value that channels have reached.

    Attributes:
        ends: the inputs of TurboQuant nodes that they reach, as node, input and channels.
        halves: whether some value on the way is of half precision.
    """

    ends: list[tuple[ir.Node, int, Channels]] = field(default_factory=list)
    halves: bool = False


def find_norms(model: ir.Model, plan: Plan) -> tuple[LayerNorms | NoNorms, ...]:
    """Find the norms of all layers of a converted model, in the order of the plan.

    Args:
        model: after ``ConvertPass``, with any preset; it is not changed.
        plan: the plan that it was converted by.
    """
    graph = model.graph
    live = live_nodes(graph.outputs)
    order = {node: index for index, node in enumerate(graph) if node in live}
    norms: list[LayerNorms | NoNorms] = []
    for layer in converted_layers(model, plan):
        size = layer.plan.head_size
        try:
            norms.append(_layer(layer, Way(graph, order, Ties(2 * size), size)))
        except NoMatch as miss:
            norms.append(NoNorms(layer.plan.layer, miss.reason))
    return tuple(norms)


def _layer(layer: ConvertedLayer, way: Way) -> LayerNorms:
    plan = layer.plan
    if layer.sharing:
        raise NoMatch("other layers read the same keys", layer.attention.node)
    columns = np.arange(plan.head_size)
    norms, halves = [], plan.dtype != "FLOAT"
    for role, reader, slot, ids in (
        ("query", layer.attention.node, Attention.query, columns),
        ("key", layer.key.node, Encode.vectors, columns + plan.head_size),
    ):
        norm = _norm(role, slot.of(reader), plan.head_size)
        try:
            reached = _follow(norm.node.outputs[0], ids, way)
        except NoMatch as miss:
            where = "" if miss.node is None else f" (node {label(miss.node)})"
            raise NoMatch(f"the normalised {role} {miss.reason}{where}", miss.node) from miss
        ends = {(node, index) for node, index, _ in reached.ends}
        # With a window attention reads new keys itself, too; they meet the same queries.
        exact = {(layer.attention.node, Attention.new_keys.slot)} if role == "key" else set()
        if (reader, slot.slot) not in ends or ends - exact != {(reader, slot.slot)}:
            raise NoMatch(f"the normalised {role} is not read by the attention alone", norm.node)
        if any(
            channels.axis != 3 or not np.array_equal(channels.ids, ids)
            for _, _, channels in reached.ends
        ):
            raise NoMatch(f"the normalised {role} changes the order of the channels", norm.node)
        norms.append(norm)
        halves = halves or reached.halves or norm.weight.dtype not in (np.float32, np.float64)
    # Element j of a query meets element j of a key.
    way.ties.tie(columns, columns + plan.head_size)
    return LayerNorms(plan.layer, norms[0], norms[1], way.ties.groups(columns), halves)


def _norm(role: str, operand: ir.Value | None, head_size: int) -> Norm:
    """Return the one norm that an operand comes from."""
    norms: list[Norm] = []
    seen: set[ir.Node] = set()
    pending = [operand]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        norm = _as_norm(node, head_size)
        if norm is not None:
            norms.append(norm)
        elif kind(node) in _LINEAR:
            # Of the others only the first input is what the result is made of.
            several = node.op_type in ("Mul", "Div", "Add", "Sub", "Concat")
            pending += node.inputs if several else node.inputs[:1]
    if len(norms) != 1:
        number = "more than one norm stands" if norms else "no norm with a weight stands"
        raise NoMatch(f"{number} before the {role}")
    return norms[0]


def _as_norm(node: ir.Node, head_size: int) -> Norm | None:
    for norm in match_norms(node):
        if norm.summands or norm.bias is not None or not norm.is_of_last_axis:
            continue
        weight = constant_channels(norm.weight, head_size)
        if weight is not None:
            return Norm(node, norm.weight_index, weight)
    return None


def _follow(start: ir.Value, ids: Ids, way: Way) -> _Reached:
    """Follow the channels that lie along the last axis of a value to all that reads them.

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
    reached = _Reached()
    held: dict[ir.Value, Channels] = {}
    pending: list[int] = []
    nodes: dict[int, ir.Node] = {}

    def put(value: ir.Value, channels: Channels) -> None:
        if value.is_graph_output():
            raise NoMatch("is an output of the model", value.producer())
        # Shapes are what a file declares: steps rely on channels being in them.
        size, wide = rank(value), static_dim(value, channels.axis)
        if channels.axis < 0 or (size is not None and channels.axis >= size):
            raise NoMatch("has fewer axes than declared", value.producer())
        if wide not in (None, len(channels.ids)) or not len(channels.ids):
            raise NoMatch("has another size than declared", value.producer())
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
