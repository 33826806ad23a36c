"""Check the sizes, types and versions that a model declares, before anything is made of them.

Shape inference makes a shape with as many dimensions as the list of its sizes is declared to have,
and so needs memory for a number that anybody can write into a file. Here every declared dimension
is bounded, and the length of every list of sizes much more so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import onnx

from tq_onnx.errors import ModelFileError

MAX_DIMENSION: Final = 1 << 40
"""No dimension is larger; beyond it a declared size is an attack or an accident."""
MAX_ELEMENTS: Final = 1 << 62
"""No product of the dimensions of a value that are numbers is larger."""
MAX_RANK: Final = 64
_MOST: Final = {
    "nodes": 100_000,
    "operands": 2_000_000,
    "values": 1_000_000,
    "initializers": 100_000,
    "numbers in attributes": 8_000_000,
    "numbers of tensors": 1 << 25,
}
"""Parts of a model; decoders of a hundred layers with a hundred experts each have fewer."""
_MAX_VERSION: Final = (1 << 31) - 1

_SIZES: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("ConstantOfShape",), (0,)),
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Unsqueeze", "Squeeze", "CenterCropPad"), (1,)),
    **dict.fromkeys(("Slice", "Pad", "Resize", "Upsample"), (1, 2, 3, 4)),
    "AffineGrid": (1,),
    "Col2Im": (1, 2),
    "Split": (1,),
    "SplitToSequence": (1,),
}
"""Inputs that are lists with one number for each dimension, or for each part."""
_MOST_PARTS: Final = 4096
_TYPES: Final = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}


def check_declarations(proto: onnx.ModelProto, where: str) -> None:
    """Refuse versions, dimensions and lists of sizes that are absurd, and types that are none."""
    _check_version(proto.ir_version, "IR", where)
    for entries in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        for entry in entries:
            _check_version(entry.version, f"opset of the domain {entry.domain!r}", where)
    _check_counts(proto, where)
    _check_graph(proto.graph, {}, where)
    for function in proto.functions:
        values = {value.name: value for value in function.value_info}
        _check_nodes(function.node, _lengths(values.values(), (), where), where)


def _check_counts(proto: onnx.ModelProto, where: str) -> None:
    """Refuse a graph of so many parts that its objects need more memory and time than its bytes."""
    counts = dict.fromkeys(_MOST, 0)
    pending = [proto.graph]
    nodes: list[onnx.NodeProto] = [node for function in proto.functions for node in function.node]
    counts["nodes"] = len(nodes)
    while pending or nodes:
        for node in nodes:
            counts["operands"] += len(node.input) + len(node.output) + len(node.attribute)
            for attribute in node.attribute:
                numbers = (attribute.ints, attribute.floats, attribute.strings)
                counts["numbers in attributes"] += sum(map(len, numbers))
                pending += attribute.graphs
                pending += [attribute.g] if attribute.HasField("g") else []
                counts["initializers"] += len(attribute.tensors)
                counts["numbers of tensors"] += _numbers(attribute.t)
        nodes = []
        if pending:
            graph = pending.pop()
            nodes = list(graph.node)
            counts["nodes"] += len(nodes)
            counts["values"] += len(graph.input) + len(graph.output) + len(graph.value_info)
            counts["initializers"] += len(graph.initializer)
            counts["numbers of tensors"] += sum(map(_numbers, graph.initializer))
    for what, count in counts.items():
        if count > _MOST[what]:
            raise ModelFileError(
                f"the model has {count} {what}, and {_MOST[what]} is the most", where=where
            )


def _numbers(tensor: onnx.TensorProto) -> int:
    """Return how many numbers are not in ``raw_data``, and so are objects of their own."""
    fields = (tensor.int32_data, tensor.int64_data, tensor.uint64_data)
    return sum(map(len, (*fields, tensor.float_data, tensor.double_data, tensor.string_data)))


def _check_version(version: int, what: str, where: str) -> None:
    if not 0 <= version <= _MAX_VERSION:
        raise ModelFileError(f"the model declares version {version} of the {what}", where=where)


def _check_graph(graph: onnx.GraphProto, outer: dict[str, int], where: str) -> None:
    values = (*graph.input, *graph.output, *graph.value_info)
    lengths = {**outer, **_lengths(values, graph.initializer, where)}
    _check_nodes(graph.node, lengths, where)


def _lengths(
    values: Iterable[onnx.ValueInfoProto], tensors: Iterable[onnx.TensorProto], where: str
) -> dict[str, int]:
    """Check declared shapes and return the lengths of lists, by name."""
    lengths: dict[str, int] = {}
    for value in values:
        for kind in _tensor_types(value.type):
            if kind.elem_type not in _TYPES:
                raise ModelFileError(
                    f"the value {value.name!r} declares the element type {kind.elem_type}, "
                    "which ONNX does not have",
                    where=where,
                    fix="export the model again",
                )
            shape = kind.shape
            sizes = [dim.dim_value for dim in shape.dim if dim.HasField("dim_value")]
            _check_shape(value.name, sizes, len(shape.dim), where)
            if len(sizes) == len(shape.dim) == 1:
                lengths[value.name] = sizes[0]
    for tensor in tensors:
        if len(tensor.dims) == 1:
            lengths[tensor.name] = tensor.dims[0]
    return lengths


def is_holdable(sizes: Iterable[int]) -> bool:
    """Return True if dimensions do not multiply to more elements than a value may declare."""
    return math.prod(max(size, 1) for size in sizes) <= MAX_ELEMENTS


def _check_shape(name: str, sizes: list[int], rank: int, where: str) -> None:
    if rank > MAX_RANK:
        raise ModelFileError(
            f"the value {name!r} declares {rank} dimensions, and {MAX_RANK} is the most",
            where=where,
        )
    for size in sizes:
        if not 0 <= size <= MAX_DIMENSION:
            raise ModelFileError(
                f"the value {name!r} declares a dimension of {size}",
                where=where,
                fix="a dimension that varies needs a name instead of a number",
            )
    if not is_holdable(sizes):
        raise ModelFileError(
            f"the value {name!r} declares the dimensions {sizes}, which no memory holds",
            where=where,
            fix="export the model again",
        )


def _check_nodes(nodes: Iterable[onnx.NodeProto], lengths: dict[str, int], where: str) -> None:
    for node in nodes:
        for index in _SIZES.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ():
            name = node.input[index] if index < len(node.input) else ""
            length = lengths.get(name, 0)
            most = _MOST_PARTS if node.op_type.startswith("Split") else 2 * MAX_RANK
            if length > most:
                raise ModelFileError(
                    f"the node {node.name or node.op_type!r} takes a list of sizes, {name!r}, "
                    f"which is declared to have {length} numbers",
                    where=where,
                    fix="export the model again",
                )
        for attribute in node.attribute:
            for graph in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
                _check_graph(graph, lengths, where)


def _tensor_types(kind: Any) -> Iterator[Any]:
    """Yield the types of tensors in a type, also in those of sequences, options and maps."""
    for _ in range(MAX_RANK):
        which = kind.WhichOneof("value")
        if which in ("tensor_type", "sparse_tensor_type"):
            yield getattr(kind, which)
            return
        if which in ("sequence_type", "optional_type"):
            kind = getattr(kind, which).elem_type
        elif which == "map_type":
            kind = kind.map_type.value_type
        else:
            return
