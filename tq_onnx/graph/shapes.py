"""Infer the shapes that an export does not declare, by onnx, on a copy without weights.

torch's older exporter declares the shapes of inputs and outputs only, and recognition has to know
the meaning of each dimension of a repeated cache. Missing sizes are filled in; declared sizes are
kept. The name of a symbolic size counts as declared only if an input has it, too: shape inference
makes up others (``unk__7``) for sizes that it cannot compute, and tools leave them in files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeGuard

import onnx
import onnx.shape_inference
import onnx_ir as ir

from tq_onnx.files.declarations import MAX_RANK
from tq_onnx.graph.sizes import add, refine

_MAX_CONSTANT: Final = 64
"""Elements of a constant that inference may want to see: shapes, axes, factors."""

_MAX_LIST: Final = 1 << 22
"""Entries of a list of which inference may follow each one."""


def fill_shapes(model: ir.Model) -> None:
    """Give shapes and types to the values of the main graph that have none.

    A graph that inference cannot work with stays as it is.
    """
    graph = model.graph
    values = [value for node in graph for value in node.outputs if value.name]
    untold = {value for value in values if value.shape is None} | _forget_made_up_names(graph)
    missing = {value.name: value for value in values if value in untold or value.dtype is None}
    if not missing:
        return
    for info in _inferred(model):
        value = missing.get(info.name)
        if value is None or not info.type.HasField("tensor_type"):
            continue
        kind = info.type.tensor_type
        if value.dtype is None and kind.elem_type:
            value.type = ir.TensorType(ir.DataType(kind.elem_type))
        shape = ir.serde.deserialize_type_proto_for_shape(info.type)
        if value in untold and shape is not None:
            add(value, tuple(dim if isinstance(dim, int) else dim.value for dim in shape))
    refine(graph, untold)


def _forget_made_up_names(graph: ir.Graph) -> set[ir.Value]:
    """Make sizes unknown whose names no input has; return the values that had some."""
    known = {dim.value for value in graph.inputs for dim in value.shape or () if _is_named(dim)}
    renamed = set()
    for node in graph:
        for value in node.outputs:
            shape = value.shape
            # An output of the graph is a promise to callers, under whatever names.
            if shape is None or value.is_graph_output():
                continue
            dims = [None if _is_named(dim) and dim.value not in known else dim for dim in shape]
            if dims != list(shape):
                value.shape = ir.Shape(dims)
                renamed.add(value)
    return renamed


def _is_named(dim: int | ir.SymbolicDim) -> TypeGuard[ir.SymbolicDim]:
    return isinstance(dim, ir.SymbolicDim) and dim.value is not None


def _inferred(model: ir.Model) -> Iterable[onnx.ValueInfoProto]:
    try:
        proto = infer(without_weights(model))
    except Exception:  # a graph that is no valid ONNX is refused where it matters
        return ()
    return list(proto.graph.value_info)


def infer(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Infer shapes, and numbers that are shapes where no list is too long to be followed.

    Raises:
        Exception: onnx cannot work with the graph; what it raises has no common type.
    """
    graph = proto.graph
    lists = (
        value.type.tensor_type.shape.dim[0].dim_value
        for value in (*graph.input, *graph.value_info)
        if len(value.type.tensor_type.shape.dim) == 1
    )
    # Inference makes an entry for each that is declared, were it 2^36, and does so in each reader.
    inferred = onnx.shape_inference.infer_shapes(
        proto, data_prop=max(lists, default=0) <= _MAX_LIST
    )
    # A shape that a damaged graph computes of a cache has a dimension for each token.
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        if len(value.type.tensor_type.shape.dim) > MAX_RANK:
            value.type.tensor_type.ClearField("shape")
    return inferred


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return the model with its weights as inputs; constants that are small stay."""
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    weights: list[ir.Value] = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.size > _MAX_CONSTANT or isinstance(tensor, ir.ExternalTensor):
            weights.append(value)
        else:
            constants[name] = value
    proto = onnx.ModelProto()
    proto.ir_version = model.ir_version
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    content = proto.graph
    content.name = graph.name or "graph"
    declared = {value.name for value in graph.inputs}
    # Each by its own function: ir.to_proto asks of every protocol whether a value has its members.
    serde = ir.serde
    inputs = (*graph.inputs, *(value for value in weights if value.name not in declared))
    content.input.extend(map(serde.serialize_value, inputs))
    content.output.extend(map(serde.serialize_value, graph.outputs))
    content.initializer.extend(
        serde.serialize_tensor(value.const_value)
        for value in constants.values()
        if value.const_value is not None
    )
    content.value_info.extend(
        serde.serialize_value(value)
        for node in graph
        for value in node.outputs
        if value.name and value.type is not None
    )
    content.node.extend(map(serde.serialize_node, graph))
    return proto
