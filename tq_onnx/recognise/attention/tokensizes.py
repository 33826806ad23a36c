"""Show that attention has one query for each new row, by the sizes of one call.

``tokens`` looks for nodes that choose among the tokens by an index. There are other ways to have
fewer queries than new rows: a Reshape that splits the tokens, and then a Slice, a sum or a product
over one half; pooling; a convolution with strides. So the sizes of all inputs are put into the
graph as numbers, and what follows for the queries and for the new rows has to be the same number.
Where nothing follows, the layer is refused.

A number of tokens that many numbers divide lets every such way have an exact answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.operators import FUSED, kind
from tq_onnx.graph.shapes import infer, without_weights
from tq_onnx.graph.sizerules import Size, Sizes, sizes
from tq_onnx.graph.sizes import walk
from tq_onnx.graph.values import rank
from tq_onnx.recognise.site import Site

_BATCH: Final = 7
_NEW: Final = 360
_PAST: Final = 83
"""With the new tokens not more than the smallest tables of positions have rows (Whisper: 448)."""


class TokenSizes:
    """The sizes of all values of a graph in one call."""

    def __init__(self, model: ir.Model, tokens: ir.Value, sites: Sequence[Site]) -> None:
        """Put numbers in the place of the names of sizes; see the class for arguments."""
        self._names = _names(model.graph.inputs, tokens, sites)
        self._declared = {
            value.name: shape
            for node in model.graph
            for value in node.outputs
            if value.name and (shape := sizes(value)) is not None
        }
        self._widths = {site.output.name: site.num_heads * site.result_size for site in sites}
        self._shapes = self._walked(_inferred(model, tokens, self._names))
        shape = self._shapes.get(tokens.name or "")
        self.new_tokens: Size = shape[1] if shape is not None and len(shape) > 1 else None
        """Dimension 1 of the tokens."""
        self._batch = shape[0] if shape else None

    def of(self, value: ir.Value, axis: int) -> int | None:
        """Return a dimension; None if nothing tells it."""
        shape = self._shapes.get(value.name or "")
        size = shape[axis] if shape is not None and axis < len(shape) else None
        return size if isinstance(size, int) else None

    def complaint(self, site: Site) -> str:
        """Return the reason why a layer may ask with other tokens than it caches, or nothing."""
        counts = [self.of(value, axis) for value, axis in site.token_axes]
        if None in counts:
            return (
                "the graph does not show that as many tokens ask as are cached; "
                "run ONNX shape inference first"
            )
        if len(set(counts)) > 1:
            return "the number of tokens that ask differs from the number that is cached"
        for value, rows in site.batch_axes:
            size = self.of(value, 0)
            if size is None or not isinstance(self._batch, int) or size != self._batch * rows:
                return "the graph does not show that batch and heads are one dimension of attention"
        return ""

    def _walked(self, graph: ir.Graph) -> dict[str, Sizes]:
        known = {value.name or "": shape for value in graph.inputs if (shape := sizes(value))}
        for node, value, result in walk(graph):
            for output in (value, *(sibling for sibling in node.outputs if sibling is not value)):
                shapes = [
                    sizes(output),
                    result if output is value else None,
                    self._attention(node, output),
                    self._by_name(output),
                ]
                merged = _merged([_numbers(shape) for shape in shapes])
                if merged is not None:
                    output.shape = ir.Shape(merged)
                    known[output.name or ""] = merged
        return known

    def _attention(self, node: ir.Node, output: ir.Value) -> Sizes | None:
        """Return the shape of fused attention, which onnx does not know."""
        query = node.inputs[0] if node.inputs else None
        shape = sizes(query)
        if kind(node) not in FUSED or output is not node.outputs[0] or not shape:
            return None
        return (*shape[:2], self._widths.get(output.name)) if len(shape) == 3 else shape

    def _by_name(self, value: ir.Value) -> Sizes | None:
        """Return what the model tells of a value, in numbers."""
        shape = self._declared.get(value.name or "")
        return None if shape is None else tuple(_number(size, self._names) for size in shape)


def _names(inputs: Sequence[ir.Value], tokens: ir.Value, sites: Sequence[Site]) -> dict[str, int]:
    names: dict[str, int] = {}
    pairs: list[tuple[ir.Value, Sequence[int]]] = [(tokens, (_BATCH, _NEW))]
    for site in sites:
        for cache in (site.key, site.value):
            if cache.past is not None:
                letters = {"B": _BATCH, "P": _PAST}
                dims = cache.views[cache.past]
                pairs.append((cache.past, tuple(letters.get(dim, 0) for dim in dims)))
    # A list of positions, which may have a name of its own for its length.
    lists = (value for value in inputs if value.dtype is ir.DataType.INT64 and rank(value) == 1)
    pairs += [(value, (_NEW,)) for value in lists]
    for value, numbers in pairs:
        for size, number in zip(sizes(value) or (), numbers, strict=False):
            if isinstance(size, str) and number:
                names.setdefault(size, number)
    return names


def _inferred(model: ir.Model, tokens: ir.Value, names: Mapping[str, int]) -> ir.Graph:
    """Return the graph with the sizes that onnx's inference tells, and no others."""
    proto = without_weights(model)
    del proto.graph.value_info[:]
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            number = names.get(dim.dim_param) if dim.HasField("dim_param") else None
            if number is None and value.name == tokens.name and not dim.HasField("dim_value"):
                number = (_BATCH, _NEW)[axis] if axis < 2 else None
            if number is not None:
                dim.dim_value = number
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    with suppress(Exception):  # what it cannot work with is left to the rules
        proto = infer(proto)
    return ir.from_proto(proto).graph


def _number(size: Size, names: Mapping[str, int]) -> Size:
    return names.get(size) if isinstance(size, str) else size


def _numbers(shape: Sizes | None) -> Sizes | None:
    """Return a shape without names: those that inference makes up stand for nothing known."""
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in shape)


def _merged(shapes: Sequence[Sizes | None]) -> Sizes | None:
    """Return the first number that is known of each dimension."""
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None
    alike = [shape for shape in known if len(shape) == len(known[0])]
    return tuple(_first(column) for column in zip(*alike, strict=True))


def _first(column: Sequence[Size]) -> Size:
    return next((size for size in column if size is not None), None)
