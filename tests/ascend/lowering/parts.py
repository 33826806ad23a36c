"""Small graphs, before and after a part of them is lowered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tests.decoders.running import Array, session
from tq_onnx.conversion import bake
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN, MICROSOFT
from tq_onnx.ops.functions import decoder_function_protos

Lower = Callable[[ir.Model, Builder], int]


def part(
    inputs: str,
    outputs: str,
    body: str,
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 18,
) -> ir.Model:
    """A graph from onnx's text form, its weights from arrays."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : {opset}, "{MICROSOFT}" : 1, "{DOMAIN}" : 1]>\n'
            f"part ({inputs}) => ({outputs}) {{\n{body}\n}}"
        )
    )
    for name, array in (weights or {}).items():
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
        )
        # What the text only names is a value of its own until something declares it.
        for node in model.graph:
            for index, operand in enumerate(node.inputs):
                if operand is not None and operand.name == name:
                    node.replace_input_with(index, value)
        model.graph.register_initializer(value)
    fill_shapes(model)
    return model


def run(model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
    return [np.asarray(found) for found in session(model).run(None, dict(feeds))]


def finish(model: ir.Model) -> Counter[str]:
    """Removes what is dead, adds bodies, and counts the nodes, ours with a dot before the name."""
    RemoveUnusedNodesPass()(model)
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    bake.add_functions(model, decoder_function_protos([name for name in DECODER if name in used]))
    return Counter(
        f".{node.op_type}" if node.domain == DOMAIN else node.op_type for node in model.graph
    )


def lowered(
    model: ir.Model, lower: Lower, feeds: Mapping[str, Array], tolerance: float = 1e-5
) -> tuple[int, Counter[str]]:
    """Lowers a graph, expects the same results, and tells how many and what is left."""
    before = run(model, feeds)
    names = [value.name for value in model.graph.outputs]
    count = lower(model, Builder(model.graph))
    nodes = finish(model)
    assert [value.name for value in model.graph.outputs] == names
    for expected, found in zip(before, run(model, feeds), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert np.abs(found.astype(np.float64) - expected).max() <= tolerance
    return count, nodes


def left_alone(model: ir.Model, lower: Lower) -> None:
    """Expects a graph to stay what it is."""
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert lower(model, Builder(model.graph)) == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def numbers(*shape: int, seed: int = 0, dtype: type = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
