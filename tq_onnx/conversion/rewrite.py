"""The pass that replaces attention and caches by the two TurboQuant operators.

Per layer: two ``TurboQuantEncode`` (keys, values) and one ``TurboQuantDequantAttention``. The
caches become uint8 ``[B, N, S, W]`` with a static W; they keep their names, their place among
inputs and outputs and the names of their first three dimensions. Nodes that nothing needs any more
are removed, and so are those that read a cache though nothing ever needed them; all others stay as
they are: projections, norms, the output projection.

Questions for the shape of an old cache are answered from the new ones. Where the graph tells the
number of past tokens (``Recognition.lengths``), that is the answer for the sequence dimension too,
so that a model that takes positions from there works with caches of any capacity.

A graph that takes no caches gets empty ones to append to. A Slice that shortens a cache before it
is returned does the same to the new one. A model of opset 13 or 14 is declared to be of opset 15:
the operators that it may hold take further types and attributes there, and mean the same without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import onnx_ir as ir

from tq_onnx.conversion import bake
from tq_onnx.conversion.cachenodes import (
    SCOPE,
    answer,
    publish,
    shortened,
)
from tq_onnx.conversion.nodes import LayerNodes
from tq_onnx.conversion.past_length import LengthNodes, stated_length, tokens_of_rows
from tq_onnx.conversion.siteoperands import make_operands, make_result
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.liveness import live_nodes, nested_nodes
from tq_onnx.ops.domain import DOMAIN, MICROSOFT, VERSION
from tq_onnx.plan import LayerPlan, Plan, Role
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.match import Recognition
from tq_onnx.recognise.site import Site

_MICROSOFT_VERSION: Final = 1
_OLDEST_OPSET: Final = 15
"""``Shape`` with a range, in the nodes that a conversion adds."""


class ConvertPass(ir.passes.InPlacePass):
    """Converts a model according to a plan."""

    def __init__(self, plan: Plan, recognition: Recognition) -> None:
        super().__init__()
        self._plan = plan
        self._recognition = recognition
        lengths = recognition.lengths
        self._padding: ir.Value | None = None
        self._lengths = None if lengths is None else LengthNodes(lengths, plan.overlay_rows)

    def requires(self, model: ir.Model) -> None:
        """Require a complete recognition of this model, and a plan that is made from it."""
        recognition = self._recognition
        if recognition.misses or not recognition.sites:
            raise ir.passes.PreconditionError("the model was not recognised completely")
        names = [(site.key.present.name, site.value.present.name) for site in recognition.sites]
        if names != [(layer.key.present, layer.value.present) for layer in self._plan.layers]:
            raise ir.passes.PreconditionError("the plan was made for another model")
        if any(
            attention.node.graph is not model.graph
            for site in recognition.sites
            for attention in site.attentions
        ):
            raise ir.passes.PreconditionError("the recognition belongs to another model")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        graph = model.graph
        build = Builder(graph)
        live = live_nodes(graph.outputs)
        caches = [cache for site in self._recognition.sites for cache in (site.key, site.value)]
        stale = _downstream(cache.past for cache in caches if cache.past is not None)
        model.opset_imports[""] = max(model.opset_imports[""], _OLDEST_OPSET)
        self._prepare(build, graph)
        presents: dict[Cache, ir.Value] = {}
        order = {node: index for index, node in enumerate(graph)}
        for site, layer in zip(self._recognition.sites, self._plan.layers, strict=True):
            presents.update(self._replace(build, site, layer, order))
        for read in self._recognition.reads:
            lengths = None if read.site.counts_tokens else self._lengths
            answer(build, read, presents, lengths, self._plan.overlay_rows)
        for cache, present in presents.items():
            publish(graph, cache, shortened(build, cache, present))
        dead = (live | stale) - live_nodes(graph.outputs)
        # What reads a result that nothing needs any more was never needed itself.
        dead |= _downstream(value for node in dead for value in node.outputs)
        _remove(graph, dead)
        model.opset_imports[DOMAIN] = VERSION
        if MICROSOFT in build.domains:
            model.opset_imports.setdefault(MICROSOFT, _MICROSOFT_VERSION)
        bake.bake_functions(model, self._plan)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure uint8 caches, read only by our nodes and Shape, and a valid order of nodes."""
        inputs = {value.name: value for value in model.graph.inputs}
        outputs = {value.name: value for value in model.graph.outputs}
        for layer in self._plan.layers:
            for pair in layer.caches:
                values = [outputs.get(pair.present)]
                if pair.past is not None:
                    values.append(inputs.get(pair.past))
                for value in values:
                    if value is None:
                        raise ir.passes.PostconditionError(f"{pair.present} has lost its name")
                    if value.dtype is not ir.DataType.UINT8:
                        raise ir.passes.PostconditionError(f"cache {value.name} is not uint8")
                    _check_readers(value)
        _check_order(model.graph)

    def _prepare(self, build: Builder, graph: ir.Graph) -> None:
        """Make what needs nothing but graph inputs, in front of everything."""
        first = next(iter(graph))
        sites = self._recognition.sites
        with build.before(first, SCOPE):
            if self._lengths is not None:
                self._lengths.past_length(build)
                if any("S" in read.dims for read in self._recognition.reads):
                    self._lengths.total_length(build)
            else:
                for site in sites:
                    if not site.counts_tokens:
                        self._grown_length(build, site)
            if any(layer.has_padding for layer in self._plan.layers):
                self._padding = _left_padding(build, graph, self._plan)

    def _replace(
        self, build: Builder, site: Site, layer: LayerPlan, order: Mapping[ir.Node, int]
    ) -> dict[Cache, ir.Value]:
        scope = f"layers.{site.layer}.attention"
        places = [site.node, site.key.node, site.value.node]
        with build.before(min(places, key=order.__getitem__), scope):
            past_length = self._past_length(build, site)
        with build.before(site.node, scope):
            operands = make_operands(build, site)
        layer_nodes = LayerNodes(build, self._plan, site, layer, past_length, self._padding)
        presents, encoded = {}, {}
        roles: list[tuple[Cache, ir.Value, Role]] = [
            (site.key, operands.key, "key"),
            (site.value, operands.value, "value"),
        ]
        for cache, rows, role in sorted(roles, key=lambda entry: order[entry[0].node]):
            with build.before(cache.node, scope):
                encoded[role] = layer_nodes.vectors(cache, rows, role)
                presents[cache] = layer_nodes.encode(cache, encoded[role], role)
        caches = presents[site.key], presents[site.value]
        new = encoded["key"], encoded["value"]
        for count, attention in enumerate(site.attentions):
            with build.before(attention.node, f"{scope}_{count}" if count else scope):
                is_first = attention is site
                reader_operands = operands if is_first else make_operands(build, attention)
                attended = replace(layer_nodes, site=attention).attend(reader_operands, caches, new)
                result = make_result(build, attention, attended)
            if result.shape is None or attention.output.shape is not None:
                result.shape = attention.output.shape
            attention.output.replace_all_uses_with(result)
        return presents

    def _past_length(self, build: Builder, site: Site) -> ir.Value:
        length = stated_length(build, site)
        if length is not None:
            return length
        if self._lengths is not None:
            return self._lengths.past_length(build)
        return self._grown_length(build, site)

    def _grown_length(self, build: Builder, site: Site) -> ir.Value:
        """Return the past length of a growing cache: its size. Layers grow alike, unless cut."""
        sites = self._recognition.sites
        alike = not any(cache.cut for reader in sites for cache in (reader.key, reader.value))
        past = (sites[0] if alike else site).key.past
        assert past is not None  # a graph without caches counts its tokens
        overlay_rows = self._plan.overlay_rows
        return build.once(
            ("past_length", past),
            lambda: tokens_of_rows(build, build.dim(past, 2, "past_length"), overlay_rows),
        )


