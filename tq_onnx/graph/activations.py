"""Foretell the memory that a graph's values take while it runs, weights and caches apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.shapes import infer, without_weights
from tq_onnx.graph.sizes import refine

_VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})
"""Operators whose result is their input, with other dimensions."""
_IN_PLACE: Final = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Where",
        "Softmax",
        "Sigmoid",
        "Neg",
        "Sqrt",
        "Cast",
        "Tanh",
    }
    | {"Clip", "Erf", "Relu", "QuickGelu", "Gelu", "Reciprocal", "RotaryEmbedding"}
)
"""Operators that write into an input of their result's size that nobody reads later."""
_ATTENTION: Final = frozenset({"Attention", "MultiHeadAttention"})
"""Operators of ONNX Runtime that hold all scores of a call, ``[B, H, T, S]`` in float32.

Its GroupQueryAttention goes through the keys block by block (seen in 1.31 and 1.32)."""


def activation_bytes(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], retained: Collection[str], scores: int
) -> int:
    """Return the most bytes that values of a graph take at the same time.

    Nodes run in the order of the graph, a value is freed after its last use, and buffers are used
    again as ONNX Runtime does; what its optimizer fuses is not foreseen, so it may take less.

    Args:
        shapes: of the inputs, in numbers.
        retained: outputs that are written to buffers of the caller.
        scores: bytes of the scores of one attention operator.
    """
    graph = _sized(model, shapes)
    uses = Counter(value for node in graph for value in node.inputs if value is not None)
    uses.update(graph.outputs)
    buffers = _Buffers(uses, retained)
    varying = {value for value in graph.inputs if value.name in shapes}
    for node in graph:
        if varying.isdisjoint(node.inputs):
            continue  # computed once, when the model is opened
        varying.update(node.outputs)
        buffers.make(node)
        buffers.most = max(
            buffers.most, buffers.live + (scores if node.op_type in _ATTENTION else 0)
        )
        buffers.free(node)
    return buffers.most


class _Buffers:
    """The buffers that are in use, node by node.

    Attributes:
        live: bytes in use.
        most: the most so far.
    """

    def __init__(self, uses: Counter[ir.Value], retained: Collection[str]) -> None:
        self._uses = uses
        self._kept = retained
        self._buffer: dict[ir.Value, ir.Value] = {}  # by the value that it was made for
        self._readers: Counter[ir.Value] = Counter()
        self._bytes: dict[ir.Value, int] = {}
        self.live = self.most = 0

    def make(self, node: ir.Node) -> None:
        """Take buffers for the outputs of a node."""
        source = self._buffer.get(node.inputs[0]) if node.inputs and node.inputs[0] else None
        for value in node.outputs:
            if node.op_type in _VIEWS and source is not None:
                self._buffer[value] = source
                self._readers[source] += self._uses[value]
                continue
            size = 0 if value.name in self._kept or not value.name else _nbytes(value)
            self._buffer[value] = value
            self._readers[value] = self._uses[value]
            self._bytes[value] = size
            again = self._ending(node, size) if node.op_type in _IN_PLACE else None
            if again is None:
                self.live += size
            else:
                self._bytes[again] = 0  # it goes on as that of the result

    def free(self, node: ir.Node) -> None:
        """Give up the buffers that nobody reads after a node."""
        for value in node.inputs:
            if value in self._buffer:
                self._readers[self._buffer[value]] -= 1
        for value in (*node.inputs, *node.outputs):
            buffer = None if value is None else self._buffer.get(value)
            if buffer is not None and self._readers[buffer] <= 0:
                self.live -= self._bytes[buffer]
                self._bytes[buffer] = 0

    def _ending(self, node: ir.Node, size: int) -> ir.Value | None:
        """Return a buffer of some size that is read for the last time."""
        read = Counter(self._buffer[value] for value in node.inputs if value in self._buffer)
        return next(
            (
                buffer
                for buffer, times in read.items()
                if self._readers[buffer] == times and self._bytes[buffer] == size
            ),
            None,
        )


def _sized(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Graph:
    """Return the graph with the sizes that follow from those of the inputs."""
    proto = without_weights(model)
    for entry in proto.graph.input:
        if entry.name in shapes:
            dims = entry.type.tensor_type.shape
            dims.Clear()
            for number in shapes[entry.name]:
                dims.dim.add(dim_value=number)
    types = {entry.name: entry.type.tensor_type.elem_type for entry in proto.graph.value_info}
    for entry in (*proto.graph.value_info, *proto.graph.output):
        entry.type.tensor_type.ClearField("shape")
    with suppress(Exception):  # what onnx cannot infer has other rules
        proto = infer(proto)
    inferred = ir.from_proto(proto)
    values = {value for node in inferred.graph for value in node.outputs}
    for value in values:
        if value.dtype is None and types.get(value.name or ""):
            value.type = ir.TensorType(ir.DataType(types[value.name or ""]))
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape(dim if isinstance(dim, int) else None for dim in value.shape)
    refine(inferred.graph, values)
    return inferred.graph


def _nbytes(value: ir.Value) -> int:
    if value.dtype is None or value.shape is None:
        return 0
    count = prod(dim if isinstance(dim, int) else 1 for dim in value.shape)
    return count * value.dtype.bitwidth // 8
