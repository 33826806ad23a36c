"""A file that holds a decoder twice, in the branches of one If: once without caches, once with.

Optimum merges ``decoder_model.onnx`` and ``decoder_with_past_model.onnx`` into such a
``decoder_model_merged.onnx``, whose input ``use_cache_branch`` chooses. Attention inside of control
flow cannot be converted where it is. Each branch alone is a decoder like others, though: the graph
of a first prompt, which makes caches, and the graph that goes on with them. ``split`` takes such a
model apart; its parts are recognised and converted like the files that they were merged from, and
``tq_onnx.conversion.merging`` puts them together again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx_ir as ir

from tq_onnx.files.load import LoadedModel, load
from tq_onnx.graph.copying import copy_graph
from tq_onnx.graph.liveness import live_nodes, nested_nodes
from tq_onnx.graph.values import FLOATS, keeps_numbers, rank
from tq_onnx.plan import METADATA_FIRST_PLAN, METADATA_PLAN

BRANCHES: Final = ("then_branch", "else_branch")
_FEWEST: Final = 2
_CACHE_TYPES: Final = (*FLOATS, ir.DataType.UINT8)


@dataclass(frozen=True, eq=False)
class Parts:
    """The two decoders of one file."""

    first: LoadedModel  #: the graph of a first prompt, which takes no caches
    following: LoadedModel  #: the graph that goes on with its caches


def split(loaded: LoadedModel) -> Parts | None:
    """Take a merged model apart; it is not changed, and the parts share its weights.

    Returns:
        The parts; None for any other model: without an If that makes the caches, or where not one
        branch takes caches and the other none.
    """
    switch = find_switch(loaded.model.graph)
    if switch is None:
        return None
    try:
        parts = {name: _part(loaded, name) for name in BRANCHES}
    except Exception:  # onnx-ir has no closed set of errors for damaged graphs
        return None
    taking = [name for name, part in parts.items() if _caches(part.model.graph.inputs)]
    if len(taking) != 1:
        return None
    (following,) = taking
    (first,) = set(BRANCHES) - {following}
    for name, key in ((first, METADATA_FIRST_PLAN), (following, METADATA_PLAN)):
        metadata = parts[name].model.metadata_props
        plan = metadata.get(key)
        metadata.pop(METADATA_FIRST_PLAN, None)
        if plan is not None:
            metadata[METADATA_PLAN] = plan
    return Parts(parts[first], parts[following])


def load_decoder(path: Path) -> LoadedModel:
    """Load a model; of a merged one the part that goes on with caches."""
    loaded = load(path)
    parts = split(loaded)
    return loaded if parts is None else parts.following


def load_again(loaded: LoadedModel) -> LoadedModel:
    """Read a model once more, or the same part of it."""
    parts = None if not loaded.branch else split(load(loaded.path))
    if parts is None:
        return load(loaded.path)
    return parts.first if parts.first.branch == loaded.branch else parts.following


def find_switch(graph: ir.Graph) -> ir.Node | None:
    """Return the If that makes the caches of a graph, chosen by an input; None if there is none."""
    makers = [node for value in _caches(graph.outputs) if (node := _maker(value)) is not None]
    switches = [node for node in makers if (node.domain, node.op_type) == ("", "If")]
    if len(switches) < _FEWEST or len(set(switches)) != 1:
        return None
    switch = switches[0]
    condition = switch.inputs[0]
    is_input = condition is not None and all(
        not node.inputs or not _caches(node.inputs) for node in live_nodes([condition])
    )
    whole = all(
        name in switch.attributes
        and len(switch.attributes[name].as_graph().outputs) == len(switch.outputs)
        for name in BRANCHES
    )
    return switch if is_input and whole else None


def _maker(value: ir.Value) -> ir.Node | None:
    """Return the node that makes a value, which other nodes may pass on in another precision."""
    node = value.producer()
    while node is not None and keeps_numbers(node):
        passed = node.inputs[0]
        node = None if passed is None else passed.producer()
    return node


def _caches(values: object) -> list[ir.Value]:
    """Return the values that may be caches, by their type."""
    return [
        value
        for value in values  # type: ignore[attr-defined]
        if value is not None and value.dtype in _CACHE_TYPES and rank(value) == 4
    ]


def _part(loaded: LoadedModel, name: str) -> LoadedModel:
    model = copy_graph(loaded.model)
    graph = model.graph
    switch = find_switch(graph)
    assert switch is not None  # the clone has what the model has
    branch = switch.attributes[name].as_graph()
    for value in list(branch.initializers.values()):
        branch.initializers.pop(value.name or "")
        graph.register_initializer(value)
    nodes = list(branch)
    results = list(branch.outputs)
    branch.outputs.clear()
    branch.remove(nodes)
    graph.insert_before(switch, nodes)
    inside = set(nodes)
    for output, result in zip(switch.outputs, results, strict=True):
        replacement = result
        if replacement.producer() not in inside or replacement.is_graph_output():
            node = ir.Node("", "Identity", [result])
            graph.insert_before(switch, [node])
            replacement = node.outputs[0]
        replacement.name, replacement.type = output.name, output.type or replacement.type
        replacement.shape = output.shape or replacement.shape
        output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    for node in nested_nodes(switch):
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)  # or what it reads would seem to be read
    graph.remove(switch, safe=True)
    live = live_nodes(graph.outputs)
    graph.remove([node for node in graph if node not in live], safe=True)
    for value in list(graph.initializers.values()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(value.name or "")
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    return replace(loaded, model=model, branch=name)
