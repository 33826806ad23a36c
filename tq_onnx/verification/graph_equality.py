"""Two graphs compared, node by node and tensor by tensor, without running them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.values import label
from tq_onnx.ops.domain import DOMAIN

_ROUNDING: Final = 1e-6


def is_same_graph(model: ir.Model, second: ir.Model) -> bool:
    """Return whether two models have the same nodes, in the same order, between the same values.

    Functions and versions of operators are compared too, but for the bodies of our own operators.
    Tensors are compared by ``changed_tensors``; here only their names.
    """
    for left_model, right_model in ((model, second), (second, model)):
        missing = set(left_model.graph.initializers) - set(right_model.graph.initializers)
        if any(left_model.graph.initializers[name].uses() for name in missing):
            return False
        if changed_functions(left_model, right_model):
            return False
    same_opsets = dict(model.graph.opset_imports) == dict(second.graph.opset_imports)
    return same_opsets and _is_same(model.graph, second.graph)


def changed_tensors(model: ir.Model, second: ir.Model) -> list[str]:
    """Name the initializers that both models have and that hold other numbers.

    Of external data only what lies at different places is read.
    """
    second_initializers = second.graph.initializers
    return [
        f"{name} holds other numbers"
        for name, value in model.graph.initializers.items()
        if name in second_initializers
        and not _same_tensor(
            value.const_value, second_initializers[name].const_value, ours=_is_ours(name)
        )
    ]


def names_in(model: ir.Model) -> frozenset[str]:
    """Return the names of all values of a graph, those inside its branches not among them."""
    graph = model.graph
    computed = (value for node in graph for value in node.outputs)
    values = (*graph.inputs, *graph.initializers.values(), *computed)
    return frozenset(value.name for value in values if value.name)


def changed_functions(model: ir.Model, second: ir.Model) -> list[str]:
    """Name the functions of another model that a model lacks or has otherwise, but for our own."""
    return [
        f"the function {identifier[1]} is another"
        for identifier, function in second.functions.items()
        if function.domain != DOMAIN
        and not (
            identifier in model.functions
            and dict(model.functions[identifier].opset_imports) == dict(function.opset_imports)
            and is_same_body(model.functions[identifier], function)
        )
    ]


def changed_nodes(model: ir.Model, second: ir.Model, names: Collection[str]) -> list[str]:
    """Name the nodes that are not what another model has, by their results.

    Args:
        names: the values that have to be made and read alike. Two versions of a conversion may
            differ in the nodes that they add; what their original had they have in the same way.
    """
    producers = {node.outputs[0].name: node for node in model.graph if node.outputs}
    differences = []
    for reference in second.graph:
        result = reference.outputs[0].name if reference.outputs else None
        node = producers.get(result)
        ours = reference.domain == DOMAIN
        if node is None:
            if not ours and result in names:
                differences.append(f"{label(reference)} is not there")
        elif (node.domain, node.op_type) != (reference.domain, reference.op_type):
            if result in names:
                differences.append(f"{label(node)} is {node.op_type}, not {reference.op_type}")
        elif not ours and not _same_attributes(node, reference):
            differences.append(f"{label(node)} has other attributes")
        else:
            differences += _changed_inputs(node, reference, names)
    return differences


def _changed_inputs(node: ir.Node, reference: ir.Node, names: Collection[str]) -> Iterator[str]:
    for slot in range(max(len(node.inputs), len(reference.inputs))):
        value_here, value_there = (
            None if len(operator.inputs) <= slot else operator.inputs[slot]
            for operator in (node, reference)
        )
        read = [None if value is None else value.name for value in (value_here, value_there)]
        if read[0] != read[1] and (None in read or any(name in names for name in read)):
            actual, expected = (name or "nothing" for name in read)
            yield f"{label(node)} reads {actual} in the place of {expected}"


def is_same_body(function: ir.Function, second: ir.Function) -> bool:
    """Return whether two function bodies have the same nodes between the same values."""
    nodes, second_nodes = list(function), list(second)
    named = [[[v.name for v in side] for side in (f.inputs, f.outputs)] for f in (function, second)]
    if named[0] != named[1] or len(nodes) != len(second_nodes):
        return False
    return all(
        _same_node(node, counterpart) for node, counterpart in zip(nodes, second_nodes, strict=True)
    )


def _is_same(graph: ir.Graph | ir.GraphView, second: ir.Graph | ir.GraphView) -> bool:
    names = [[value.name for value in part.outputs] for part in (graph, second)]
    nodes, second_nodes = list(graph), list(second)
    if names[0] != names[1] or len(nodes) != len(second_nodes):
        return False
    return all(
        _same_node(node, counterpart) for node, counterpart in zip(nodes, second_nodes, strict=True)
    )


def _is_same_inside(graph: ir.Graph, second: ir.Graph) -> bool:
    """Compare two branches, whose initializers no other list has."""
    held, second_initializers = graph.initializers, second.initializers
    if set(held) != set(second_initializers) or not _is_same(graph, second):
        return False
    return all(
        _same_tensor(held[name].const_value, second_initializers[name].const_value) for name in held
    )


def _same_node(node: ir.Node, second: ir.Node) -> bool:
    kinds = [
        (operator.domain, operator.op_type, operator.overload, *_names(operator))
        for operator in (node, second)
    ]
    return kinds[0] == kinds[1] and _same_attributes(node, second)


def _names(node: ir.Node) -> Iterator[str | None]:
    for value in (*node.inputs, None, *node.outputs):
        yield None if value is None else value.name


def _same_attributes(node: ir.Node, second: ir.Node) -> bool:
    if set(node.attributes) != set(second.attributes):
        return False
    return all(
        _same_attribute(attribute, second.attributes[name])
        for name, attribute in node.attributes.items()
    )


def _same_attribute(first: ir.Attr, second: ir.Attr) -> bool:
    if first.type is not second.type or first.ref_attr_name != second.ref_attr_name:
        return False
    if first.ref_attr_name is not None:
        return True
    if first.type is ir.AttributeType.GRAPH:
        return _is_same_inside(first.as_graph(), second.as_graph())
    if first.type is ir.AttributeType.TENSOR:
        return _same_tensor(first.as_tensor(), second.as_tensor())
    return bool(ir.serde.serialize_attribute(first) == ir.serde.serialize_attribute(second))


def _is_ours(name: str) -> bool:
    """Return whether a conversion computed a tensor: another machine may have rounded it."""
    return name.startswith("tq.")


def _same_tensor(
    first: ir.TensorProtocol | None, second: ir.TensorProtocol | None, *, ours: bool = False
) -> bool:
    if first is second or first is None or second is None:
        return first is second
    if first.dtype is not second.dtype or list(first.shape) != list(second.shape):
        return False
    if _is_one_place(first, second):
        return True
    if first.dtype is ir.DataType.STRING:
        return bool((first.numpy() == second.numpy()).all())
    is_same = first.tobytes() == second.tobytes()
    if is_same or not ours or not first.dtype.is_floating_point():
        return is_same
    left, right = (np.asarray(tensor.numpy(), np.float64) for tensor in (first, second))
    return bool((np.abs(left - right) <= _ROUNDING * np.abs(right)).all())


def _is_one_place(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Return whether both are the same part of the same file."""
    if not isinstance(first, ir.ExternalTensor) or not isinstance(second, ir.ExternalTensor):
        return False
    places = [(os.path.realpath(t.path), t.offset or 0, t.nbytes) for t in (first, second)]
    return places[0] == places[1]
