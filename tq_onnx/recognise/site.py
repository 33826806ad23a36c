"""Describe one attention layer, as a dialect found it.

Every cache output is followed back to what makes it and forward to what reads it: a ``Reach``
(``tq_onnx.recognise.caches``, ``reach``). A dialect is a form of attention that reads caches:
it names the node that the two caches of a layer have in common (``attention``), and turns the two
into a ``Site``, or raises ``NoMatch`` with the reason. A site holds facts, for the plan and about
values of the graph (``tq_onnx.recognise.operands``). Recognition makes no nodes:
``tq_onnx.conversion.rewrite`` does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from tq_onnx.recognise.caches import Cache, Dims, PastLength, Reach
from tq_onnx.recognise.operands import HEADS, Mask, Rotation, Vectors


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """One attention layer, recognised."""

    dialect: str  #: the name of its form
    layer: int  #: index, in graph order
    node: ir.Node  #: the node that makes ``output``; it names the layer in messages
    key: Cache
    value: Cache
    num_heads: int  #: H
    kv_num_heads: int  #: N
    head_size: int  #: D, of queries and keys
    dtype: ir.DataType  #: element type of the query, of the bias and of the result
    scale: float  #: factor on the scores
    query: Vectors  #: the queries
    #: the keys of the new tokens; if they have an update, in its layout (``Cache.turn``)
    new_key: Vectors
    new_value: Vectors  #: the values of the new tokens, likewise
    output: ir.Value  #: what the old attention computes
    output_dims: Dims = HEADS  #: meaning of the dimensions of ``output``
    causal: bool = False  #: whether the operator must mask the future itself
    sliding_window: int = 0  #: number of visible keys, the query's own included; 0 for all
    #: whether the caches hold the newest tokens only, at least those of the window
    ring: bool = False
    softcap: float = 0.0  #: 0 for none
    masks: tuple[Mask, ...] = ()  #: what hides keys; their sum is the bias
    #: slots of each sequence that hold a key, int64 ``[B]``; None where all do
    valid_keys: ir.Value | None = None
    has_sink: bool = False  #: whether a score without a value takes part in the softmax
    #: its score in each head, ``[H]`` or ``[1, H, 1, 1]``; None for 0, if there is one
    sinks: ir.Value | None = None
    #: whether the three vectors are one value: queries, keys and values side by side
    packed: bool = False
    #: what attention itself does to queries and new keys; None if nothing
    rotation: Rotation | None = None
    #: the index of the last key of each sequence, new ones included; None if the graph counts
    #: otherwise
    last_key: ir.Value | None = None
    #: new tokens of each sequence, where padding may stand behind them, integers ``[B]``; None if
    #: all count
    query_lengths: ir.Value | None = None
    value_size: int = 0  #: numbers in a head of values and of the result, at most D; 0 for D
    #: further values, each with the axis that has one entry for each new token
    inner_token_axes: tuple[tuple[ir.Value, int], ...] = ()
    #: values with the number of rows in dimension 0 that belong to one sequence
    batch_axes: tuple[tuple[ir.Value, int], ...] = ()
    sharing: tuple[Site, ...] = ()  #: further layers that read the same caches, in graph order

    @property
    def attentions(self) -> tuple[Site, ...]:
        """All layers that read the caches, this one first."""
        return (self, *self.sharing)

    @property
    def result_size(self) -> int:
        """Numbers in a head of values, as the graph has them, and of the result."""
        return self.value_size or self.head_size

    def size_of(self, role: str) -> int:
        """Return the numbers in a head of what a cache holds, by its role in the layer."""
        return self.result_size if role == "value" else self.head_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in both caches, from their own element types."""
        bits = 0
        for role, cache in (("key", self.key), ("value", self.value)):
            dtype = (cache.past or cache.present).dtype or self.dtype
            bits += self.size_of(role) * dtype.bitwidth
        return self.kv_num_heads * bits // 8

    @property
    def has_bias(self) -> bool:
        """Whether there is an additive bias."""
        return bool(self.masks) or self.valid_keys is not None

    @property
    def vectors(self) -> tuple[Vectors, Vectors, Vectors]:
        """Queries, new keys and new values."""
        return self.query, self.new_key, self.new_value

    @property
    def mask_sources(self) -> Collection[ir.Value]:
        """The values that say which keys count: the attention mask flows into them."""
        counts = (self.last_key, self.query_lengths, self.valid_keys)
        return [*(mask.value for mask in self.masks), *(v for v in counts if v is not None)]

    @property
    def inputs(self) -> Collection[ir.Value]:
        """The values of the old graph that the new attention reads, except the caches."""
        rotation = self.rotation
        rotary = () if rotation is None else (rotation.cos, rotation.sin, rotation.positions)
        norms = [vectors.norm.weight for vectors in self.vectors if vectors.norm is not None]
        further = [value for value in (self.sinks, *rotary) if value is not None]
        vectors = (vectors.value for vectors in self.vectors)
        return [*dict.fromkeys(vectors), *self.mask_sources, *norms, *further]

    @property
    def token_axes(self) -> Collection[tuple[ir.Value, int]]:
        """Query, new rows and more, each with the axis that has one entry for each new token."""
        vectors = ((vectors.value, vectors.token_axis) for vectors in self.vectors)
        return [*dict.fromkeys(vectors), *self.inner_token_axes]

    @property
    def past_length(self) -> PastLength | None:
        """The tokens in the caches before a call; None if only the size of a cache tells."""
        if self.last_key is not None:
            return PastLength(self.last_key, "last key")
        if self._update_length is not None:
            return self._update_length
        return PastLength(None) if self.key.past is None else None

    @property
    def counts_tokens(self) -> bool:
        """True if the graph tells the past length of each sequence other than by a cache's size."""
        return self.past_length is not None

    @property
    def writes_in_place(self) -> bool:
        """True if new rows go into slots of a cache that may hold rows, or zeros, behind them."""
        update = self.key.update
        has_room = self.key.past is not None or (update is not None and update.slots > 0)
        return has_room and self._update_length is not None

    @property
    def _update_length(self) -> PastLength | None:
        update = self.key.update
        return None if update is None else update.past_length


@dataclass(frozen=True, eq=False)
class GraphView:
    """A graph without its dead nodes."""

    graph: ir.Graph
    opset: int  #: version of the default domain
    live: Collection[ir.Node]  #: nodes that some graph output depends on
    #: whether some graph input looks like a cache; a graph for a first prompt takes none
    takes_caches: bool

    def consumers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return live nodes that read ``value``, and by which input."""
        return [(use.node, use.idx) for use in value.uses() if use.node in self.live]


class Dialect(Protocol):
    """A form of attention."""

    @property
    def name(self) -> str:
        """Goes into plans and reports."""

    def claims(self, reach: Reach) -> bool:
        """Return True if a cache that is read by this node in this way belongs to this dialect."""

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        """Return the node that is one and the same for both caches of a layer, and for no other."""

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        """Recognise one layer by its two caches, in any order."""
