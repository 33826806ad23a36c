"""Weights as a graph for CANN needs them: transposed, and in one piece for each projection.

Exporters pack projections, of queries, keys and values or of gate and up, into one MatMul and cut
its result. A column of a product needs no more than that column of the weight, so that the same
numbers come of one MatMul for each part. New weights are read when the model is written, one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.evaluate import Array
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import label, rank, static_dim, substitute

_MAX_PARTS: Final = 16


@dataclass(frozen=True, eq=False)
class _Projection:
    """A product with a constant weight, perhaps plus a constant bias."""

    source: ir.Value  #: ``[..., E]``
    weight: ir.Value  #: ``[E, F]``
    bias: ir.Value | None  #: ``[F]``; None if there is none
    total: ir.Value  #: what is cut
    product: ir.Value  #: the output of the MatMul

    @property
    def width(self) -> int:
        """F."""
        return static_dim(self.weight, 1) or 0


def bake_transposes(graph: ir.Graph, build: Builder) -> int:
    """Replace Transposes of constant floating-point matrices by constants; return how many."""
    count = 0
    for node in list(graph):
        weight, output = node.inputs[0] if node.inputs else None, node.outputs[0]
        if kind(node) != "Transpose" or weight is None or output.dtype not in ELEMENTS:
            continue
        perm = tuple(node.attributes.get_ints("perm", (1, 0)))
        if not is_constant(weight) or rank(weight) != 2 or perm != (1, 0):
            continue
        rows, columns = static_dim(weight, 0), static_dim(weight, 1)
        if rows is None or columns is None or output.is_graph_output():
            continue
        transposed = later(
            build,
            graph,
            f"{weight.name}.transposed",
            weight,
            shape=(columns, rows),
            change=np.transpose,
        )
        output.replace_all_uses_with(transposed)
        count += 1
    return count


def divide_projections(graph: ir.Graph, build: Builder) -> int:
    """Replace what cuts a packed projection by projections of their own.

    Only where all that reads the packed one are cuts along its last axis by constants.

    Returns:
        how many packed projections were replaced.
    """
    count = 0
    for node in list(graph):
        projection = _projection(node)
        if projection is None:
            continue
        parts = _parts(projection)
        if parts is None:
            continue
        for reader, index, start, end in parts:
            with build.before(reader, label(reader)):
                part = _divided(projection, build, graph, start, end)
            substitute(reader.outputs[index], part)
        count += 1
    return count


def is_constant(value: ir.Value) -> bool:
    """Return True if a value is an initializer, or the output of a Constant."""
    return value.const_value is not None and not value.is_graph_input()


def later(
    build: Builder,
    graph: ir.Graph,
    name: str,
    source: ir.Value,
    *,
    shape: tuple[int, ...],
    change: Callable[[Array], Array],
) -> ir.Value:
    """Return a new initializer that is made of an old one when it is read."""
    tensor = source.const_value
    assert tensor is not None  # a constant's

    def make() -> ir.Value:
        unique = build.unique(name)

        def read() -> ir.TensorProtocol:
            return ir.tensor(np.ascontiguousarray(change(tensor.numpy())), name=unique)

        lazy = ir.LazyTensor(read, tensor.dtype, ir.Shape(shape), name=unique)
        value = ir.Value(
            name=unique,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(shape),
            const_value=lazy,
        )
        graph.register_initializer(value)
        return value

    return build.once(("later", name, source), make)


def _projection(node: ir.Node) -> _Projection | None:
    if kind(node) != "MatMul" or node.outputs[0].dtype not in ELEMENTS:
        return None
    source, weight = node.inputs
    if source is None or weight is None or not is_constant(weight) or rank(weight) != 2:
        return None
    product = node.outputs[0]
    uses = list(product.uses())
    reader = uses[0].node if len(uses) == 1 else None
    if reader is not None and kind(reader) == "Add" and not product.is_graph_output():
        bias = reader.inputs[1 - uses[0].idx]
        fits = bias is not None and sizes(bias) == (static_dim(weight, 1),)
        if bias is not None and fits and is_constant(bias):
            return _Projection(source, weight, bias, reader.outputs[0], product)
    return _Projection(source, weight, None, product, product)


def _parts(projection: _Projection) -> list[tuple[ir.Node, int, int, int]] | None:
    """Return every cut: its node, the index of its output, and the columns from and up to."""
    total = projection.total
    uses = total.uses()
    if not uses or total.is_graph_output() or len(uses) > _MAX_PARTS or not projection.width:
        return None
    parts: list[tuple[ir.Node, int, int, int]] = []
    for use in uses:
        if use.idx != 0 or use.node.graph is not total.producer().graph:  # type: ignore[union-attr]
            return None
        cuts = _cuts(use.node, projection.width, rank(total))
        if cuts is None or any(start >= end for start, end in cuts):
            return None
        parts += [(use.node, index, *cut) for index, cut in enumerate(cuts)]
    return parts


def _cuts(node: ir.Node, width: int, size: int | None) -> list[tuple[int, int]] | None:
    """Return the columns of each output of a Split or a Slice along the last axis."""
    last = () if size is None else (-1, size - 1)
    inputs = [*node.inputs, *[None] * 5]
    if kind(node) == "Split":
        if attribute_int(node, "axis", 0) not in last:
            return None
        number = len(node.outputs)
        whole = -(-width // number)
        parts: tuple[int, ...] | None = (*[whole] * (number - 1), width - whole * (number - 1))
        if inputs[1] is not None:
            parts = integers(inputs[1])
        if parts is None or len(parts) != number or sum(parts) != width or min(parts) < 1:
            return None
        ends = np.cumsum(parts).tolist()
        return [(end - part, end) for part, end in zip(parts, ends, strict=True)]
    return [_slice(inputs, width)] if kind(node) == "Slice" and _is_cut(inputs, last) else None


def _is_cut(inputs: Sequence[ir.Value | None], last: tuple[int, ...]) -> bool:
    """Return True if a Slice has constant ends and cuts along the last axis only."""
    starts, ends, axes, steps = (integers(value) for value in inputs[1:5])
    one_by_one = steps == (1,) or inputs[4] is None
    single = all(numbers is not None and len(numbers) == 1 for numbers in (starts, ends, axes))
    return single and axes is not None and axes[0] in last and one_by_one


def _slice(inputs: Sequence[ir.Value | None], width: int) -> tuple[int, int]:
    starts, ends = integers(inputs[1]) or (0,), integers(inputs[2]) or (width,)
    start, end, _ = slice(starts[0], ends[0]).indices(width)
    return start, end


def _divided(
    projection: _Projection, build: Builder, graph: ir.Graph, start: int, end: int
) -> ir.Value:
    name, rows = projection.weight.name, static_dim(projection.weight, 0) or 0

    def columns(array: Array) -> Array:
        return array[..., start:end]

    part = f"{start}_{end}"
    weight = later(
        build,
        graph,
        f"{name}.{part}",
        projection.weight,
        shape=(rows, end - start),
        change=columns,
    )
    leading = sizes(projection.source)
    shape = None if leading is None else [*leading[:-1], end - start]
    dtype = projection.product.dtype
    product = build.op("MatMul", [projection.source, weight], "MatMul", dtype=dtype, shape=shape)
    if projection.bias is None:
        return product
    name = f"{projection.bias.name}.{part}"
    bias = later(build, graph, name, projection.bias, shape=(end - start,), change=columns)
    return build.op("Add", [product, bias], "Add", dtype=dtype, shape=shape)
