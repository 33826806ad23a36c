"""Evaluate a part of a graph, to prove what it computes.

Exporters write a causal mask or the angles of a rotary embedding in dozens of ways. What such a
part computes depends on lengths and positions only, so that its numbers tell more than its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tq_onnx.graph.liveness import live_nodes, nested_nodes
from tq_onnx.graph.nomatch import NoMatch

Array = npt.NDArray[Any]

_IR_VERSION: Final = 10
_MOST_NODES: Final = 2_000
_MOST_NUMBERS: Final = 1 << 24
"""Of a constant; a part of a graph that needs weights is none that is proven by numbers."""
_MOST_DETAIL: Final = 200
"""Letters of what the evaluator says; it lists all that it knows."""


class GatherND(OpRun):
    """The operator by numpy's indexing: onnx's takes a mask number by number, in Python."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, batch_dims: int = 0) -> tuple[Array]:
        beside = np.indices(indices.shape[:-1], sparse=True)[:batch_dims]
        places = (*beside, *np.moveaxis(indices, -1, 0))
        return (np.asarray(data[places]),)


def evaluate(values: Sequence[ir.Value], arrays: Mapping[ir.Value, Array]) -> list[Array]:
    """Compute values of a graph.

    Args:
        values: what to compute.
        arrays: values anywhere in the graph and their numbers, instead of what would compute them.

    Raises:
        NoMatch: an input of the graph or a large weight would be needed that is not given, or
            onnx's reference evaluator cannot run a node.
    """
    graph = _graph_of(values)
    if graph is None:
        return [arrays[value] if value in arrays else _constant(value) for value in values]
    live = live_nodes(values, cut=arrays.keys())
    nodes = [node for node in graph if node in live]
    if len(nodes) > _MOST_NODES:
        raise NoMatch(f"{len(nodes)} nodes compute {values[0].name}", nodes[0])
    feeds = {_name(value): np.asarray(array) for value, array in arrays.items()}
    constants: dict[str, ir.TensorProtocol] = {}
    for node in nodes:
        for item in (node, *nested_nodes(node)):
            for value in item.inputs:
                _add_source(value, arrays, constants)
    outputs = [value for value in values if value not in arrays and value.producer() is not None]
    model = _model(graph, nodes, outputs, constants, feeds)
    try:
        evaluator = ReferenceEvaluator(model, new_ops=[GatherND])
        results = evaluator.run(None, feeds) if outputs else []
    except Exception as error:
        detail = " ".join(str(error).split())[:_MOST_DETAIL]
        raise NoMatch(f"{values[0].name} cannot be computed ({detail})") from error
    computed = dict(zip(outputs, results, strict=True))
    return [
        np.asarray(computed[value])
        if value in computed
        else arrays[value]
        if value in arrays
        else _constant(value)
        for value in values
    ]


def _graph_of(values: Sequence[ir.Value]) -> ir.Graph | None:
    for value in values:
        node = value.producer()
        if node is not None and isinstance(node.graph, ir.Graph):
            return node.graph
    return None


def _add_source(
    value: ir.Value | None,
    arrays: Mapping[ir.Value, Array],
    constants: dict[str, ir.TensorProtocol],
) -> None:
    if value is None or value in arrays or value.producer() is not None:
        return
    tensor = value.const_value
    # What is an input too may have other numbers in a call.
    if tensor is None or tensor.size > _MOST_NUMBERS or value.is_graph_input():
        raise NoMatch(f"a number depends on {value.name}")
    constants[_name(value)] = tensor


def _model(
    graph: ir.Graph,
    nodes: Sequence[ir.Node],
    outputs: Sequence[ir.Value],
    constants: Mapping[str, ir.TensorProtocol],
    feeds: Mapping[str, Array],
) -> onnx.ModelProto:
    """Return the nodes that compute the wanted values, and no others."""
    proto = onnx.GraphProto(name="part")
    proto.node.extend(ir.serde.serialize_node(node) for node in nodes)
    for name, tensor in constants.items():
        array = onnx.numpy_helper.from_array(tensor.numpy(), name)
        proto.initializer.append(array)
    for name, numbers in feeds.items():
        declaration = proto.input.add(name=name)
        declaration.type.tensor_type.elem_type = ir.DataType.from_numpy(numbers.dtype)
    proto.output.extend(onnx.ValueInfoProto(name=_name(value)) for value in outputs)
    model = onnx.ModelProto(graph=proto, ir_version=_IR_VERSION)
    for domain, version in graph.opset_imports.items():
        model.opset_import.add(domain=domain, version=version)
    return model


def _constant(value: ir.Value) -> Array:
    tensor = value.const_value
    if tensor is None or value.is_graph_input():
        raise NoMatch(f"a number depends on {value.name}")
    return tensor.numpy()


def _name(value: ir.Value) -> str:
    return value.name or ""
