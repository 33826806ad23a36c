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
from tq_onnx.graph.constants import attribute_int, integers, scalar
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import keeps_numbers, label, rank, static_dim
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

Array = npt.NDArray[Any]

_NORMS: Final = frozenset(
    {
        "SimplifiedLayerNormalization",
        f"{MICROSOFT}.SimplifiedLayerNormalization",
        "RMSNormalization",
        "LayerNormalization",
    }
)
_LINEAR: Final = frozenset(
    {
        *("Identity", "Cast", "Neg", "Mul", "Div", "Add", "Sub", "Unsqueeze", "Squeeze", "Concat"),
        *("Slice", "Split", "Reshape", "Transpose"),
        *("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding"),
    }
)
_MAX_STEPS: Final = 16


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
            raise NoMatch(f"its normalised {role} {miss.reason}{where}", miss.node) from miss
        if [(node, index) for node, index, _ in reached.ends] != [(reader, slot.slot)]:
            raise NoMatch(f"its normalised {role} is not read by its attention alone", norm.node)
        channels = reached.ends[0][2]
        if channels.axis != 3 or not np.array_equal(channels.ids, ids):
            raise NoMatch(f"its normalised {role} changes the order of its channels", norm.node)
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
        raise NoMatch(f"{number} before its {role}")
    return found[0]


def _as_norm(node: ir.Node, head_size: int) -> Norm | None:
    if kind(node) in _NORMS:
        last = attribute_int(node, "axis", -1) in (-1, (rank(node.outputs[0]) or 0) - 1)
        biased = any(value is not None for value in node.inputs[2:])
        weight = constant_channels(node.inputs[1], head_size) if last and not biased else None
        return None if weight is None else Norm(node, 1, weight)
    if kind(node) != "Mul":
        return None
    for index in (0, 1):
        weight = constant_channels(node.inputs[index], head_size)
        if weight is not None and _is_normalised(node.inputs[1 - index]):
            return Norm(node, index, weight)
    return None


def _is_normalised(value: ir.Value | None) -> bool:
    """Whether a value is numbers times, or over, what their mean square along the last axis is."""
    node = above_casts(value)
    if node is None or kind(node) not in ("Mul", "Div"):
        return False
    factors = node.inputs if node.op_type == "Mul" else node.inputs[1:]
    return any(_comes_from_mean(factor) for factor in factors)


def _comes_from_mean(value: ir.Value | None) -> bool:
    for _ in range(_MAX_STEPS):
        node = above_casts(value)
        if node is None or node.domain != "":
            return False
        if node.op_type == "ReduceMean":
            axes = node.attributes.get_ints("axes", ()) or (
                integers(node.inputs[1]) if len(node.inputs) > 1 else None
            )
            last = (rank(node.outputs[0]) or 0) - 1
            return axes is not None and tuple(axes) in ((-1,), (last,))
        if node.op_type in ("Sqrt", "Reciprocal"):
            value = node.inputs[0]
        elif node.op_type in ("Add", "Div", "Max", "Pow", "Clip"):
            value = next((item for item in node.inputs if scalar(item) is None), None)
        else:
            return False
    return False


def above_casts(value: ir.Value | None) -> ir.Node | None:
    """What makes a value, but for nodes that change its precision at most."""
    node = None if value is None else value.producer()
    while node is not None and keeps_numbers(node):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node


def constant_channels(value: ir.Value | None, head_size: int) -> Array | None:
    """The constant ``[D]`` or ``[1, ..., D]`` that a value always is; None if it is another one."""
    array = _constant(value, head_size, _MAX_STEPS)
    if array is None or array.shape != (1,) * (array.ndim - 1) + (head_size,):
        return None
    return array


def _constant(value: ir.Value | None, size: int, depth: int) -> Array | None:
    """A small constant, or what a model makes of one by itself, as 1 + weight or a Cast."""
    if value is None or depth == 0 or value.is_graph_input():
        return None
    node = value.producer()
    tensor = _tensor(value)
    if tensor is not None:
        floating = tensor.dtype.is_floating_point()
        return np.asarray(tensor.numpy()) if tensor.size == size and floating else None
    if node is None or node.domain != "" or not node.inputs:
        return None
    if node.op_type in ("Add", "Mul"):
        return _with_number(node, size, depth)
    return _viewed(node, size, depth)


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    node = value.producer()
    if node is None or kind(node) != "Constant" or "value" not in node.attributes:
        return value.const_value
    # Not as_tensor(), which asks whether the value has all parts of a tensor's protocol.
    tensor: ir.TensorProtocol = node.attributes["value"].value
    return tensor


def _viewed(node: ir.Node, size: int, depth: int) -> Array | None:
    value = node.outputs[0]
    array = _constant(node.inputs[0], size, depth - 1)
    if array is None or node.op_type == "Identity":
        return array
    if keeps_numbers(node):
        return array.astype(ir.DataType(attribute_int(node, "to", 1)).numpy())
    dims = [static_dim(value, axis) for axis in range(rank(value) or 0)]
    shape = [dim for dim in dims if dim is not None]
    views = node.op_type in ("Unsqueeze", "Reshape", "Squeeze") and len(shape) == len(dims)
    return array.reshape(shape) if views and int(np.prod(shape)) == size else None


def _with_number(node: ir.Node, size: int, depth: int) -> Array | None:
    for index in (0, 1):
        array = _constant(node.inputs[index], size, depth - 1)
        number = scalar(node.inputs[1 - index])
        if array is not None and number is not None:
            other = array.dtype.type(number)
            result = array + other if node.op_type == "Add" else array * other
            return np.asarray(result, array.dtype)
    return None
