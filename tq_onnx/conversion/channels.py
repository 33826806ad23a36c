"""Find the channels of a head that a graph ties together, between a norm and the attention.

Scaling channel i of what a norm makes by s_i scales what comes of it, element by element, as long
as every node on the way treats channels one by one, and as long as channels that are added to each
other have one and the same scale. Those are *tied*: by a rotary embedding the two of each pair,
whether it is one node or spelled out, in halves or interleaved, over the whole head or a part. So
nothing on the way is recognised by its form: the channels are followed from node to node
(``tq_onnx.conversion.headnorms``), and what cannot be followed is a reason to leave the layer
alone. Tying more channels than needed is safe: it only lowers the gain.

``STEPS`` holds, for every operator that keeps channels apart, what becomes of them in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import keeps_numbers, rank, static_dim
from tq_onnx.ops.domain import MICROSOFT

Ids = npt.NDArray[np.int64]


class Ties:
    """Channels that must have one scale: sets that grow together.

    Args:
        count: number of channels.
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def tie(self, left: Ids, right: Ids) -> None:
        """Tie channels pairwise."""
        for left_id, right_id in zip(left.tolist(), right.tolist(), strict=True):
            first, second = sorted((self._root(left_id), self._root(right_id)))
            self._parent[second] = first

    def groups(self, ids: Ids) -> Ids:
        """Return the smallest channel of each channel's set."""
        return np.array([self._root(index) for index in ids.tolist()], np.int64)

    def _root(self, index: int) -> int:
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index


@dataclass(frozen=True, eq=False)
class Channels:
    """For each element of a value, the channel that it is a multiple of.

    Attributes:
        axis: the axis along which channels lie, counted from the front.
        ids: the channel of each index along it; elements differ in no other way.
    """

    axis: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class Way:
    """The facts of a graph that following channels needs.

    Attributes:
        graph: the graph.
        order: place of each of its nodes that an output depends on.
        ties: grows as channels are followed.
        head_size: D.
    """

    graph: ir.Graph
    order: Mapping[ir.Node, int]
    ties: Ties
    head_size: int


Held = Sequence[Channels | None]


def _kept_rank(node: ir.Node) -> int | None:
    """Return the rank of a result that has the axes of its first operand; None if unknown."""
    source, size = node.inputs[0], rank(node.outputs[0])
    return None if source is None or size != rank(source) or not size else size


def _axes(held: Sequence[int] | None, size: int) -> list[int] | None:
    """Return axes from the front; None if they are unknown, or not all in range and distinct."""
    axes = None if held is None else [axis % size for axis in held if -size <= axis < size]
    return axes if axes is not None and len(held or ()) == len({*axes}) else None


