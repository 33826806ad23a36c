"""Follow every cache output: back to what makes it, forward to what computes with it.

Backwards, through nodes that change nothing, Casts that lose nothing, Transposes and Slices, to a
fused operator or an update (``tq_onnx.recognise.updates.find``). A graph that takes no caches has
no updates but those of zeros: otherwise the output is the new rows, perhaps turned after attention
has read them. Forwards, through views and constant factors, to the first matrix product or fused
operator (``tq_onnx.recognise.cacheviews``).
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import integers, is_empty
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import FUSED, kind
from tq_onnx.graph.values import holds, keeps_numbers, passes_through, rank, static_dim
from tq_onnx.recognise.caches import PRESENT, Anchor, Dims, Reach, Route, Update
from tq_onnx.recognise.cacheviews import follow
from tq_onnx.recognise.site import GraphView
from tq_onnx.recognise.updates.find import find_update

_FLAT: Final[Dims] = ("B", "S", "ND")
"""A cache of rank 3: heads side by side."""
_SCATTERS: Final = frozenset({"ScatterND", "ScatterElements", "TensorScatter"})
_VIEWS: Final = frozenset(
    {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Cast", "Slice", "Split", "Gather"}
)
_MAX_STEPS: Final = 16


def find_anchors(output: ir.Value) -> list[Anchor]:
    """Return all places where a cache output may be made, the nearest first.

    A Transpose or a Slice may belong to the update or stand behind it.
    """
    dims = PRESENT if rank(output) == 4 else _FLAT
    views: dict[ir.Value, Dims] = {output: dims}
    tail: list[ir.Node] = []
    cut: ir.Node | None = None
    anchors: list[Anchor] = []
    value = output
    for _ in range(_MAX_STEPS):
        node = value.producer()
        if node is None:
            break
        is_view = passes_through(node)
        if not is_view:
            anchors.append(Anchor(output, value, dims, node, dict(views), tuple(tail), cut))
        source = node.inputs[0] if node.inputs else None
        before = dims if is_view else _before(node, dims)
        if source is None or before is None:
            break
        if kind(node) == "Slice":
            if cut is not None:
                break
            cut = node
            views = {view: _shortened(held) for view, held in views.items()}
        value, dims = source, before
        views[value] = dims
        tail.append(node)
    return anchors


def reaches(anchors: list[Anchor], view: GraphView) -> list[Reach]:
    """Follow a cache, from the first of its anchors that makes one, to each of its readers."""
    for anchor in anchors:
        if kind(anchor.node) in FUSED:
            return [Reach(anchor, None, None)]
        update = find_update(anchor, view)
        if update is not None:
            return [Reach(anchor, update, route) for route in _routes(anchor, view)]
    anchor = anchors[0]
    if view.takes_caches:
        raise NoMatch(
            f"output {anchor.present.name} is made by {anchor.node.op_type}, "
            "which is not a known way to update a cache",
            anchor.node,
        )
    _refuse_other_pasts(anchor)
    for constant in anchors:
        along_tokens = (2, -2) if rank(anchor.present) == 4 else (1, -2)
        grown = kind(constant.node) == "Concat" and not _joins_nothing(constant.node)
        if kind(constant.node) in _SCATTERS or (
            grown and constant.node.attributes.get_int("axis", 0) in along_tokens
        ):
            raise NoMatch(
                f"cache {anchor.present.name} continues no input: the cache has become a constant",
                constant.node,
            )
    # Attention may read the new rows before they are turned to be returned.
    for candidate in anchors:
        if candidate.cut is None and _is_read(candidate.state, candidate, view):
            anchor = candidate
            break
    rows_dims = tuple("T" if dim == "S" else dim for dim in anchor.dims)
    update = Update(None, anchor.state, rows_dims, {})
    return [Reach(anchor, update, route) for route in _routes(anchor, view)]


def _joins_nothing(node: ir.Node) -> bool:
    """Return True if a Concat joins rows to empty caches, as transformers begins a cache."""
    return sum(not is_empty(value) for value in node.inputs) == 1


def _refuse_other_pasts(anchor: Anchor) -> None:
    """Refuse a graph that takes caches of another form, such as ``[B * N, P, D]``."""
    value: ir.Value | None = anchor.present
    while value is not None:
        node = value.producer()
        if node is None:
            if value.is_graph_input():
                raise NoMatch(f"cache {anchor.present.name} is a view of the input {value.name}")
            return
        if kind(node) in _SCATTERS or (kind(node) == "Concat" and len(node.inputs) > 1):
            for item in node.inputs:
                past = _viewed(item)
                if past is not None and past.is_graph_input():
                    raise NoMatch(
                        f"cache {anchor.present.name} continues the input {past.name}, "
                        f"which is of rank {rank(past)}, not [B, N, P, D]",
                        node,
                    )
            return
        value = node.inputs[0] if kind(node) in _VIEWS and node.inputs else None


def _viewed(value: ir.Value | None) -> ir.Value | None:
    """Return the value that another is a view or a part of."""
    while value is not None:
        node = value.producer()
        if node is None or kind(node) not in _VIEWS or not node.inputs:
            return value
        value = node.inputs[0]
    return None


def _routes(anchor: Anchor, view: GraphView) -> list[Route]:
    """Return the ways from the one value between update and output that is read elsewhere too."""
    read = [value for value in anchor.views if _is_read(value, anchor, view)]
    whole = [value for value in read if "C" not in anchor.views[value]]
    if len(read) > 1:
        readers = [node for value in read for node, _ in view.consumers(value)]
        names = ", ".join(node.op_type for node in readers)
        raise NoMatch(f"the cache is read more than once, by {names}", anchor.node)
    start = whole[0] if whole else anchor.state
    return follow(start, anchor.views[start], view, skip=anchor.tail)


def _is_read(value: ir.Value, anchor: Anchor, view: GraphView) -> bool:
    return any(
        node.op_type != "Shape" and node not in anchor.tail for node, _ in view.consumers(value)
    )


def _before(node: ir.Node, dims: Dims) -> Dims | None:
    """Return the dimensions before a Transpose, a Cast, a Slice along the tokens, a split of heads.

    Not before a Cast that rounds: attention that reads what is before it reads something else.
    """
    source = node.inputs[0] if node.inputs else None
    if keeps_numbers(node) and source is not None:
        exact = source.dtype is None or holds(node.outputs[0].dtype, source.dtype)
        return dims if exact else None
    if kind(node) == "Reshape" and dims == ("B", "S", "N", "D") and source is not None:
        sizes = [static_dim(node.outputs[0], 2), static_dim(node.outputs[0], 3)]
        width = static_dim(source, 2)
        fits = None in (width, *sizes) or width == (sizes[0] or 0) * (sizes[1] or 0)
        return _FLAT if rank(source) == 3 and fits else None
    if kind(node) == "Transpose":
        perm = node.attributes.get_ints("perm", ())
        if sorted(perm) != list(range(len(dims))):
            return None
        return tuple(dims[perm.index(axis)] for axis in range(len(dims)))
    if kind(node) == "Slice" and len(node.inputs) > 3:
        axes = integers(node.inputs[3])
        if axes is not None and len(axes) == 1 and dims[axes[0]] in ("S", "C"):
            return tuple("S" if dim == "C" else dim for dim in dims)
    return None


def _shortened(dims: Dims) -> Dims:
    return tuple("C" if dim == "S" else dim for dim in dims)
