"""What a dialect says about one attention layer.

A dialect turns the two caches of a layer into a ``Site``, or raises ``NoMatch`` with the reason. A
site holds the facts that go into the plan and handles into the graph, and knows two things that
differ between dialects: how to get the operands of attention from the graph (``operands``), and
what form the old attention's result had (``result``). All else is done by
``tq_onnx.graph.rewrite``.

Shape letters: B batch, T new tokens, P cached tokens, S = P + T, H query heads, N key/value heads,
G = H / N, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import onnx_ir as ir

from tq_onnx.graph.builder import Builder

FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Element types that the operators take."""

Dims = tuple[str, ...]
"""Meaning of each dimension of a value that holds a cache: B, N, G, H, P, S, D, 1, BN or BH."""

PAST: Final[Dims] = ("B", "N", "P", "D")
PRESENT: Final[Dims] = ("B", "N", "S", "D")


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
    """A graph output that looks like a cache.

    Attributes:
        layer: index of the layer, in graph order.
        present: the graph output.
        state: the value that it is, looked at through nodes that change nothing.
        node: the node that makes ``state``.
        passed: the values between ``state`` and ``present``, both included.
    """

    layer: int
    present: ir.Value
    state: ir.Value
    node: ir.Node
    passed: tuple[ir.Value, ...]


@dataclass(frozen=True, eq=False)
class Cache:
    """One cache of a layer.

    Attributes:
        past: the graph input ``[B, N, P, D]``.
        present: the graph output ``[B, N, S, D]``.
        node: the node that makes it; its new rows are known before this node.
        views: every value that holds the cache in the old form, ``past`` included, and its
            dimensions; a reader of one that outlives the conversion may only ask for its shape.
    """

    past: ir.Value
    present: ir.Value
    node: ir.Node
    views: Mapping[ir.Value, Dims]


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of attention: query ``[B, H, T, D]``, new rows ``[B, N, T, D]``, additive bias."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None


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
    """

    dialect: ClassVar[str]
    counts_tokens: ClassVar[bool] = False
    """Whether the graph tells the past length of each sequence other than by a cache's size."""

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

    def past_length(self, build: Builder) -> ir.Value | None:
        """Tokens in the cache before this call, int64 ``[B]``; None if ``counts_tokens`` is not."""
        del build
        return None


@dataclass(frozen=True, eq=False)
class GraphView:
    """A graph without its dead nodes.

    Attributes:
        graph: the graph.
        opset: version of the default domain.
        live: nodes that some graph output depends on.
    """

    graph: ir.Graph
    opset: int
    live: Collection[ir.Node]

    def consumers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Live nodes that read ``value``, and by which input."""
        return [(use.node, use.idx) for use in value.uses() if use.node in self.live]


class Dialect(Protocol):
    """A form of cached attention."""

    @property
    def name(self) -> str:
        """Goes into plans and reports."""

    def claims(self, anchor: Anchor) -> bool:
        """Whether a cache made by this node belongs to this dialect."""

    def match(self, anchors: tuple[Anchor, Anchor], view: GraphView) -> Site:
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


def passes_through(node: ir.Node) -> bool:
    """Whether a node's output is its first input."""
    return node.domain == "" and (
        node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
    )


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


def make_cache(anchor: Anchor, past: ir.Value | None, views: Mapping[ir.Value, Dims]) -> Cache:
    """Ties a graph output to the graph input that it continues.

    Raises:
        NoMatch: ``past`` is no float graph input of rank 4 with a free number of tokens.
    """
    found = past_input(past)
    if found is None:
        raise NoMatch(f"cache {anchor.present.name} does not continue a graph input", anchor.node)
    graph_input, passed = found
    if rank(graph_input) != 4:
        raise NoMatch(f"cache {graph_input.name} is not of rank 4", anchor.node)
    if graph_input.dtype not in FLOATS:
        raise NoMatch(f"cache {graph_input.name} is quantised already", anchor.node)
    tokens = static_dim(graph_input, 2)
    if tokens is not None:
        raise NoMatch(
            f"cache {graph_input.name} was exported with a fixed length of {tokens} tokens",
            anchor.node,
        )
    held = {**dict.fromkeys(passed, PAST), **dict.fromkeys(anchor.passed, PRESENT)}
    held.update(views)
    return Cache(graph_input, anchor.present, anchor.node, held)


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
