"""What a dialect says about one attention layer.

Every cache output is followed back to what makes it and forward to what reads it: a ``Reach``
(``tq_onnx.graph.dialects.reach``). A dialect is a form of attention that reads caches: it tells the
node that the two caches of a layer have in common (``attention``), and turns the two into a
``Site``, or raises ``NoMatch`` with the reason. A site holds the facts that go into the plan and
handles into the graph, and knows two things that differ between dialects: how to get the operands
of attention from the graph (``operands``), and what form the old attention's result had
(``result``). All else is done by ``tq_onnx.graph.rewrite``.

Shape letters: B batch, T new tokens, P cached tokens, S = P + T, H query heads, N key/value heads,
G = H / N, D head size; two letters side by side are one dimension, as ``BN``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import onnx_ir as ir

from tq_onnx.graph.builder import Builder

FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Element types that the operators take."""

Dims = tuple[str, ...]
"""Meaning of each dimension of a value that holds a cache: B, N, G, H, P, S, D, 1, BN, BH, ND, HD;
C for what a Slice left of S."""

PAST: Final[Dims] = ("B", "N", "P", "D")
PRESENT: Final[Dims] = ("B", "N", "S", "D")
ROWS: Final[Dims] = ("B", "N", "T", "D")


class NoMatch(Exception):  # noqa: N818 - control flow inside the converter, never shown as an error
    """A layer is not what the dialect knows.

    Args:
        reason: a clause that says what was found instead.
        node: where; None for the node that makes the cache.
    """

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


@dataclass(frozen=True, eq=False)
class Anchor:
    """A graph output that looks like a cache, followed back to the node that makes it.

    Attributes:
        present: the graph output.
        state: the value that ``node`` makes.
        dims: meaning of the dimensions of ``state``.
        node: what makes the cache: an update, a fused operator, or the last step of the new rows
            in a graph that takes no caches.
        views: the values from ``state`` to ``present``, both included, and their dimensions.
        tail: the nodes between ``state`` and ``present``.
        cut: the Slice among them that shortens the cache, None if there is none.
    """

    present: ir.Value
    state: ir.Value
    dims: Dims
    node: ir.Node
    views: Mapping[ir.Value, Dims]
    tail: tuple[ir.Node, ...]
    cut: ir.Node | None


@dataclass(frozen=True, eq=False)
class Update:
    """How new rows get into a cache, outside of a fused operator.

    Attributes:
        past: the graph input; None in a graph that takes no caches.
        rows: the new rows.
        rows_dims: meaning of their dimensions: B, N, T, D in some order, or B, T, ND.
        views: the values from ``past`` to the update and their dimensions, ``past`` included.
        past_length: makes the tokens in the cache before this call, int64 ``[B]`` or ``[1]``; None
            where a cache grows, and its size tells.
        sources: what ``past_length`` reads.
        slots: of the cache that a graph starts from which takes none; 0 if it has no rows.
    """

    past: ir.Value | None
    rows: ir.Value
    rows_dims: Dims
    views: Mapping[ir.Value, Dims]
    past_length: Callable[[Builder], ir.Value] | None = None
    sources: tuple[ir.Value, ...] = ()
    slots: int = 0

    def size(self, letter: str) -> int | None:
        """A dimension of the new rows, if it is known as a number."""
        axis = self.rows_dims.index(letter) if letter in self.rows_dims else None
        return None if axis is None else static_dim(self.rows, axis)


@dataclass(frozen=True, eq=False)
class Route:
    """The way of a cache to the node that computes with it.

    Attributes:
        views: all values on the way and their dimensions.
        factor: product of the constants that it is multiplied by.
        reader: the matrix product or the fused operator.
        index: the input of ``reader`` that the cache is.
        dims: dimensions of that operand.
    """

    views: Mapping[ir.Value, Dims]
    factor: float
    reader: ir.Node
    index: int
    dims: Dims

    @property
    def operand(self) -> ir.Value:
        """The cache as ``reader`` sees it."""
        value = self.reader.inputs[self.index]
        assert value is not None  # the route ends there
        return value


@dataclass(frozen=True, eq=False)
class Reach:
    """A cache from its update to its reader.

    Attributes:
        anchor: the output and what makes it.
        update: how new rows get into it; None if the reader makes the cache itself.
        route: the way from the update to the reader; None likewise.
    """

    anchor: Anchor
    update: Update | None
    route: Route | None

    @property
    def reader(self) -> ir.Node:
        """The node that computes with the cache."""
        return self.anchor.node if self.route is None else self.route.reader


