"""Recognises attention: all layers, each by a dialect, or reasons why not.

The search is anchored on the caches: graph outputs of rank 4. Each belongs, by the node that makes
it, to one dialect (``tq_onnx.graph.dialects``); two of them make a layer, in graph order. Names
play no part, and neither does the order of nodes that do not depend on each other.

After that the whole graph is looked at once more: what would still be computed if attention and
caches were replaced? Whoever among that reads an old cache may only ask for its shape
(``ShapeRead``); any other reader is a reason to refuse, and so is attention that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.errors import AlreadyConvertedError
from tq_onnx.graph.dialects import dialects
from tq_onnx.graph.dialects.constants import attribute_int
from tq_onnx.graph.dialects.site import (
    FLOATS,
    Anchor,
    Dims,
    GraphView,
    NoMatch,
    Site,
    passes_through,
    rank,
)
from tq_onnx.graph.interface import Lengths, find_lengths, find_roles
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.nocache import is_attention, why_no_caches
from tq_onnx.graph.plan import METADATA_PLAN, Interface
from tq_onnx.ops.domain import DOMAIN

MIN_OPSET: Final = 15
"""``Shape`` with a range, in the nodes that a conversion adds."""

_CACHE_TYPES: Final = (*FLOATS, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)
_READABLE: Final = frozenset("BNGHPSD1")


@dataclass(frozen=True)
class NearMiss:
    """Something that stands in the way of a conversion.

    Attributes:
        layer: index of the layer; None if it concerns the whole model.
        node: name of the node; empty if there is none.
        reason: what was found, as a clause.
    """

    layer: int | None
    node: str
    reason: str

    def __str__(self) -> str:
        """One clause that names layer, node and reason."""
        node = f" (node {self.node})" if self.node else ""
        return self.reason if self.layer is None else f"layer {self.layer}{node}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ShapeRead:
    """A node that will outlive the conversion and asks for the shape of an old cache.

    Attributes:
        node: the Shape node.
        site: the layer.
        is_key: whether it is the layer's key cache.
        of_past: whether the past itself is asked, which stays where it is.
        dims: meaning of the dimensions that it returns.
    """

    node: ir.Node
    site: Site
    is_key: bool
    of_past: bool
    dims: Dims


@dataclass(frozen=True, eq=False)
class Recognition:
    """What was found in a model.

    Attributes:
        sites: the layers, in graph order.
        misses: reasons not to convert; the model is convertible iff there are none.
        interface: names of the other inputs and outputs; None if they were not found.
        lengths: where the past length is read in models whose attention does not tell it.
        reads: surviving questions for the shape of a cache.
        fixed_capacity: whether the converted model may run on caches larger than their contents.
    """

    sites: tuple[Site, ...]
    misses: tuple[NearMiss, ...]
    interface: Interface | None = None
    lengths: Lengths | None = None
    reads: tuple[ShapeRead, ...] = ()
    fixed_capacity: bool = False


def recognise(model: ir.Model) -> Recognition:
    """Recognises all attention layers of a decoder.

    Args:
        model: from ``onnx_ir.load``; not changed.

    Raises:
        AlreadyConvertedError: the model holds TurboQuant caches.
    """
    _refuse_converted(model)
    graph = model.graph
    opset = graph.opset_imports.get("", 0)
    live = live_nodes(graph.outputs)
    view = GraphView(graph, opset, live)
    layers = _layers(graph)
    if not layers:
        return Recognition((), (NearMiss(None, "", why_no_caches(view)),))
    sites: list[Site] = []
    misses: list[NearMiss] = []
    if opset < MIN_OPSET:
        reason = f"its opset {opset} is too old: export it with opset 18 or newer"
        misses.append(NearMiss(None, "", reason))
    for layer, anchors in enumerate(layers):
        try:
            sites.append(_match(anchors, view))
        except NoMatch as miss:
            node = miss.node or anchors[0].node
            misses.append(NearMiss(layer, _label(node), miss.reason))
    if misses:
        return Recognition(tuple(sites), tuple(misses))
    roles = find_roles(graph, sites)
    if roles is None:
        reason = "no input for tokens (or their embeddings), or no output for logits, was found"
        return Recognition(tuple(sites), (NearMiss(None, "", reason),))
    lengths = None if all(site.counts_tokens for site in sites) else find_lengths(roles, sites)
    reads, problems = _survivors(view, sites)
    return Recognition(
        tuple(sites),
        tuple(problems),
        roles.interface(),
        lengths,
        tuple(reads),
        lengths is not None or all(site.counts_tokens for site in sites),
    )


def _refuse_converted(model: ir.Model) -> None:
    if METADATA_PLAN in model.metadata_props or any(
        node.domain == DOMAIN for node in model.graph.all_nodes()
    ):
        raise AlreadyConvertedError(
            "the model's caches are TurboQuant caches already",
            fix="convert the original model instead",
        )


def _layers(graph: ir.Graph) -> list[tuple[Anchor, ...]]:
    """The caches in graph order, two by two."""
    order = {node: index for index, node in enumerate(graph)}
    found = []
    for position, output in enumerate(graph.outputs):
        if rank(output) != 4 or output.dtype not in _CACHE_TYPES:
            continue
        state, passed = output, [output]
        node = state.producer()
        while node is not None and passes_through(node) and node.inputs[0] is not None:
            state = node.inputs[0]
            passed.append(state)
            node = state.producer()
        if node is not None:
            found.append((order[node], position, output, state, node, tuple(passed)))
    found.sort(key=lambda item: item[:2])
    if not any(rank(value) == 4 and value.dtype in _CACHE_TYPES for value in graph.inputs):
        return []
    anchors = [Anchor(index // 2, *item[2:]) for index, item in enumerate(found)]
    return [tuple(anchors[index : index + 2]) for index in range(0, len(anchors), 2)]


def _match(anchors: Sequence[Anchor], view: GraphView) -> Site:
    if len(anchors) != 2:
        raise NoMatch(f"cache {anchors[0].present.name} has no partner", anchors[0].node)
    for dialect in dialects():
        if dialect.claims(anchors[0]):
            return dialect.match((anchors[0], anchors[1]), view)
    node = anchors[0].node
    names = ", ".join(dialect.name for dialect in dialects())
    raise NoMatch(
        f"output {anchors[0].present.name} is made by {node.op_type}, "
        f"which is not a cache of a known form ({names})",
        node,
    )


def _survivors(view: GraphView, sites: Sequence[Site]) -> tuple[list[ShapeRead], list[NearMiss]]:
    """What a conversion would leave: readers of the old caches, and attention left out."""
    graph = view.graph
    caches = [(site, cache) for site in sites for cache in (site.key, site.value)]
    presents = {cache.present for _, cache in caches}
    held = {value: (site, cache) for site, cache in caches for value in cache.views}
    outputs = [value for value in graph.outputs if value not in presents]
    problems = [
        NearMiss(held[value][0].layer, "", f"output {value.name} is its cache in another form")
        for value in outputs
        if value in held
    ]
    if len(presents) != len(caches) or len({cache.past for _, cache in caches}) != len(caches):
        problems.append(NearMiss(None, "", "two layers share one cache"))
    surviving = live_nodes(
        [*outputs, *(value for site in sites for value in site.inputs())],
        cut={*(site.output for site in sites), *held},
    )
    problems += [
        NearMiss(None, _label(node), f"attention {_label(node)} has no cache that was recognised")
        for node in graph
        if node in surviving and _rank_of_scores(node) in (4, None) and is_attention(node, view)
    ]
    reads = []
    for value, (site, cache) in held.items():
        for use in value.uses():
            if use.node not in surviving:
                continue
            dims = _asked(use.node, cache.views[value])
            answer = use.node.outputs[0]
            if dims is None or use.node.graph is not graph:
                reason = f"its cache {cache.present.name} is also read by {use.node.op_type}"
                problems.append(NearMiss(site.layer, _label(use.node), reason))
            elif answer.is_graph_output():
                reason = f"output {answer.name} is the shape of its cache {cache.present.name}"
                problems.append(NearMiss(site.layer, _label(use.node), reason))
            else:
                of_past = value is cache.past
                reads.append(ShapeRead(use.node, site, cache is site.key, of_past, dims))
    return reads, problems


def _label(node: ir.Node) -> str:
    """A node's name, or that of its output where exporters leave nodes nameless."""
    return node.name or node.outputs[0].name or node.op_type


def _rank_of_scores(node: ir.Node) -> int | None:
    """Rank of what a softmax normalises: routers of experts have less than attention's 4."""
    scores = node.inputs[0] if node.op_type == "Softmax" and node.inputs else None
    return None if scores is None else rank(scores)


def _asked(node: ir.Node, dims: Dims) -> Dims | None:
    """The dimensions that a Shape node returns; None if it is another node, or they are unknown."""
    if (node.domain, node.op_type) != ("", "Shape"):
        return None
    asked = dims[attribute_int(node, "start", 0) :]
    if "end" in node.attributes:
        asked = dims[attribute_int(node, "start", 0) : attribute_int(node, "end", 0)]
    return asked if asked and all(dim in _READABLE for dim in asked) else None
