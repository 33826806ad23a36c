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
from tq_onnx.ops.domain import MICROSOFT

Array = npt.NDArray[Any]

_IR_VERSION: Final = 10
_MOST_NODES: Final = 2_000
_MOST_NUMBERS: Final = 1 << 24
"""Of a constant; a part of a graph that needs weights is none that is proven by numbers."""
_HEADS_RANK: Final = 4
"""Of vectors ``[B, H, T, D]``."""
_MOST_DETAIL: Final = 200
"""Letters of what the evaluator says; it lists all that it knows."""


class GatherND(OpRun):
    """The operator by numpy's indexing: onnx's takes a mask number by number, in Python."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, batch_dims: int = 0) -> tuple[Array]:
        beside = np.indices(indices.shape[:-1], sparse=True)[:batch_dims]
        places = (*beside, *np.moveaxis(indices, -1, 0))
        return (np.asarray(data[places]),)


def turned(vectors: Array, cos: Array, sin: Array, *, is_interleaved: bool, width: int) -> Array:
    """Return vectors ``[..., T, D]`` whose first coordinates are turned.

    Args:
        cos: of their angles, ``[..., T, width / 2]``.
        is_interleaved: whether neighbours make a pair, or the halves of the first coordinates.
        width: of these coordinates.
    """
    result: Array = vectors.copy()
    half = width // 2
    first, second = (
        (slice(0, width, 2), slice(1, width, 2))
        if is_interleaved
        else (slice(0, half), slice(half, width))
    )
    result[..., first] = vectors[..., first] * cos - vectors[..., second] * sin
    result[..., second] = vectors[..., first] * sin + vectors[..., second] * cos
    return result


class RotaryEmbedding(OpRun):
    """The operator of com.microsoft, which onnx's evaluator does not have."""

    op_domain = MICROSOFT

    def _run(
        self, vectors: Array, positions: Array, cos: Array, sin: Array, **how: Any
    ) -> tuple[Array]:
        batch, tokens = vectors.shape[0], vectors.shape[-2]
        if positions.size == 1:
            positions = positions.reshape(1, 1) + np.arange(tokens)
        width = how.get("rotary_embedding_dim") or 2 * cos.shape[-1]
        heads = how.get("num_heads") or vectors.shape[-1] // width
        is_flat = vectors.ndim < _HEADS_RANK
        split = vectors.reshape(batch, tokens, heads, -1).swapaxes(1, 2) if is_flat else vectors
        tables = (table[positions][:, None] for table in (cos, sin))
        interleaved = bool(how.get("interleaved"))
        result = turned(split, *tables, is_interleaved=interleaved, width=width)
        return (result.swapaxes(1, 2).reshape(vectors.shape) if is_flat else result,)


EXTENSIONS: Final = (GatherND, RotaryEmbedding)
"""Operators that onnx's evaluator computes slowly, or lacks."""


def evaluate(values: Sequence[ir.Value], arrays: Mapping[ir.Value, Array]) -> list[Array]:
    """Compute values of a graph.

    Args:
        arrays: values anywhere in the graph and their numbers, instead of what would compute them.
    """
    graph = _graph_of(values)
    if graph is None:
        return [arrays[value] if value in arrays else _constant(value) for value in values]
    live = live_nodes(values, cut=arrays.keys())
    nodes = _sorted({node for node in live if node.graph is graph}, values)
    if len(nodes) > _MOST_NODES:
        raise NoMatch(f"{len(nodes)} nodes compute {values[0].name}", nodes[0])
    feeds: dict[str, Array] = {}
    constants: dict[str, ir.TensorProtocol] = {}
    for node in nodes:
        for item in (node, *nested_nodes(node)):
            for value in item.inputs:
                if value is not None and value in arrays:
                    feeds[_name(value)] = np.asarray(arrays[value])
                else:
                    _add_source(value, constants)
    outputs = [value for value in values if value not in arrays and value.producer() is not None]
    model = _model(graph, nodes, outputs, constants, feeds)
    try:
        evaluator = ReferenceEvaluator(model, new_ops=[*EXTENSIONS])
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


def _sorted(nodes: set[ir.Node], values: Sequence[ir.Value]) -> list[ir.Node]:
    """Return nodes that values are computed from, each behind those that it reads.

    A graph has them in such an order, but may have thousands of others between them.
    """
    in_order: dict[ir.Node, None] = {}
    opened: set[ir.Node] = set()
    pending = [value.producer() for value in reversed(values)]
    while pending:
        node = pending.pop()
        if node not in nodes or node in in_order:
            continue
        if node in opened:
            in_order[node] = None
            continue
        opened.add(node)
        pending.append(node)
        for item in (node, *nested_nodes(node)):
            pending.extend(value.producer() for value in item.inputs if value is not None)
    return list(in_order)


def has_numbers(value: ir.Value) -> bool:
    """Return True if a value that no node makes is a constant that ``evaluate`` takes."""
    tensor = value.const_value
    # What is an input too may have other numbers in a call.
    return tensor is not None and tensor.size <= _MOST_NUMBERS and not value.is_graph_input()


def _add_source(value: ir.Value | None, constants: dict[str, ir.TensorProtocol]) -> None:
    if value is None or value.producer() is not None:
        return
    tensor = value.const_value
    if tensor is None or not has_numbers(value):
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