@dataclass(frozen=True, eq=False)
class Cache:
    """One cache of a layer.

    Attributes:
        past: the graph input; None in a graph that takes no caches.
        present: the graph output.
        node: the node that makes it, or that reads it if it is nothing but the new rows; they are
            known before this node.
        views: every value that holds the cache in the old form, ``past`` included, and its
            dimensions; a reader of one that outlives the conversion may only ask for its shape.
        cut: the Slice that shortens the cache before it is returned; None if there is none.
        update: how new rows get into it; None if a fused operator does that.
    """

    past: ir.Value | None
    present: ir.Value
    node: ir.Node
    views: Mapping[ir.Value, Dims]
    cut: ir.Node | None = None
    update: Update | None = None

    @property
    def turn(self) -> tuple[int, ...] | None:
        """How the new rows are transposed to ``[B, N, T, D]``; None if they need not be."""
        dims = () if self.update is None else self.update.rows_dims
        if sorted(dims) != sorted(ROWS) or dims == ROWS:
            return None
        return tuple(dims.index(letter) for letter in ROWS)


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
        head_size: D.
        dtype: element type of the query, of the bias and of the result.
        scale: factor on the scores.
        causal: whether the operator must mask the future itself.
        sliding_window: number of visible keys, the query's own included; 0 for all.
        softcap: 0 for none.
        has_bias: whether there is an additive bias.
        output: what the old attention computes.
        has_sink: whether a score without a value takes part in the softmax.
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

    @abstractmethod
    def inputs(self) -> Collection[ir.Value]:
        """Values of the old graph that ``operands`` will read, the caches apart."""

    @abstractmethod
    def mask_sources(self) -> Collection[ir.Value]:
        """Values that say which keys count: what the attention mask input flows into."""

    @abstractmethod
    def operands(self, build: Builder) -> Operands:
        """Makes the operands; nodes go before ``node``."""

    @abstractmethod
    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        """Gives the operator's result the form of ``output``."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the graph tells the past length of each sequence other than by a cache's size."""
        return self.key.past is None or self._counted is not None

    def past_length(self, build: Builder) -> ir.Value | None:
        """Tokens in the cache before this call, int64 ``[B]`` or ``[1]``.

        None unless ``counts_tokens``.
        """
        if self._counted is not None:
            return self._counted(build)
        return build.integers(0) if self.key.past is None else None

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
        """Live nodes that read ``value``, and by which input."""
        return [(use.node, use.idx) for use in value.uses() if use.node in self.live]


class Dialect(Protocol):
    """A form of attention."""

    @property
    def name(self) -> str:
        """Goes into plans and reports."""

    def claims(self, reach: Reach) -> bool:
        """Whether a cache that is read by this node in this way belongs to this dialect."""

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        """The node that is one and the same for both caches of a layer, and for no other.

        Raises:
            NoMatch: the cache does not lead to attention.
        """

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        """Recognises one layer by its two caches, in any order.

        Raises:
            NoMatch: the layer is not of this form.
        """


def static_dim(value: ir.Value, axis: int) -> int | None:
    """A dimension of a value if it is known as a number."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def rank(value: ir.Value) -> int | None:
    """Number of dimensions, if known."""
    return None if value.shape is None else len(value.shape)


def label(node: ir.Node) -> str:
    """A node's name, or that of its output where exporters leave nodes nameless."""
    return node.name or node.outputs[0].name or node.op_type


def passes_through(node: ir.Node) -> bool:
    """Whether a node's output is its first input."""
    return node.domain == "" and (
        node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
    )


def keeps_numbers(node: ir.Node) -> bool:
    """Whether a node's output is its first input but for the precision."""
    if (node.domain, node.op_type) == ("", "Cast"):
        # Not a type of 8 bits or less: that is quantisation.
        return node.attributes.get_int("to", 0) in (*FLOATS, ir.DataType.DOUBLE)
    return passes_through(node)


def past_input(value: ir.Value | None) -> tuple[ir.Value, tuple[ir.Value, ...]] | None:
    """The graph input that a value is, and the values between, the input included.

    Returns:
        None if the value is not a graph input, nor one passed through.
    """
    passed = []
    while value is not None:
        passed.append(value)
        node = value.producer()
        if node is None:
            return (value, tuple(passed)) if value.is_graph_input() else None
        if not passes_through(node):
            return None
        value = node.inputs[0]
    return None


def make_cache(
    anchor: Anchor,
    past: ir.Value | None,
    views: Mapping[ir.Value, Dims],
    *,
    fixed_length: bool = False,
    rank_of_past: int = 4,
) -> Cache:
    """Ties a graph output to the graph input that it continues.

    Args:
        anchor: the output.
        past: what it continues, perhaps through nodes that change nothing.
        views: further values that hold the cache.
        fixed_length: whether the number of tokens may be fixed.
        rank_of_past: of the graph input.

    Raises:
        NoMatch: ``past`` is no float graph input of that rank with a free number of tokens.
    """
    found = past_input(past)
    if found is None:
        raise NoMatch(f"cache {anchor.present.name} does not continue a graph input", anchor.node)
    graph_input, passed = found
    if rank(graph_input) != rank_of_past:
        raise NoMatch(f"cache {graph_input.name} is not of rank {rank_of_past}", anchor.node)
    if graph_input.dtype not in FLOATS:
        raise NoMatch(f"cache {graph_input.name} is quantised already", anchor.node)
    tokens = static_dim(graph_input, 2)
    if tokens is not None and not fixed_length:
        raise NoMatch(
            f"cache {graph_input.name} was exported with a fixed length of {tokens} tokens",
            anchor.node,
        )
    held = {**dict.fromkeys(passed, PAST), **anchor.views, **views}
    return Cache(graph_input, anchor.present, anchor.node, held, anchor.cut)


def updated_cache(reach: Reach) -> Cache:
    """The cache of a reach that has an update."""
    anchor, update, route = reach.anchor, reach.update, reach.route
    assert update is not None and route is not None
    held = {**update.views, **anchor.views, **route.views}
    # A cache that is nothing but the new rows is made by no node: they are known at the reader.
    made = update.past is not None or update.slots
    node = anchor.node if made else route.reader
    return Cache(update.past, anchor.present, node, held, anchor.cut, update)


def one_of(what: str, *sizes: int | None) -> int:
    """The number that all known sizes agree on.

    Raises:
        NoMatch: they differ, or none is known.
    """
    known = {size for size in sizes if size is not None}
    if len(known) == 1:
        return known.pop()
    if not known:
        raise NoMatch(f"the graph does not tell the {what}; run ONNX shape inference first")
    raise NoMatch(f"the graph tells more than one {what}: {sorted(known)}")
