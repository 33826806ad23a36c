"""Finds the weights of the norms in front of queries and keys, in a converted model.

A converted model is where the search is the same for every dialect: queries are an input of
``TurboQuantDequantAttention`` and new keys one of the encoder whose cache it reads. From there
backwards through what is linear to the one multiplication of normalised numbers by a weight of D
elements: a node (SimplifiedLayerNormalization, RMSNormalization, LayerNormalization without a
bias), or spelled out. From there forwards again (``tq_onnx.conversion.channelflow``), because
scaling the weight must scale this layer's queries, or keys, and nothing else.

Weights are read only where their shape says that they have D elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.channelflow import follow_channels
from tq_onnx.conversion.channels import Ids, Ties, Way
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.graph.builder import MICROSOFT
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.rmsnorm import constant_channels, match_norms
from tq_onnx.graph.values import label
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

Array = npt.NDArray[Any]

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


def find_norms(model: ir.Model, plan: Plan) -> tuple[LayerNorms | NoNorms, ...]:
    """Finds the norms of all layers of a converted model, in the order of the plan.

    Args:
        model: after ``ConvertPass``, with any preset; it is not changed.
        plan: the plan that it was converted by.
    """
    graph = model.graph
    live = live_nodes(graph.outputs)
    order = {node: index for index, node in enumerate(graph) if node in live}
    found: list[LayerNorms | NoNorms] = []
    for layer in converted_layers(model, plan):
        size = layer.plan.head_size
        try:
            found.append(_layer(layer, Way(graph, order, Ties(2 * size), size)))
        except NoMatch as miss:
            found.append(NoNorms(layer.plan.layer, miss.reason))
    return tuple(found)


def _layer(layer: ConvertedLayer, way: Way) -> LayerNorms:
    plan = layer.plan
    own = np.arange(plan.head_size)
    norms, halves = [], plan.dtype != "FLOAT"
    for role, reader, slot, ids in (
        ("query", layer.attention.node, Attention.query, own),
        ("key", layer.key.node, Encode.vectors, own + plan.head_size),
    ):
        norm = _norm(role, slot.of(reader), plan.head_size)
        try:
            reached = follow_channels(norm.node.outputs[0], ids, way)
        except NoMatch as miss:
            where = "" if miss.node is None else f" (node {label(miss.node)})"
            raise NoMatch(f"the normalised {role} {miss.reason}{where}", miss.node) from miss
        if [(node, index) for node, index, _ in reached.ends] != [(reader, slot.slot)]:
            raise NoMatch(f"the normalised {role} is not read by the attention alone", norm.node)
        channels = reached.ends[0][2]
        if channels.axis != 3 or not np.array_equal(channels.ids, ids):
            raise NoMatch(f"the normalised {role} changes the order of the channels", norm.node)
        norms.append(norm)
        halves = halves or reached.halves or norm.weight.dtype not in (np.float32, np.float64)
    # Element j of a query meets element j of a key.
    way.ties.tie(own, own + plan.head_size)
    return LayerNorms(plan.layer, norms[0], norms[1], way.ties.groups(own), halves)


def _norm(role: str, operand: ir.Value | None, head_size: int) -> Norm:
    """The one norm that an operand comes from."""
    found: list[Norm] = []
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
            found.append(norm)
        elif kind(node) in _LINEAR:
            # Of the others only the first input is what the result is made of.
            several = node.op_type in ("Mul", "Div", "Add", "Sub", "Concat")
            pending += node.inputs if several else node.inputs[:1]
    if len(found) != 1:
        number = "more than one norm stands" if found else "no norm with a weight stands"
        raise NoMatch(f"{number} before the {role}")
    return found[0]


def _as_norm(node: ir.Node, head_size: int) -> Norm | None:
    for norm in match_norms(node):
        if norm.summands or norm.bias is not None or not norm.is_of_last_axis:
            continue
        weight = constant_channels(norm.weight, head_size)
        if weight is not None:
            return Norm(node, norm.weight_index, weight)
    return None
