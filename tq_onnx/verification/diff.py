"""``diff``: what a conversion changed in a graph, layer by layer and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir

from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.original import recognise_original
from tq_onnx.errors import UnsupportedModelError, VerificationError, located
from tq_onnx.plan import plan_in
from tq_onnx.targets.registry import target_of_plan


@dataclass(frozen=True)
class CacheChange:
    """A cache before and after.

    Attributes:
        name: of the graph input; of the output in a graph for first prompts.
        before: type and shape in the original, as ``float32[batch, 2, past, 64]``.
        after: in the converted model.
        bytes_before: of a token of one sequence.
        bytes_after: likewise.
    """

    name: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class OperatorCount:
    """Nodes of one operator; ``domain`` is empty for those of ONNX."""

    domain: str
    op_type: str
    before: int
    after: int


@dataclass(frozen=True)
class LayerChange:
    """A layer.

    Attributes:
        layer: its index.
        key: its key cache.
        value: its value cache.
        key_codec: codec of the keys.
        value_codec: likewise for values.
        removed: nodes of the original that are gone, by operator, ``after`` being 0; those up to
            the attention of this layer and behind that of the one before.
        added: nodes that are new, likewise.
    """

    layer: int
    key: CacheChange
    value: CacheChange
    key_codec: str
    value_codec: str
    removed: tuple[OperatorCount, ...]
    added: tuple[OperatorCount, ...]


@dataclass(frozen=True)
class InitializerChange:
    """A weight that was added, removed or changed; bytes are 0 where it is not there."""

    name: str
    type: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class DiffReport:
    """The result of ``diff``.

    Attributes:
        original: the original model.
        converted: its conversion.
        preset: of the conversion.
        layers: each layer.
        operators: operators with other numbers of nodes than before.
        nodes_before: nodes of the original.
        nodes_after: nodes of the converted model.
        initializers: weights that were added, removed or changed.
        bytes_per_token_before: cache bytes of a token of one sequence.
        bytes_per_token_after: likewise.
        window_bytes: cache bytes of the exact tokens of one sequence.
    """

    original: Path
    converted: Path
    preset: str
    layers: tuple[LayerChange, ...]
    operators: tuple[OperatorCount, ...]
    nodes_before: int
    nodes_after: int
    initializers: tuple[InitializerChange, ...]
    bytes_per_token_before: int
    bytes_per_token_after: int
    window_bytes: int


def diff(original: Path, converted: Path) -> DiffReport:
    """Compare the graphs of an original and of its conversion; neither is run."""
    loaded, after = load_decoder(original), load_decoder(converted)
    with located(converted):
        plan = plan_in(after.model.metadata_props)
    if plan is None:
        raise UnsupportedModelError(
            "this model was not converted by tq-onnx",
            where=str(converted),
            fix="give the original first and the converted model second",
        )
    target = target_of_plan(plan)
    if not target.has_operators:
        raise UnsupportedModelError(
            f"a model for {target.name} does not show its layers",
            where=str(converted),
            fix=f"`tq-onnx verify {original} {converted}` compares it with its original",
        )
    # Recognition sorts nodes and fills in shapes, but changes neither names nor numbers.
    known = recognise_original(loaded, original)
    known.expect_complete(original)
    sites = known.recognition.sites
    before = {value.name: value for value in _ports(loaded.model.graph)}
    names = {pair.past or pair.present for pair in plan.caches}
    if len(sites) != len(plan.layers) or not names <= before.keys():
        raise VerificationError(
            "the converted model was not made from this original", where=str(converted)
        )
    layers_found = converted_layers(after.model, plan)
    gone, new = _unlike(loaded.model.graph, after.model.graph)
    removed = _by_layer(loaded.model.graph, [site.node for site in sites], gone)
    added = _by_layer(after.model.graph, [layer.attention.node for layer in layers_found], new)
    now = {value.name: value for value in _ports(after.model.graph)}
    layers = []
    for index, layer in enumerate(plan.layers):
        key, value = (
            CacheChange(
                name := pair.past or pair.present,
                _type(before[name]),
                _type(now[name]),
                sites[index].kv_num_heads
                * sites[index].head_size
                * (before[name].dtype or sites[index].dtype).bitwidth
                // 8,
                layer.kv_num_heads * pair.row_bytes,
            )
            for pair in layer.caches
        )
        codecs = str(layer.key.codec), str(layer.value.codec)
        layers.append(LayerChange(layer.layer, key, value, *codecs, removed[index], added[index]))
    return DiffReport(
        loaded.path,
        after.path,
        plan.preset,
        tuple(layers),
        _counts(loaded.model.graph, after.model.graph),
        len(loaded.model.graph),
        len(after.model.graph),
        _initializers(loaded.model.graph, after.model.graph),
        known.bytes_per_token,
        plan.bytes_per_token,
        plan.window_bytes,
    )


def _ports(graph: ir.Graph) -> tuple[ir.Value, ...]:
    return (*graph.outputs, *graph.inputs)


def _type(value: ir.Value) -> str:
    kind = "unknown" if value.dtype is None else value.dtype.name.lower()
    shape = () if value.shape is None else value.shape
    return f"{kind}[{', '.join(str(dim) for dim in shape)}]"


def _operator(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type


def _unlike(before: ir.Graph, after: ir.Graph) -> tuple[set[ir.Node], set[ir.Node]]:
    """Return the nodes of each graph that the other lacks, by operator, names and outputs."""

    def name(node: ir.Node) -> tuple[object, ...]:
        return *_operator(node), tuple(value.name for value in node.outputs)

    ones, after_nodes = ({name(node): node for node in graph} for graph in (before, after))
    return (
        {node for key, node in ones.items() if key not in after_nodes},
        {node for key, node in after_nodes.items() if key not in ones},
    )


def _by_layer(
    graph: ir.Graph, attention: Sequence[ir.Node], nodes: set[ir.Node]
) -> list[tuple[OperatorCount, ...]]:
    """Count nodes by layer: those up to its attention; those behind the last one are of that."""
    places = {node: index for index, node in enumerate(graph)}
    ends = [-1, *(places[node] for node in attention)]
    ends[-1] = len(places)
    counts = []
    for begin, end in pairwise(ends):
        inside = Counter(_operator(node) for node in nodes if begin < places[node] <= end)
        counts.append(tuple(OperatorCount(*key, count, 0) for key, count in sorted(inside.items())))
    return counts


def _counts(before: ir.Graph, after: ir.Graph) -> tuple[OperatorCount, ...]:
    ones, after_counts = (Counter(map(_operator, graph)) for graph in (before, after))
    return tuple(
        OperatorCount(*key, ones[key], after_counts[key])
        for key in sorted({*ones, *after_counts})
        if ones[key] != after_counts[key]
    )


def _initializers(before: ir.Graph, after: ir.Graph) -> tuple[InitializerChange, ...]:
    changes = []
    for name in sorted({*before.initializers, *after.initializers}):
        ones, after_tensor = (
            graph.initializers[name].const_value if name in graph.initializers else None
            for graph in (before, after)
        )
        if ones is not None and after_tensor is not None and _same(ones, after_tensor):
            continue
        present = after_tensor if ones is None else ones
        if present is None:
            continue
        kind = f"{present.dtype.name.lower()}[{', '.join(map(str, present.shape))}]"
        sizes = (0 if tensor is None else tensor.nbytes for tensor in (ones, after_tensor))
        changes.append(InitializerChange(name, kind, *sizes))
    return tuple(changes)


def _same(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    if first.dtype != second.dtype or tuple(first.shape) != tuple(second.shape):
        return False
    if isinstance(first, ir.ExternalTensor) and isinstance(second, ir.ExternalTensor):
        places = [
            (Path(tensor.path).resolve(), tensor.offset, tensor.length)
            for tensor in (first, second)
        ]
        if places[0] == places[1]:
            return True
    return first.tobytes() == second.tobytes()
