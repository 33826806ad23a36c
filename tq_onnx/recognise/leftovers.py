"""Find what a conversion would leave: readers of the old caches, and other attention.

What would still be computed if attention and caches were replaced? A reader of an old cache among
those nodes may only ask for its shape; attention among them may read what an encoder has made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.values import keeps_numbers, label, rank
from tq_onnx.recognise.caches import Dims
from tq_onnx.recognise.nocache import is_attention
from tq_onnx.recognise.passthrough import Encoder
from tq_onnx.recognise.role_conflicts import role_conflicts
from tq_onnx.recognise.site import GraphView, Site

_READABLE: Final = frozenset({*"BNGHPSD1", "BN", "BH", "ND", "HD"})


@dataclass(frozen=True)
class NearMiss:
    """Something that stands in the way of a conversion."""

    layer: int | None  #: index of the layer; None if it concerns the whole model
    node: str  #: name of the node; empty if there is none
    reason: str  #: what was found, as a clause

    def __str__(self) -> str:
        """Return one clause that names layer, node and reason."""
        node = f" (node {self.node})" if self.node else ""
        return self.reason if self.layer is None else f"layer {self.layer}{node}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ShapeRead:
    """A node that will outlive the conversion and asks for the shape of an old cache."""

    node: ir.Node
    site: Site  #: the layer
    is_key: bool  #: whether it is the layer's key cache
    of_past: bool  #: whether the past itself is asked, which stays where it is
    dims: Dims  #: meaning of the dimensions that it returns


def find_leftovers(
    view: GraphView, sites: Sequence[Site], encoder: Encoder
) -> tuple[list[ShapeRead], list[NearMiss]]:
    """Find what a conversion would leave: readers of the old caches, and other attention."""
    graph = view.graph
    owners = {cache: site for site in sites for cache in (site.key, site.value)}
    caches = [(site, cache) for cache, site in owners.items()]
    presents = {cache.present for cache in owners}
    held = {
        value: (site, cache, dims)
        for site, cache in caches
        for value, dims in _in_any_precision(cache.views, graph).items()
    }
    outputs = [value for value in graph.outputs if value not in presents]
    problems = [
        NearMiss(held[value][0].layer, "", f"output {value.name} is the cache in another form")
        for value in outputs
        if value in held
    ]
    pasts = [cache.past for _, cache in caches if cache.past is not None]
    if len(presents) != len(caches) or len(set(pasts)) != len(pasts):
        problems.append(NearMiss(None, "", "two layers share one cache"))
    remaining = live_nodes(
        [
            *outputs,
            *(value for site in sites for value in site.inputs),
            *(value for _, cache in caches if cache.cut for value in cache.cut.inputs[1:]),
            *(value for _, cache in caches if cache.update for value in cache.update.sources),
        ],
        cut={*(site.output for site in sites), *held},
    )
    problems += [
        NearMiss(None, label(node), f"attention {label(node)} has no cache that was recognised")
        for node in graph
        if node in remaining
        and _rank_of_scores(node) in (4, None)
        and is_attention(node, view)
        and not encoder.is_attended_by(node)
    ]
    problems += [NearMiss(*conflict) for conflict in role_conflicts(sites, view)]
    reads = []
    for value, (site, cache, held_dims) in held.items():
        for use in value.uses():
            if use.node not in remaining or use.node.outputs[0] in held:
                continue
            dims = _asked(use.node, held_dims)
            answer = use.node.outputs[0]
            if dims is None or use.node.graph is not graph:
                reason = f"the cache {cache.present.name} is also read by {use.node.op_type}"
                problems.append(NearMiss(site.layer, label(use.node), reason))
            elif answer.is_graph_output():
                reason = f"output {answer.name} is the shape of the cache {cache.present.name}"
                problems.append(NearMiss(site.layer, label(use.node), reason))
            else:
                of_past = cache.past is not None and value is cache.past
                reads.append(ShapeRead(use.node, site, cache is site.key, of_past, dims))
    return reads, problems


def _in_any_precision(views: Mapping[ir.Value, Dims], graph: ir.Graph) -> dict[ir.Value, Dims]:
    """Return the views of a cache, and those that a Cast makes of them for a reader of its own."""
    forms = dict(views)
    pending = list(views)
    while pending:
        value = pending.pop()
        for use in value.uses():
            output = use.node.outputs[0]
            if keeps_numbers(use.node) and use.node.graph is graph and output not in forms:
                forms[output] = forms[value]
                pending.append(output)
    return forms


def _rank_of_scores(node: ir.Node) -> int | None:
    """Return the rank of a softmax's input: routers of experts have less than attention's 4."""
    scores = node.inputs[0] if node.op_type == "Softmax" and node.inputs else None
    return None if scores is None else rank(scores)


def _asked(node: ir.Node, dims: Dims) -> Dims | None:
    """Return the dimensions that a Shape node returns; None for other nodes, or unknown ones."""
    if (node.domain, node.op_type) != ("", "Shape"):
        return None
    part = dims[attribute_int(node, "start", 0) :]
    if "end" in node.attributes:
        part = dims[attribute_int(node, "start", 0) : attribute_int(node, "end", 0)]
    return part if part and all(dim in _READABLE for dim in part) else None
