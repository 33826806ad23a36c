"""Put the two converted decoders of a merged file together again, in the branches of its If.

Each branch holds all nodes of its decoder, those that stood in front of the If or behind it
included. Weights stand beside the If, once where both branches have the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NoReturn

import onnx_ir as ir

from tq_onnx.conversion.branches import find_switch
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.plan import METADATA_FIRST_PLAN, METADATA_PLAN, Plan

_APART: Final = (
    "convert decoder_model.onnx and decoder_with_past_model.onnx, which it was merged from"
)


def expect_continued(first: Plan, following: Plan) -> None:
    """Refuse a graph for first prompts whose caches the other one cannot go on with."""
    presents = [
        [(layer.key.present, layer.value.present) for layer in plan.layers]
        for plan in (first, following)
    ]
    if presents[0] != presents[1]:
        raise UnsupportedModelError(
            "the branches of the If do not make the same caches in the same order", fix=_APART
        )
    layer = first.unlike(following)
    if layer is not None:
        refuse_scales(layer)


def refuse_scales(layer: int) -> NoReturn:
    """Refuse scales that only one of the branches can take."""
    raise UnsupportedModelError(
        f"the caches of layer {layer} would hold different numbers in the branches of the If, "
        "because scales find a place in one of them only",
        fix="give `equalize=False`",
    )


def merge(whole: ir.Model, parts: dict[str, ir.Model], following: str) -> ir.Model:
    """Put converted branches in the place of those of a model, in place; return ``whole``.

    Args:
        parts: the conversion of each branch, by its name; they are used up.
    """
    graph = whole.graph
    switch = find_switch(graph)
    assert switch is not None  # or it would have no parts
    condition = switch.inputs[0]
    live = live_nodes([condition])
    weights = _Weights(live)
    outer = {value.name: value for value in graph.inputs}
    for value in parts[following].graph.inputs:
        outer[value.name].type, outer[value.name].shape = value.type, value.shape
    outputs = [
        ir.Value(name=value.name, type=value.type, shape=value.shape)
        for value in parts[following].graph.outputs
    ]
    known = {*outer, *(value.name for node in live for value in node.outputs)}
    for name, part in parts.items():
        for value in list(part.graph.inputs):
            value.replace_all_uses_with(outer[value.name], replace_graph_outputs=True)
        part.graph.inputs.clear()
        weights.take(part.graph, name)
        _make_all_outputs(part.graph)
    for part in parts.values():
        _rename(part.graph, {*known, *weights.names})
        _take_functions(whole, part)
    graph.outputs.clear()
    graph.remove([node for node in graph if node not in live], safe=False)
    graph.initializers.clear()
    for value in weights.values:
        graph.register_initializer(value)
    branches = [ir.AttrGraph(name, part.graph) for name, part in parts.items()]
    graph.append(ir.Node("", "If", [condition], branches, outputs=outputs, name=switch.name))
    graph.outputs.extend(outputs)
    whole.metadata_props.update(parts[following].metadata_props)
    (first,) = set(parts) - {following}
    whole.metadata_props[METADATA_FIRST_PLAN] = parts[first].metadata_props[METADATA_PLAN]
    return whole


class _Weights:
    """The initializers of the outer graph, as they are collected from the branches."""

    def __init__(self, nodes: Collection[ir.Node]) -> None:
        read = (value for node in nodes for value in node.inputs if value is not None)
        self._found = {value.name: value for value in read if value.is_initializer()}

    @property
    def names(self) -> Collection[str | None]:
        return self._found

    @property
    def values(self) -> Collection[ir.Value]:
        return self._found.values()

    def take(self, graph: ir.Graph, branch: str) -> None:
        """Take the initializers of a branch, which reads them where they are then."""
        for value in list(graph.initializers.values()):
            graph.initializers.pop(value.name or "")
            twin = self._found.get(value.name)
            if twin is not None and _same(twin, value):
                value.replace_all_uses_with(twin, replace_graph_outputs=True)
                continue
            name, number = value.name or "", 0
            while value.name in self._found:
                value.name = f"{name}.{branch}{number or ''}"
                number += 1
            self._found[value.name] = value


def _same(first: ir.Value, second: ir.Value) -> bool:
    first_tensor, second_tensor = first.const_value, second.const_value
    if first_tensor is second_tensor or first_tensor is None or second_tensor is None:
        return first_tensor is second_tensor
    if (first_tensor.dtype, first_tensor.shape) != (second_tensor.dtype, second_tensor.shape):
        return False
    if isinstance(first_tensor, ir.ExternalTensor) or isinstance(second_tensor, ir.ExternalTensor):
        return False  # both parts share what was not changed
    return first_tensor.tobytes() == second_tensor.tobytes()


def _make_all_outputs(graph: ir.Graph) -> None:
    """Copy outputs that no node of a branch makes, which a branch may not return."""
    for index, value in enumerate(graph.outputs):
        maker = value.producer()
        if maker is None or maker.graph is not graph:
            node = ir.Node("", "Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]


def _rename(graph: ir.Graph, outer_names: Collection[str | None]) -> None:
    """Rename values of a branch that have the name of one outside, which they may not hide."""
    results = set(graph.outputs)
    values = [value for node in graph for value in node.outputs if value.name]
    known = {*outer_names, *(value.name for value in values)}
    for value in values:
        if value.name in outer_names and value not in results:
            number = 1
            while f"{value.name}.{number}" in known:
                number += 1
            value.name = f"{value.name}.{number}"
            known.add(value.name)


def _take_functions(whole: ir.Model, part: ir.Model) -> None:
    for identifier, function in part.functions.items():
        existing = whole.functions.get(identifier)
        if existing is None:
            whole.functions[identifier] = function
        elif _serialised(existing) != _serialised(function):
            raise UnsupportedModelError(
                f"the branches of the If need two bodies of {identifier[1]}", fix=_APART
            )
    for domain, version in part.opset_imports.items():
        whole.opset_imports[domain] = max(version, whole.opset_imports.get(domain, version))
    whole.ir_version = max(whole.ir_version, part.ir_version)


def _serialised(function: ir.Function) -> bytes:
    content: bytes = ir.to_proto(function).SerializeToString(deterministic=True)
    return content
