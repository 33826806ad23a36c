"""The operators of a layer in a converted model, with named inputs.

``converted_layers`` finds for every layer of a plan the two encoders that make its caches, and the
attention that reads them. Whatever looks at a converted model, or changes it further, asks here:

    for layer in converted_layers(model, plan):
        layer.attention.bias = None
        layer.key.offset = build.constant(...)

Nodes are found by the names of the caches in the plan: a cache is the output of an encoder, or of a
Slice that shortens what the encoder made. Which slot an input has is known to the operators'
records (``tq_onnx.ops.operators``) alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import label
from tq_onnx.ops.operator import Input
from tq_onnx.ops.operators import Attention, Encode, PagedAttention, PagedEncode
from tq_onnx.plan import ROLES, CachePlan, LayerPlan, Plan, Role

SHARED: Final[Mapping[Role, Mapping[Input, Input]]] = {
    "key": {
        Encode.past_length: Attention.past_length,
        Encode.rotation: Attention.key_rotation,
        Encode.centroids: Attention.key_centroids,
        Encode.offset: Attention.key_offset,
        Encode.frequencies: Attention.key_frequencies,
    },
    "value": {
        Encode.past_length: Attention.past_length,
        Encode.rotation: Attention.value_rotation,
        Encode.centroids: Attention.value_centroids,
        Encode.offset: Attention.value_offset,
    },
}
"""The inputs of an encoder that attention has too, and what they are there, by cache."""

_ROUNDING: Final = 1e-6
"""Of s and 1 / s in float32."""


@dataclass(frozen=True)
class _Required:
    """An input that every node of an operator has, as an attribute."""

    slot: Input  #: the record of the input
    #: the one that operators on pages have in its place; None for the same
    in_pages: Input | None = None

    def __get__(self, operator: OperatorNode, owner: type) -> ir.Value:
        value = self.slot.of(operator.node)
        if value is None and self.in_pages is not None:
            value = self.in_pages.of(operator.node)
        if value is None:
            raise UnsupportedModelError(
                f"a node of {operator.node.op_type} has no input {self.slot.name}",
                where=operator.name,
                fix="convert the original again",
            )
        return value

    def __set__(self, operator: OperatorNode, value: ir.Value) -> None:
        self.slot.replace(operator.node, value)


@dataclass(frozen=True)
class _Optional:
    """An input that a node may lack, as an attribute that is None then."""

    slot: Input  #: the record of the input

    def __get__(self, operator: OperatorNode, owner: type) -> ir.Value | None:
        return self.slot.of(operator.node)

    def __set__(self, operator: OperatorNode, value: ir.Value | None) -> None:
        self.slot.replace(operator.node, value)


class OperatorNode:
    """A node of one of the two operators.

    Attributes:
        node: the node.
    """

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    @property
    def name(self) -> str:
        """The node's name."""
        return label(self.node)

    @property
    def output(self) -> ir.Value:
        """The result: the new cache, or the attention."""
        return self.node.outputs[0]


class EncodeNode(OperatorNode):
    """A node that makes a cache; its inputs follow ``tq_onnx.ops.operators.Encode``.

    Attributes:
        role: which of the layer's caches it makes.
        cache: the plan of that cache.
        codec: its codec.
    """

    vectors = _Required(Encode.vectors)
    past = _Required(Encode.past)
    past_length = _Required(Encode.past_length, PagedEncode.past_seqlens)
    rotation = _Required(Encode.rotation)
    centroids = _Required(Encode.centroids)
    boundaries = _Required(Encode.boundaries)
    offset = _Optional(Encode.offset)
    gains = _Optional(Encode.gains)
    feedback = _Optional(Encode.feedback)
    frequencies = _Optional(Encode.frequencies)

    def __init__(self, node: ir.Node, role: Role, cache: CachePlan) -> None:
        super().__init__(node)
        self.role: Final = role
        self.cache: Final = cache
        self.codec: Final = cache.codec

    @property
    def is_shortened(self) -> bool:
        """True if the cache leaves the graph without some of its rows."""
        return self.output.name != self.cache.present


class AttentionNode(OperatorNode):
    """A node that reads caches; its inputs follow ``tq_onnx.ops.operators.Attention``."""

    query = _Required(Attention.query)
    key_cache = _Required(Attention.key_cache)
    value_cache = _Required(Attention.value_cache)
    past_length = _Required(Attention.past_length, PagedAttention.past_seqlens)
    bias = _Optional(Attention.attention_bias)
    sink = _Optional(Attention.head_sink)
    new_keys = _Optional(Attention.new_keys)
    new_values = _Optional(Attention.new_values)
    left_padding = _Optional(Attention.left_padding)