def _left_padding(build: Builder, graph: ir.Graph, plan: Plan) -> ir.Value:
    """Return the zeros that the mask of each sequence begins with: int64 ``[B]``."""
    name, floats = plan.interface.attention_mask, ir.DataType.FLOAT
    mask = next(value for value in graph.inputs if value.name == name)
    numbers = build.op(
        "Cast", [mask], "mask_numbers", dtype=floats, shape=[None, None], to=int(floats)
    )
    return build.op(
        "ArgMax",
        [numbers],
        "left_padding",
        dtype=ir.DataType.INT64,
        shape=[None],
        axis=1,
        keepdims=0,
    )


def _downstream(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return all nodes that read the values, or what is computed from them."""
    nodes: set[ir.Node] = set()
    pending = list(values)
    while pending:
        for use in pending.pop().uses():
            if use.node not in nodes:
                nodes.add(use.node)
                pending.extend(use.node.outputs)
    return nodes


def _remove(graph: ir.Graph, dead: set[ir.Node]) -> None:
    """Remove nodes, and initializers that only they used."""
    nodes = {node for node in dead if node.graph is graph}
    used = {value for node in nodes for value in _read(node) if value.is_initializer()}
    graph.remove(nodes, safe=True)
    for value in used:
        if not value.uses() and not value.is_graph_input() and not value.is_graph_output():
            graph.initializers.pop(value.name or "", None)


def _read(node: ir.Node) -> Iterable[ir.Value]:
    for item in (node, *nested_nodes(node)):
        yield from (value for value in item.inputs if value is not None)


def _check_readers(value: ir.Value) -> None:
    for use in value.uses():
        if use.node.domain != DOMAIN and use.node.op_type not in ("Shape", "Slice"):
            raise ir.passes.PostconditionError(f"{value.name} is read by {use.node.name}")


def _check_order(graph: ir.Graph) -> None:
    known = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise ir.passes.PostconditionError(f"{node.name} reads {value.name} too early")
        known.update(node.outputs)
