"""Recognise attention: all layers, each by a dialect, or reasons why not.

The search is anchored on the caches: graph outputs of rank 4, or of rank 3 where a TensorScatter
makes them. Each is followed back to what makes it and forward to what computes with it
(``tq_onnx.recognise.trace``); that node belongs to one dialect (``tq_onnx.recognise.dialects``),
which tells the attention that a cache is a part of. Two caches of one attention make a layer;
layers are counted in graph order. Names play no part, and neither does the order of nodes that do
not depend on each other.

After that the whole graph is looked at once more (``tq_onnx.recognise.leftovers``): other readers
of the old caches are a reason to refuse, and so is attention that is left. Only attention over what
an encoder makes stays, and so do states of recurrent layers (``tq_onnx.recognise.passthrough``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from tq_onnx.errors import AlreadyConvertedError
from tq_onnx.graph.liveness import live_nodes, read_too_early
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.graph.values import FLOATS, label, rank, static_dim
from tq_onnx.ops.domain import DOMAIN, MICROSOFT
from tq_onnx.plan import METADATA_PLAN, Interface
from tq_onnx.recognise.attention.tokensizes import TokenSizes
from tq_onnx.recognise.caches import Anchor, Reach
from tq_onnx.recognise.cacheviews import refuse_nested
from tq_onnx.recognise.chunks import chunk_tokens
from tq_onnx.recognise.dialects import dialects
from tq_onnx.recognise.interface import find_roles
from tq_onnx.recognise.leftovers import NearMiss, ShapeRead, find_leftovers
from tq_onnx.recognise.lengths import Lengths, find_lengths
from tq_onnx.recognise.nocache import why_no_caches
from tq_onnx.recognise.passthrough import Encoder, encoder_inputs, find_states
from tq_onnx.recognise.sharing import share_caches
from tq_onnx.recognise.site import Dialect, GraphView, Site
from tq_onnx.recognise.trace import find_anchors, reaches
from tq_onnx.recognise.updates.tensorscatter import is_flat_cache

MIN_OPSET: Final = 13
"""The oldest opset whose later changes can be taken over: see ``rewrite``."""

_PAGED: Final = f"{MICROSOFT}.PagedAttention"
_UPDATES: Final = ("Concat", "ScatterND", "TensorScatter")
_CACHE_TYPES: Final = (*FLOATS, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)


@dataclass(frozen=True, eq=False)
class Recognition:
    """The result of recognition."""

    sites: tuple[Site, ...]  #: the layers that make caches, in graph order
    #: reasons not to convert; the model is convertible iff there are none
    misses: tuple[NearMiss, ...]
    #: names of the other inputs and outputs; None if they were not found
    interface: Interface | None = None
    #: where the past length is read in models whose attention does not tell it
    lengths: Lengths | None = None
    reads: tuple[ShapeRead, ...] = ()  #: remaining questions for the shape of a cache
    #: whether the converted model may run on caches larger than their contents
    fixed_capacity: bool = False


def recognise(model: ir.Model) -> Recognition:
    """Recognise all attention layers of a decoder."""
    _refuse_converted(model)
    graph = model.graph
    reason = _unusable(graph)
    if reason:
        return Recognition((), (NearMiss(None, "", reason),))
    fill_shapes(model)
    opset = graph.opset_imports.get("", 0)
    live = live_nodes(graph.outputs)
    view = GraphView(graph, opset, live, _takes_caches(graph))
    encoder = Encoder(view)
    outputs = _cache_outputs(graph, encoder)
    reason = "" if outputs else why_no_caches(view)
    if reason:
        return Recognition((), (NearMiss(None, "", reason),))
    sites, misses, passed_over = _layers(outputs, view, encoder)
    if not sites:
        misses = misses or passed_over
    if opset < MIN_OPSET:
        reason = (
            f"opset {opset} is too old: export it with opset {MIN_OPSET} or newer, or convert the "
            "file with onnx.version_converter, after shape inference (docs/exports.md)"
        )
        misses.insert(0, NearMiss(None, "", reason))
    if misses:
        return Recognition(tuple(sites), tuple(misses))
    layers, sites = sites, [attention for site in sites for attention in site.attentions]
    roles = find_roles(graph, sites)
    if roles is None:
        reason = "no tokens or embeddings as input, or no logits [B, tokens, vocabulary] as output"
        return Recognition(tuple(layers), (NearMiss(None, "", reason),))
    counted = all(site.counts_tokens for site in sites)
    shortened = any(cache.cut for site in sites for cache in (site.key, site.value))
    seen = TokenSizes(model, roles.tokens, sites)
    lengths = None if counted or shortened else find_lengths(roles, sites, seen)
    if lengths is None and not counted and not shortened:
        roles = roles.without_a_mask_by_use()
    reads, problems = find_leftovers(view, sites, encoder)
    if problems and passed_over:
        problems = passed_over
    problems += [
        NearMiss(site.layer, label(site.node), complaint)
        for site in sites
        if (complaint := seen.complaint(site))
    ]
    caches = _caches_of(sites)
    states = find_states(view, {*caches, roles.logits}, encoder)
    interface = replace(
        roles.interface(),
        states=states,
        right_padding=roles.right_padding and not states,
        call_tokens=chunk_tokens(graph) if states else None,
    )
    extra = encoder_inputs(graph, interface, caches)
    return Recognition(
        tuple(layers),
        tuple(problems),
        replace(interface, fed=(*interface.fed, *extra)),
        lengths,
        tuple(reads),
        view.takes_caches
        and not shortened
        and (counted or lengths is not None)
        and not any(_asks_a_capacity(read) for read in reads),
    )


def _sorted(graph: ir.Graph) -> tuple[ir.Node, ir.Value] | None:
    """Sort a graph that is not in topological order, as float16 converters leave it.

    Returns:
        A node in a circle and what it reads of it; None if there is no circle.
    """
    early = read_too_early(graph)
    if early is not None:
        with suppress(ValueError):
            graph.sort()
            early = read_too_early(graph)
    return early


def _refuse_converted(model: ir.Model) -> None:
    if METADATA_PLAN in model.metadata_props or any(
        node.domain == DOMAIN for node in model.graph.all_nodes()
    ):
        raise AlreadyConvertedError(
            "the model's caches are TurboQuant caches already",
            fix="convert the original model instead",
        )


def _looks_like_a_cache(value: ir.Value) -> bool:
    return value.dtype in _CACHE_TYPES and (rank(value) == 4 or is_flat_cache(value))


def _takes_caches(graph: ir.Graph) -> bool:
    """Return True if an input looks like a cache that is returned, and not like a mask."""
    returned = [value for value in graph.outputs if _looks_like_a_cache(value)]
    return any(
        _looks_like_a_cache(value)
        and (not returned or any(_may_continue(value, output) for output in returned))
        for value in graph.inputs
    )


def _may_continue(past: ir.Value, present: ir.Value) -> bool:
    """Return True if the heads and their size are the same as far as the graph tells."""
    sizes = [(static_dim(past, axis), static_dim(present, axis)) for axis in (1, 3)]
    return rank(past) != rank(present) or all(
        before == after or None in (before, after) for before, after in sizes
    )


def _cache_outputs(graph: ir.Graph, encoder: Encoder) -> list[list[Anchor]]:
    """Return the outputs that look like caches, as what may make them, in graph order.

    What an encoder makes grows with no token, and is none.
    """
    order = {node: index for index, node in enumerate(graph)}
    outputs = []
    for position, output in enumerate(graph.outputs):
        anchors = find_anchors(output) if _looks_like_a_cache(output) else []
        grows = any(anchor.node.op_type in _UPDATES for anchor in anchors)
        if anchors and (grows or not encoder.makes(output)):
            outputs.append((order[anchors[0].node], position, anchors))
    outputs.sort(key=lambda item: item[:2])
    return [anchors for _, _, anchors in outputs]


def _layers(
    outputs: Sequence[list[Anchor]], view: GraphView, encoder: Encoder
) -> tuple[list[Site], list[NearMiss], list[NearMiss]]:
    """Return the layers, by their attention, and the first reason for each that is none.

    The last are reasons why states are no caches, which matter only if attention is left.
    """
    states = {pair.present for pair in find_states(view, (), encoder)}
    passed_over: list[NearMiss] = []
    parts: dict[ir.Node, list[tuple[int, Dialect, Reach]]] = {}
    misses: dict[int, NearMiss] = {}
    for position, anchors in enumerate(outputs):
        try:
            readers = [_read_by(reached, view) for reached in reaches(anchors, view)]
        except NoMatch as miss:
            near = _near_miss(position // 2, miss, anchors[0])
            if anchors[0].present.name in states:
                passed_over.append(near)
            else:
                misses.setdefault(position // 2, near)
        else:
            for attention, dialect, reached in readers:
                parts.setdefault(attention, []).append((position, dialect, reached))
    order = {node: index for index, node in enumerate(view.graph)}
    sites = []
    for count, attention in enumerate(sorted(parts, key=order.__getitem__)):
        caches = parts[attention]
        layer = caches[0][0] // 2 if misses else count
        try:
            sites.append(_site(layer, caches, attention, view))
        except NoMatch as miss:
            misses.setdefault(layer, _near_miss(layer, miss, caches[0][2].anchor))
    try:
        sites = share_caches(sites, order)
    except NoMatch as miss:
        misses.setdefault(
            0, NearMiss(None, "" if miss.node is None else label(miss.node), miss.reason)
        )
    return sites, [misses[layer] for layer in sorted(misses)], passed_over


def _read_by(reached: Reach, view: GraphView) -> tuple[ir.Node, Dialect, Reach]:
    """Return the attention that reads a cache, and its form."""
    dialect = _dialect(reached)
    attention = dialect.attention(reached, view)
    refuse_nested(attention, view)
    return attention, dialect, reached


def _site(
    layer: int,
    caches: Sequence[tuple[int, Dialect, Reach]],
    attention: ir.Node,
    view: GraphView,
) -> Site:
    names = ", ".join(str(reached.anchor.present.name) for _, _, reached in caches)
    if len(caches) == 1:
        raise NoMatch(f"cache {names} has no partner", attention)
    if len({reached.anchor.present for _, _, reached in caches}) < len(caches):
        raise NoMatch(f"a cache is read more than once by one attention ({names})", attention)
    (_, dialect, first), (_, second_dialect, second) = caches[:2]
    if len(caches) > 2 or dialect is not second_dialect:
        raise NoMatch(f"the attention has the caches {names}, not one of keys and one of values")
    return dialect.match(layer, (first, second), view)


def _dialect(reached: Reach) -> Dialect:
    for dialect in dialects():
        if dialect.claims(reached):
            return dialect
    reader = reached.reader
    names = ", ".join(dialect.name for dialect in dialects())
    raise NoMatch(
        f"the cache {reached.anchor.present.name} goes into {reader.op_type}, "
        f"which is not attention of a known form ({names})",
        reader,
    )


def _unusable(graph: ir.Graph) -> str:
    """Return why no layer of a graph is looked at; empty if they are."""
    early = _sorted(graph)
    if early is not None:
        node, value = early
        return f"node {label(node)} reads {value.name}, which depends on it: export the model again"
    for each in graph:
        if kind(each) == _PAGED:
            return "the model was exported with pages: export it without use_paged_attention"
        # The first input of all operators but Loop is required.
        if None in each.inputs[:1] and each.op_type != "Loop":
            return f"node {label(each)} lacks its first input: export the model again"
    return ""


def _near_miss(layer: int, miss: NoMatch, anchor: Anchor) -> NearMiss:
    return NearMiss(layer, label(miss.node or anchor.node), miss.reason)


def _caches_of(sites: Sequence[Site]) -> set[ir.Value]:
    caches = [cache for site in sites for cache in (site.key, site.value)]
    return {value for cache in caches for value in (cache.past, cache.present) if value is not None}


def _asks_a_capacity(read: ShapeRead) -> bool:
    """Return True if a graph counts tokens by the size of a growing cache, and reads it."""
    cache = read.site.key if read.is_key else read.site.value
    grows = cache.update is None or cache.update.past_length is None
    return read.site.counts_tokens and grows and bool({"P", "S"} & {*read.dims})