def _same(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    channels = held[0]
    if channels is None or not (node.op_type == "Neg" or keeps_numbers(node)):
        raise NoMatch(f"goes through {node.op_type}", node)
    return [channels]


def _product(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    tainted = [index for index, channels in enumerate(held) if channels is not None]
    if tainted not in ([0], [1]) or (node.op_type == "Div" and tainted != [0]):
        raise NoMatch(f"goes through {node.op_type} in a way that is not linear", node)
    return [_broadcast(node, held, tainted[0])]


def _sum(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    if any(channels is None for channels in held):
        raise NoMatch("has something added to it", node)
    left, right = (_broadcast(node, held, index) for index in (0, 1))
    return [_tied(node, [left, right], way)]


def _broadcast(node: ir.Node, held: Held, index: int) -> Channels:
    """Return the channels of an operand, by the axes of the result."""
    ranks = [None if value is None else rank(value) for value in node.inputs[:2]]
    channels, operand_rank = held[index], ranks[index]
    if channels is None or operand_rank is None or None in ranks:
        raise NoMatch(f"goes through {node.op_type} with operands of unknown rank", node)
    return Channels(channels.axis + max(size or 0 for size in ranks) - operand_rank, channels.ids)


def _tied(node: ir.Node, several: Sequence[Channels], way: Way) -> Channels:
    first = several[0]
    for channels in several[1:]:
        if channels.axis != first.axis or len(channels.ids) != len(first.ids):
            raise NoMatch(f"meets itself in {node.op_type} in another layout", node)
        way.ties.tie(first.ids, channels.ids)
    return first


def _concat(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    several = [channels for channels in held if channels is not None]
    size = _kept_rank(node)
    if len(several) != len(held) or size is None:
        raise NoMatch("is joined to something else", node)
    first = several[0]
    if attribute_int(node, "axis", 0) % size != first.axis:
        return [_tied(node, several, way)]
    if any(channels.axis != first.axis for channels in several):
        raise NoMatch("is joined to itself in another layout", node)
    return [Channels(first.axis, np.concatenate([channels.ids for channels in several]))]


def _slice(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    channels, size = held[0], _kept_rank(node)
    inputs = (*node.inputs, None, None)[1:5]
    starts, ends, named, steps = (integers(value) for value in inputs)
    axes = None if size is None else _axes(named, size)
    if channels is None or axes is None:
        raise NoMatch("is sliced in an unknown way", node)
    places = [place for place, axis in enumerate(axes) if axis == channels.axis]
    if not places:
        return [channels]
    if any(part is not None and len(part) != len(axes) for part in (starts, ends, steps)):
        raise NoMatch("is sliced in an unknown way", node)
    step = 1 if inputs[3] is None else steps[places[0]] if steps else 0
    count, out = len(channels.ids), static_dim(node.outputs[0], channels.axis)
    start = None if starts is None else starts[places[0]]
    end = None if ends is None else ends[places[0]]
    # Where exporters compute one of the two, the size of the result tells it.
    if start is None and end is not None and end >= count and step == 1 and out:
        start = count - out
    if end is None and start is not None and start >= 0 and step == 1 and out:
        end = start + out
    if start is None or end is None or step < 1:
        raise NoMatch("is sliced in an unknown way", node)
    ids = channels.ids[start:end:step]
    if out not in (None, len(ids)) or not len(ids):
        raise NoMatch("is sliced in an unknown way", node)
    return [Channels(channels.axis, ids)]


def _split(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    channels, size = held[0], _kept_rank(node)
    if channels is None or size is None:
        raise NoMatch("is split in an unknown way", node)
    if attribute_int(node, "axis", 0) % size != channels.axis:
        return [channels] * len(node.outputs)
    sizes = [static_dim(output, channels.axis) for output in node.outputs]
    known = [part for part in sizes if part is not None]
    if len(known) != len(sizes) or sum(known) != len(channels.ids):
        raise NoMatch("is split in an unknown way", node)
    places = np.cumsum(known)[:-1]
    return [Channels(channels.axis, ids) for ids in np.split(channels.ids, places)]


def _reshape(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    """Let channels depend on an element's place in row-major order, modulo ``len(flat)``."""
    channels, source, output = held[0], node.inputs[0], node.outputs[0]
    size, wide = rank(output), static_dim(output, -1)
    if channels is None or source is None or not size or not wide:
        raise NoMatch("is reshaped in an unknown way", node)
    behind = [static_dim(source, axis) for axis in range(channels.axis + 1, rank(source) or 0)]
    if None in behind:
        raise NoMatch("is reshaped in an unknown way", node)
    flat = np.repeat(channels.ids, int(np.prod([dim or 1 for dim in behind])))
    if wide % len(flat) == 0:
        return [Channels(size - 1, np.tile(flat, wide // len(flat)))]
    if len(flat) % wide:
        raise NoMatch("is reshaped across its heads", node)
    table = flat.reshape(-1, wide)
    if len(table) > wide and size > 1 and static_dim(output, -2) == len(table):
        for column in range(1, wide):
            way.ties.tie(table[:, 0], table[:, column])
        return [Channels(size - 2, table[:, 0])]
    for row in table[1:]:
        way.ties.tie(table[0], row)
    return [Channels(size - 1, table[0])]


def _transpose(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    channels, size = held[0], _kept_rank(node)
    if channels is None or size is None:
        raise NoMatch("is transposed in an unknown way", node)
    perm = list(node.attributes.get_ints("perm", tuple(reversed(range(size)))))
    if sorted(perm) != list(range(size)):
        raise NoMatch("is transposed by an invalid permutation", node)
    return [Channels(perm.index(channels.axis), channels.ids)]


def _unsqueeze(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    del way
    channels, source, after = held[0], node.inputs[0], rank(node.outputs[0])
    before = None if source is None else rank(source)
    named = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    wide = after if node.op_type == "Unsqueeze" else before
    axes = None if not wide else _axes(named, wide)
    if channels is None or before is None or after is None or axes is None:
        raise NoMatch(f"goes through {node.op_type} in an unknown way", node)
    if abs(after - before) != len(axes) or wide != max(after, before):
        raise NoMatch(f"goes through {node.op_type} to another rank", node)
    if node.op_type == "Unsqueeze":
        axes_after = [axis for axis in range(after) if axis not in axes]
        return [Channels(axes_after[channels.axis], channels.ids)]
    if channels.axis in axes:
        raise NoMatch("loses the axis of its channels", node)
    return [Channels(channels.axis - sum(axis < channels.axis for axis in axes), channels.ids)]


def _rotary(node: ir.Node, held: Held, way: Way) -> list[Channels]:
    """Tie the pairs of a rotary embedding, in every head."""
    channels, size, width = held[0], rank(node.outputs[0]), way.head_size
    tables = node.inputs[1:3] if node.domain == "" else node.inputs[2:4]
    halves = {static_dim(table, -1) for table in tables if table is not None}
    rotated = attribute_int(node, "rotary_embedding_dim", 0) or width
    if channels is None or any(channels is not None for channels in held[1:]):
        raise NoMatch("is rotated in an unknown way", node)
    if channels.axis != (size or 0) - 1 or len(channels.ids) % width or rotated > width:
        raise NoMatch("is rotated in an unknown layout", node)
    if halves != {rotated // 2} or rotated % 2:
        raise NoMatch(f"is rotated by tables of the width {sorted(map(str, halves))}", node)
    pairs = np.arange(rotated).reshape(2, -1)
    if attribute_int(node, "interleaved", 0):
        pairs = np.arange(rotated).reshape(-1, 2).T
    for head in channels.ids.reshape(-1, width):
        way.ties.tie(head[pairs[0]], head[pairs[1]])
    return [channels]


STEPS: Final[Mapping[str, Callable[[ir.Node, Held, Way], Collection[Channels]]]] = {
    **dict.fromkeys(("Identity", "Cast", "Neg"), _same),
    **dict.fromkeys(("Mul", "Div"), _product),
    **dict.fromkeys(("Add", "Sub"), _sum),
    **dict.fromkeys(("Unsqueeze", "Squeeze"), _unsqueeze),
    **dict.fromkeys(("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding"), _rotary),
    "Concat": _concat,
    "Slice": _slice,
    "Split": _split,
    "Reshape": _reshape,
    "Transpose": _transpose,
}
"""By operator: channels of the outputs, from those of the inputs (None where there are none)."""
