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


def is_same_graph(model: ir.Model, other: ir.Model) -> bool:
    """Return whether two models have the same nodes, in the same order, between the same values.

    Functions and versions of operators are compared too, but for the bodies of our own operators.
    Tensors are compared by ``changed_tensors``; here only their names.
    """
    for one, its in ((model, other), (other, model)):
        missing = set(one.graph.initializers) - set(its.graph.initializers)
        if any(one.graph.initializers[name].uses() for name in missing):
            return False
        if changed_functions(one, its):
            return False
    same_opsets = dict(model.graph.opset_imports) == dict(other.graph.opset_imports)
    return same_opsets and _is_same(model.graph, other.graph)


def changed_tensors(model: ir.Model, other: ir.Model) -> list[str]:
    """Name the initializers that both models have and that hold other numbers.

    Of external data only what lies at different places is read.
    """
    theirs = other.graph.initializers
    return [
        f"{name} holds other numbers"
        for name, value in model.graph.initializers.items()
        if name in theirs
        and not _same_tensor(value.const_value, theirs[name].const_value, ours=_is_ours(name))
    ]


def names_in(model: ir.Model) -> frozenset[str]:
    """Return the names of all values of a graph, those inside its branches not among them."""
    graph = model.graph
    made = (value for node in graph for value in node.outputs)
    values = (*graph.inputs, *graph.initializers.values(), *made)
    return frozenset(value.name for value in values if value.name)


def changed_functions(model: ir.Model, other: ir.Model) -> list[str]:
    """Name the functions of another model that a model lacks or has otherwise, but for our own."""
    return [
        f"the function {identifier[1]} is another"
        for identifier, function in other.functions.items()
        if function.domain != DOMAIN
        and not (
            identifier in model.functions
            and dict(model.functions[identifier].opset_imports) == dict(function.opset_imports)
            and is_same_body(model.functions[identifier], function)
        )
    ]


def changed_nodes(
    model: ir.Model, other: ir.Model, names: Collection[str], *, operators: bool
) -> list[str]:
    """Name the nodes that are not what another model has, by their results.

    Args:
        model: a conversion without codecs.
        other: one of the same original.
        names: the values that have to be made and read alike. Two versions of a conversion may
            differ in the nodes that they add; what their original had they have in the same way.
        operators: whether our own operators are compared too.
    """
    made = {node.outputs[0].name: node for node in model.graph if node.outputs}
    found = []
    for its in other.graph:
        result = its.outputs[0].name if its.outputs else None
        node = made.get(result)
        ours = its.domain == DOMAIN
        if node is None:
            if not ours and result in names:
                found.append(f"{label(its)} is not there")
        elif (node.domain, node.op_type) != (its.domain, its.op_type):
            if result in names:
                found.append(f"{label(node)} is {node.op_type}, not {its.op_type}")
        elif ours and not operators:
            continue
        elif not ours and not _same_attributes(node, its):
            found.append(f"{label(node)} has other attributes")
        else:
            found += _changed_inputs(node, its, names)
    return found


def _changed_inputs(node: ir.Node, its: ir.Node, names: Collection[str]) -> Iterator[str]:
    for slot in range(max(len(node.inputs), len(its.inputs))):
        here, there = (None if len(one.inputs) <= slot else one.inputs[slot] for one in (node, its))
        read = [None if value is None else value.name for value in (here, there)]
        if read[0] != read[1] and (None in read or any(name in names for name in read)):
            given, wanted = (name or "nothing" for name in read)
            yield f"{label(node)} reads {given} in the place of {wanted}"


def is_same_body(function: ir.Function, other: ir.Function) -> bool:
    """Return whether two function bodies have the same nodes between the same values."""
    nodes, theirs = list(function), list(other)
    named = [[[v.name for v in side] for side in (f.inputs, f.outputs)] for f in (function, other)]
    if named[0] != named[1] or len(nodes) != len(theirs):
        return False
    return all(_same_node(one, its) for one, its in zip(nodes, theirs, strict=True))


def _is_same(graph: ir.Graph | ir.GraphView, other: ir.Graph | ir.GraphView) -> bool:
    names = [[value.name for value in one.outputs] for one in (graph, other)]
    nodes, theirs = list(graph), list(other)
    if names[0] != names[1] or len(nodes) != len(theirs):
        return False
    return all(_same_node(one, its) for one, its in zip(nodes, theirs, strict=True))


def _is_same_inside(graph: ir.Graph, other: ir.Graph) -> bool:
    """Compare two branches, whose initializers no other list has."""
    held, its = graph.initializers, other.initializers
    if set(held) != set(its) or not _is_same(graph, other):
        return False
    return all(_same_tensor(held[name].const_value, its[name].const_value) for name in held)


def _same_node(node: ir.Node, other: ir.Node) -> bool:
    kinds = [(one.domain, one.op_type, one.overload, *_names(one)) for one in (node, other)]
    return kinds[0] == kinds[1] and _same_attributes(node, other)


def _names(node: ir.Node) -> Iterator[str | None]:
    for value in (*node.inputs, None, *node.outputs):
        yield None if value is None else value.name


def _same_attributes(node: ir.Node, other: ir.Node) -> bool:
    if set(node.attributes) != set(other.attributes):
        return False
    return all(
        _same_attribute(attribute, other.attributes[name])
        for name, attribute in node.attributes.items()
    )


def _same_attribute(one: ir.Attr, its: ir.Attr) -> bool:
    if one.type is not its.type or one.ref_attr_name != its.ref_attr_name:
        return False
    if one.ref_attr_name is not None:
        return True
    if one.type is ir.AttributeType.GRAPH:
        return _is_same_inside(one.as_graph(), its.as_graph())
    if one.type is ir.AttributeType.TENSOR:
        return _same_tensor(one.as_tensor(), its.as_tensor())
    return bool(ir.serde.serialize_attribute(one) == ir.serde.serialize_attribute(its))


def _is_ours(name: str) -> bool:
    """Return whether a conversion computed a tensor: another machine may have rounded it."""
    return name.startswith("tq.")


def _same_tensor(
    one: ir.TensorProtocol | None, its: ir.TensorProtocol | None, *, ours: bool = False
) -> bool:
    if one is its or one is None or its is None:
        return one is its
    if one.dtype is not its.dtype or list(one.shape) != list(its.shape):
        return False
    if _is_one_place(one, its):
        return True
    if one.dtype is ir.DataType.STRING:
        return bool((one.numpy() == its.numpy()).all())
    same = one.tobytes() == its.tobytes()
    if same or not ours or not one.dtype.is_floating_point():
        return same
    left, right = (np.asarray(tensor.numpy(), np.float64) for tensor in (one, its))
    return bool((np.abs(left - right) <= _ROUNDING * np.abs(right)).all())


def _is_one_place(one: ir.TensorProtocol, its: ir.TensorProtocol) -> bool:
    """Return whether both are the same part of the same file."""
    if not isinstance(one, ir.ExternalTensor) or not isinstance(its, ir.ExternalTensor):
        return False
    places = [(os.path.realpath(t.path), t.offset or 0, t.nbytes) for t in (one, its)]
    return places[0] == places[1]
