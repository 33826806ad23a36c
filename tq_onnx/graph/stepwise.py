"""Evaluate a part of a graph node by node, again and again, when it may fail.

``tq_onnx.graph.evaluate`` computes numbers that must exist. Here the question is whether a graph
takes inputs of some sizes at all: a node that cannot be computed leaves its results unknown, and
everything that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from tq_onnx.graph.evaluate import EXTENSIONS, Array
from tq_onnx.graph.liveness import live_nodes, nested_nodes

_IR_VERSION: Final = 10
_MOST_NODES: Final = 2_000
_MOST_NUMBERS: Final = 1 << 20
"""Of a constant, or of a result; what is larger counts as unknown."""
_MOST_SIZES: Final = 64
"""Of a list of sizes."""
_GROWING: Final = {
    **dict.fromkeys(("ConstantOfShape", "Range"), 0),
    **dict.fromkeys(("Expand", "Tile", "Pad", "OneHot", "Resize", "Reshape"), 1),
}
"""Operators whose inputs say how large their result is, and the first of those inputs."""


class Steps:
    """The nodes that compute some values.

    Args:
        graph: in topological order.
        arrays: values whose numbers are known, the same in every run.
        varied: values whose numbers are given to each run.
    """

    def __init__(
        self,
        graph: ir.Graph,
        values: Collection[ir.Value],
        arrays: Mapping[ir.Value, Array],
        varied: Collection[ir.Value],
    ) -> None:
        """Compute what does not depend on the varied values; see the class for arguments."""
        live = live_nodes(values, cut={*arrays, *varied})
        nodes = [node for node in graph if node in live]
        self._known: dict[ir.Value, Array | None] = dict(arrays)
        self._late: list[tuple[ir.Node, ReferenceEvaluator | None]] = []
        late = set(varied)
        for node in nodes if len(nodes) <= _MOST_NODES else ():
            evaluator = _evaluator(node, graph)
            if any(value in late for value in node.inputs):
                late.update(node.outputs)
                self._late.append((node, evaluator))
            else:
                _step(node, evaluator, self._known)

    def run(self, varied: Mapping[ir.Value, Array]) -> Mapping[ir.Value, Array | None]:
        """Return the numbers of all values that the graph gives any for."""
        known = {**self._known, **varied}
        for node, evaluator in self._late:
            _step(node, evaluator, known)
        return known


def _step(
    node: ir.Node, evaluator: ReferenceEvaluator | None, known: dict[ir.Value, Array | None]
) -> None:
    numbers = [None if value is None else _read(value, known) for value in node.inputs]
    missing = any(
        array is None and value is not None
        for value, array in zip(node.inputs, numbers, strict=True)
    )
    if evaluator is None or missing or _may_be_large(node, numbers):
        return
    feeds = {f"i{index}": array for index, array in enumerate(numbers) if array is not None}
    try:
        # Divisions by zero and the like are the graph's own affair.
        with np.errstate(all="ignore"):
            results = evaluator.run(None, feeds)
    except Exception:  # the evaluator's errors are of many types: the sizes do not fit
        return
    for value, array in zip(node.outputs, results, strict=False):
        numpy = np.asarray(array)
        if numpy.size <= _MOST_NUMBERS:
            known[value] = numpy


def _may_be_large(node: ir.Node, numbers: Sequence[Array | None]) -> bool:
    """Return True if a result may have too many numbers; sizes and repeats are numbers, too."""
    arrays = [array for array in numbers if array is not None]
    if prod(max(array.size, 1) for array in arrays) > _MOST_NUMBERS:
        try:
            if prod(np.broadcast_shapes(*(array.shape for array in arrays))) > _MOST_NUMBERS:
                return True
        except ValueError:
            return True
    if node.op_type not in _GROWING:
        return False
    counts = [
        int(size)
        for array in arrays[_GROWING[node.op_type] :]
        if array.size <= _MOST_SIZES
        and array.dtype.kind in ("iuf" if node.op_type == "Range" else "iu")
        for size in array.flat
        if np.isfinite(size)
    ]
    return prod(max(abs(size), 1) for size in counts) > _MOST_NUMBERS


def _read(value: ir.Value, known: Mapping[ir.Value, Array | None]) -> Array | None:
    if value in known:
        return known[value]
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.size > _MOST_NUMBERS:
        return None
    return tensor.numpy()


def _evaluator(node: ir.Node, graph: ir.Graph) -> ReferenceEvaluator | None:
    """Return what computes one node; None for a node that the evaluator does not know."""
    if any(True for _ in nested_nodes(node)):
        return None
    proto = onnx.GraphProto(name="step")
    copy = proto.node.add()
    copy.CopyFrom(ir.serde.serialize_node(node))
    names = ["" if value is None else f"i{index}" for index, value in enumerate(node.inputs)]
    copy.input[:] = names
    copy.output[:] = [f"o{index}" for index in range(len(node.outputs))]
    for name in filter(None, names):
        proto.input.add(name=name)
    for name in copy.output:
        proto.output.add(name=name)
    model = onnx.ModelProto(graph=proto, ir_version=_IR_VERSION)
    for domain, version in graph.opset_imports.items():
        model.opset_import.add(domain=domain, version=version)
    try:
        return ReferenceEvaluator(model, new_ops=[*EXTENSIONS])
    except Exception:  # an operator that it does not know, or attributes that it refuses
        return None
