"""A cache traced through a graph: where it comes from, how it is updated, what reads it.

``Anchor`` is an output followed back to the node that makes it, ``Update`` how new rows get into
it, ``Route`` its way to the node that computes with it, ``Reach`` all three, and ``Cache`` what the
rewriter needs of them. A cache that is none of a known form raises ``NoMatch`` with the reason.

Shape letters: B batch, T new tokens, P cached tokens, S = P + T, H query heads, N key/value heads,
G = H / N, D head size; two letters side by side are one dimension, as ``BN``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import onnx_ir as ir

from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import FLOATS, holds, keeps_numbers, rank, static_dim

Dims = tuple[str, ...]
"""Meaning of each dimension of a value that holds a cache: B, N, G, H, P, S, D, 1, BN, BH, ND, HD;
C for what a Slice left of S."""

PAST: Final[Dims] = ("B", "N", "P", "D")
PRESENT: Final[Dims] = ("B", "N", "S", "D")
ROWS: Final[Dims] = ("B", "N", "T", "D")


@dataclass(frozen=True, eq=False)
class Anchor:
    """A graph output that looks like a cache, followed back to the node that makes it."""

    present: ir.Value  #: the graph output
    state: ir.Value  #: the value that ``node`` makes
    dims: Dims  #: meaning of the dimensions of ``state``
    #: what makes the cache: an update, a fused operator, or the last step of the new rows in a
    #: graph that takes no caches
    node: ir.Node
    #: the values from ``state`` to ``present``, both included, and their dimensions
    views: Mapping[ir.Value, Dims]
    tail: tuple[ir.Node, ...]  #: the nodes between ``state`` and ``present``
    cut: ir.Node | None  #: the Slice among them that shortens the cache, None if there is none


@dataclass(frozen=True, eq=False)
class PastLength:
    """The number of tokens in a cache before a call, as the graph states it."""

    value: ir.Value | None  #: the number; None for 0
    #: ``list`` is int64 ``[B]``; ``integer`` is one integer of rank 0 or 1; ``last key`` is the
    #: index of the last key of each sequence, new keys included
    form: Literal["list", "integer", "last key"] = "list"


@dataclass(frozen=True, eq=False)
class Update:
    """The nodes that put new rows into a cache, outside of a fused operator."""

    past: ir.Value | None  #: the graph input; None in a graph that takes no caches
    rows: ir.Value  #: the new rows
    rows_dims: Dims  #: meaning of their dimensions: B, N, T, D in some order, or B, T, ND
    #: the values from ``past`` to the update and their dimensions, ``past`` included
    views: Mapping[ir.Value, Dims]
    #: the tokens in the cache before a call; None where a cache grows, and its size tells
    past_length: PastLength | None = None
    slots: int = 0  #: of the cache that a graph starts from which takes none; 0 if it has no rows

    @property
    def sources(self) -> tuple[ir.Value, ...]:
        """What the past length is read from."""
        value = None if self.past_length is None else self.past_length.value
        return () if value is None else (value,)

    def size(self, letter: str) -> int | None:
        """Return a dimension of the new rows, if it is known as a number."""
        axis = self.rows_dims.index(letter) if letter in self.rows_dims else None
        return None if axis is None else static_dim(self.rows, axis)


@dataclass(frozen=True, eq=False)
class Route:
    """The way of a cache to the node that computes with it."""

    views: Mapping[ir.Value, Dims]  #: all values on the way and their dimensions
    factor: float  #: product of the constants that it is multiplied by
    reader: ir.Node  #: the matrix product or the fused operator
    index: int  #: the input of ``reader`` that the cache is
    dims: Dims  #: dimensions of that operand

    @property
    def operand(self) -> ir.Value:
        """The cache as ``reader`` sees it."""
        value = self.reader.inputs[self.index]
        assert value is not None  # the route ends there
        return value


@dataclass(frozen=True, eq=False)
class Reach:
    """A cache from its update to its reader."""

    anchor: Anchor  #: the output and what makes it
    update: Update | None  #: how new rows get into it; None if the reader makes the cache itself
    route: Route | None  #: the way from the update to the reader; None likewise

    @property
    def reader(self) -> ir.Node:
        """The node that computes with the cache."""
        return self.anchor.node if self.route is None else self.route.reader


@dataclass(frozen=True, eq=False)
class Cache:
    """One cache of a layer."""

    past: ir.Value | None  #: the graph input; None in a graph that takes no caches
    present: ir.Value  #: the graph output
    #: the node that makes it, or that reads it if it is nothing but the new rows; they are known
    #: before this node
    node: ir.Node
    #: every value that holds the cache in the old form, ``past`` included, and its dimensions; a
    #: reader of one that outlives the conversion may only ask for its shape
    views: Mapping[ir.Value, Dims]
    #: the Slice that shortens the cache before it is returned; None if there is none
    cut: ir.Node | None = None
    update: Update | None = None  #: how new rows get into it; None if a fused operator does that

    @property
    def turn(self) -> tuple[int, ...] | None:
        """The permutation of the new rows to ``[B, N, T, D]``; None if they need none."""
        dims = () if self.update is None else self.update.rows_dims
        if sorted(dims) != sorted(ROWS) or dims == ROWS:
            return None
        return tuple(dims.index(letter) for letter in ROWS)


def past_input(value: ir.Value | None) -> tuple[ir.Value, tuple[ir.Value, ...]] | None:
    """Return the graph input behind a value, and the values between, the input included.

    Returns:
        None if the value is not a graph input, nor one passed through or in another precision.
    """
    passed = []
    while value is not None:
        passed.append(value)
        node = value.producer()
        if node is None:
            return (value, tuple(passed)) if value.is_graph_input() else None
        if not keeps_numbers(node):
            return None
        value = node.inputs[0]
    return None


def check_precision(anchor: Anchor, passed: Sequence[ir.Value]) -> None:
    """Check that a cache holds the very numbers that attention reads, call after call.

    A float16 graph may have float32 caches, with a Cast behind the input and one before the output.
    They lose nothing if no type among them is narrower than that of the update.
    """
    past, present = passed[-1], anchor.present
    if past.dtype != present.dtype:
        raise NoMatch(
            f"cache {present.name} has another element type than the input that it "
            "continues, so that it cannot be fed back: export with caches of one element type",
            anchor.node,
        )
    dtypes = {value.dtype for value in (*passed, *anchor.views)} - {None}
    inner = anchor.state.dtype or passed[0].dtype
    if len(dtypes) > 1 and not all(holds(dtype, inner) for dtype in dtypes):
        raise NoMatch(
            f"cache {present.name} rounds what attention reads, by a Cast: export or convert the "
            "model with caches of the element type of its attention",
            anchor.node,
        )


def own_cache(anchor: Anchor, past: ir.Value | None, *, fixed_length: bool = False) -> Cache:
    """Return a cache that the operator which reads it makes itself.

    Args:
        fixed_length: whether the number of tokens may be fixed.
    """
    if past is None:
        return Cache(None, anchor.present, anchor.node, dict(anchor.views), anchor.cut)
    source = past_input(past)
    if source is None:
        raise NoMatch(f"cache {anchor.present.name} does not continue a graph input", anchor.node)
    graph_input, passed = source
    check_precision(anchor, passed)
    if rank(graph_input) != 4:
        raise NoMatch(f"cache {graph_input.name} is not of rank 4", anchor.node)
    if graph_input.dtype not in FLOATS:
        raise NoMatch(f"cache {graph_input.name} is quantised already", anchor.node)
    tokens = static_dim(graph_input, 2)
    if tokens is not None and not fixed_length:
        raise NoMatch(
            f"cache {graph_input.name} was exported with a fixed length of {tokens} tokens",
            anchor.node,
        )
    held = {**dict.fromkeys(passed, PAST), **anchor.views}
    return Cache(graph_input, anchor.present, anchor.node, held, anchor.cut)


def by_input(
    node: ir.Node, reaches: tuple[Reach, Reach], key: int, value: int
) -> tuple[Reach, Reach]:
    """Return the caches that a fused operator reads as its keys and as its values."""
    read = {reach.route.index: reach for reach in reaches if reach.route is not None}
    if set(read) != {key, value}:
        raise NoMatch("the two caches are not the keys and the values", node)
    return read[key], read[value]


def updated_cache(reach: Reach) -> Cache:
    """Return the cache of a reach that has an update."""
    anchor, update, route = reach.anchor, reach.update, reach.route
    assert update is not None and route is not None
    held = {**update.views, **anchor.views, **route.views}
    # A cache that is nothing but the new rows is made by no node: they are known at the reader.
    has_maker = update.past is not None or update.slots
    node = anchor.node if has_maker else route.reader
    return Cache(update.past, anchor.present, node, held, anchor.cut, update)


def head_sizes(keys: Sequence[int | None], values: Sequence[int | None]) -> tuple[int, int]:
    """Return the sizes of heads of keys and of values, which may be narrower.

    Where nothing tells one of them, it is the other.
    """
    key_sizes, value_sizes = (
        [size for size in sizes if size is not None] for sizes in (keys, values)
    )
    head_size = one_of("head size", *(key_sizes or value_sizes))
    value_size = one_of("head size", *(value_sizes or key_sizes))
    if value_size > head_size:
        raise NoMatch(
            f"heads of values have {value_size} numbers, and those of keys only {head_size}"
        )
    return head_size, value_size


def one_of(what: str, *sizes: int | None) -> int:
    """Return the number that all known sizes agree on."""
    known = {size for size in sizes if size is not None}
    if len(known) == 1:
        return known.pop()
    if not known:
        raise NoMatch(f"the graph does not declare the {what}; run ONNX shape inference first")
    raise NoMatch(f"the graph declares more than one {what}: {sorted(known)}")