@dataclass(frozen=True, eq=False)
class Scaling:
    """The multiplication of queries, or of new keys, by scales of their channels."""

    node: ir.Node  #: the multiplication
    plain: ir.Value  #: what it multiplies
    factors: npt.NDArray[np.float32]  #: by what, of each head ``[H, D]`` or ``[N, D]``


def scaling_of(operand: ir.Value, heads: int, head_size: int) -> Scaling | None:
    """Return the scaling that makes an operand; None if there is none."""
    node = operand.producer()
    plain, table = (None, None) if node is None or node.op_type != "Mul" else node.inputs
    tensor = None if table is None else table.const_value
    if node is None or plain is None or tensor is None:
        return None
    if list(tensor.shape) != [1, heads, 1, head_size]:
        return None
    return Scaling(node, plain, np.asarray(tensor.numpy(), np.float32)[0, :, 0])


def shares_length(encoder: EncodeNode, attention: AttentionNode, plan: Plan) -> bool:
    """Return True if attention counts the tokens before the new ones as an encoder does.

    In a cache of a fixed size it may count more: a mask may show rows behind those just written.
    """
    length = attention.past_length
    if length is encoder.past_length:
        return True
    is_fixed = plan.interface.static or encoder.cache.past is None
    node = length.producer() if is_fixed else None
    return node is not None and node.op_type == "Max" and encoder.past_length in node.inputs


@dataclass(frozen=True, eq=False)
class ConvertedLayer:
    """The nodes of a layer."""

    plan: LayerPlan
    key: EncodeNode  #: makes the cache of keys
    value: EncodeNode  #: makes the cache of values
    attention: AttentionNode  #: reads both
    sharing: tuple[AttentionNode, ...] = ()  #: further attentions that read both

    @property
    def attentions(self) -> tuple[AttentionNode, ...]:
        """All that read the caches, the first one first."""
        return (self.attention, *self.sharing)

    @property
    def encoders(self) -> tuple[EncodeNode, EncodeNode]:
        """Both encoders, keys first."""
        return self.key, self.value

    @property
    def operators(self) -> tuple[EncodeNode | AttentionNode, ...]:
        """All of them, encoders first."""
        return (self.key, self.value, *self.attentions)

    @property
    def scalings(self) -> tuple[Scaling | None, Scaling | None]:
        """What multiplies queries, and new keys."""
        plan = self.plan
        return (
            scaling_of(self.attention.query, plan.num_heads, plan.head_size),
            scaling_of(self.key.vectors, plan.kv_num_heads, plan.head_size),
        )

    @property
    def key_scales(self) -> npt.NDArray[np.float32] | None:
        """What keys are divided by and queries multiplied ``[N, D]``; None if they are not."""
        query, key = self.scalings
        if query is None or key is None:
            return None
        groups = query.factors.reshape(len(key.factors), -1, self.plan.head_size)
        cancels = (np.abs(groups * key.factors[:, None] - 1) <= _ROUNDING).all()
        return groups[:, 0] if cancels else None

    @property
    def is_shortened(self) -> bool:
        """True if a cache leaves the graph without some of its rows."""
        return any(encoder.is_shortened for encoder in self.encoders)


def converted_layers(model: ir.Model, plan: Plan) -> tuple[ConvertedLayer, ...]:
    """Find the operators of every layer; return the layers in the order of the plan.

    Args:
        model: a model with TurboQuant operators; it is not changed.
    """
    outputs = {value.name: value for value in model.graph.outputs}
    layers = []
    for layer in plan.layers:
        try:
            layers.append(find_layer(outputs, layer))
        except NoMatch as miss:
            raise UnsupportedModelError(
                f"layer {layer.layer} is not as the plan says: {miss.reason}",
                fix="convert the original again",
            ) from miss
    return tuple(layers)


def find_layer(outputs: Mapping[str | None, ir.Value], layer: LayerPlan) -> ConvertedLayer:
    """Find the operators of one layer."""
    key, value = (_encoder(outputs, role, layer.cache(role)) for role in ROLES)
    readers = [
        use.node
        for use in key.output.uses()
        if (Attention.is_node(use.node) or PagedAttention.is_node(use.node))
        and Attention.key_cache.of(use.node) is key.output
        and Attention.value_cache.of(use.node) is value.output
    ]
    if len(readers) != layer.readers:
        raise NoMatch(f"{len(readers)} attentions read the caches", key.node)
    first, *further = (AttentionNode(node) for node in readers)
    return ConvertedLayer(layer, key, value, first, tuple(further))


def _encoder(outputs: Mapping[str | None, ir.Value], role: Role, cache: CachePlan) -> EncodeNode:
    present = outputs.get(cache.present)
    node = None if present is None else present.producer()
    if node is not None and node.op_type == "Slice" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or not (Encode.is_node(node) or PagedEncode.is_node(node)):
        raise NoMatch(f"{cache.present} is not made by {Encode.name}", node)
    return EncodeNode(node, role, cache)
