"""Describe one attention layer, as a dialect found it.

Every cache output is followed back to what makes it and forward to what reads it: a ``Reach``
(``tq_onnx.recognise.caches``, ``reach``). A dialect is a form of attention that reads caches:
it tells the node that the two caches of a layer have in common (``attention``), and turns the two
into a ``Site``, or raises ``NoMatch`` with the reason. A site holds the facts that go into the plan
and handles into the graph, and knows two things that differ between dialects: how to get the
operands of attention from the graph (``operands``), and what form the old attention's result had
(``result``). All else is done by ``tq_onnx.conversion.rewrite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.recognise.behind import attended_length, visible_end
from tq_onnx.recognise.caches import Cache, Reach


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of attention: query ``[B, H, T, D]``, new rows ``[B, N, T, D]``, additive bias.

    The sink, ``[H]``, is a further score of each head that has no value.

    New rows of an update may have its layout: see ``Cache.turn``.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    sink: ir.Value | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Site(ABC):
    """One attention layer, recognised.

    Attributes:
        layer: index, in graph order.
        node: the node that makes ``output``; it names the layer in messages.
        key: the key cache.
        value: the value cache.
        num_heads: H.
        kv_num_heads: N.
        head_size: D, of queries and keys.
        dtype: element type of the query, of the bias and of the result.
        scale: factor on the scores.
        causal: whether the operator must mask the future itself.
        sliding_window: number of visible keys, the query's own included; 0 for all.
        softcap: 0 for none.
        has_bias: whether there is an additive bias.
        output: what the old attention computes.
        has_sink: whether a score without a value takes part in the softmax.
        value_size: numbers in a head of values and of the result, at most D; 0 for D.
        sharing: further layers that read the same caches, in graph order.
    """

    dialect: ClassVar[str]

    layer: int
    node: ir.Node
    key: Cache
    value: Cache
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: ir.DataType
    scale: float
    causal: bool
    sliding_window: int
    softcap: float
    has_bias: bool
    output: ir.Value
    has_sink: bool = False
    value_size: int = 0
    sharing: tuple[Site, ...] = ()

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

    @abstractmethod
    def inputs(self) -> Collection[ir.Value]:
        """Return the values of the old graph that ``operands`` will read, except the caches."""

    @abstractmethod
    def mask_sources(self) -> Collection[ir.Value]:
        """Return the values that say which keys count: the attention mask flows into them."""

    @abstractmethod
    def token_axes(self) -> Collection[tuple[ir.Value, int]]:
        """Return query and new rows, each with the axis that has one entry for each new token."""

    def batch_axes(self) -> Collection[tuple[ir.Value, int]]:
        """Return values with the number of rows in dimension 0 that belong to one sequence."""
        return ()

    @abstractmethod
    def operands(self, build: Builder) -> Operands:
        """Make the operands; nodes go before ``node``."""

    @abstractmethod
    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        """Give the operator's result the form of ``output``."""

    @property
    def counts_tokens(self) -> bool:
        """True if the graph tells the past length of each sequence other than by a cache's size."""
        return self.key.past is None or self._counted is not None

    def past_length(self, build: Builder) -> ir.Value | None:
        """Return the tokens in the cache before this call, int64 ``[B]`` or ``[1]``.

        None unless ``counts_tokens``.
        """
        if self._counted is not None:
            return self._counted(build)
        return build.integers(0) if self.key.past is None else None

    @property
    def writes_in_place(self) -> bool:
        """True if new rows go into slots of a cache that may hold rows, or zeros, behind them."""
        update = self.key.update
        has_room = self.key.past is not None or (update is not None and update.slots > 0)
        return has_room and self._counted is not None

    def attended_length(
        self, build: Builder, past_length: ir.Value, bias: ir.Value | None
    ) -> ir.Value:
        """Return the tokens before the new ones that attention has to know.

        Args:
            build: makes the nodes.
            past_length: tokens before the rows that are written, int64 ``[B]`` or ``[1]``.
            bias: what hides keys, ``[B or 1, H or 1, T or 1, slots]``.
        """
        if bias is None or not self.writes_in_place:
            return past_length
        graph = self.node.graph
        opset = 0 if graph is None else graph.opset_imports.get("", 0)
        query, axis = next(iter(self.token_axes()))
        return attended_length(build, past_length, query, axis, visible_end(build, bias, opset))

    @property
    def _counted(self) -> Callable[[Builder], ir.Value] | None:
        update = self.key.update
        return None if update is None else update.past_length


@dataclass(frozen=True, eq=False)
class GraphView:
    """A graph without its dead nodes.

    Attributes:
        graph: the graph.
        opset: version of the default domain.
        live: nodes that some graph output depends on.
        takes_caches: whether some graph input looks like a cache; a graph for a first prompt takes
            none.
    """

    graph: ir.Graph
    opset: int
    live: Collection[ir.Node]
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
        """Return the node that is one and the same for both caches of a layer, and for no other.

        Raises:
            NoMatch: the cache does not lead to attention.
        """

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        """Recognise one layer by its two caches, in any order.

        Raises:
            NoMatch: the layer is not of this form.
        """
