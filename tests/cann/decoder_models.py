"""Models of the decoder's own operators for the host bridge: each between nodes of the provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.cann.session import Array
from tq_onnx.ops.domain import (
    DOMAIN,
    GATHER,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    SWISH,
    TRANSPOSE,
    VERSION,
)

POSITIONS = 40
ROWS = 24

#: Names of the operators' inputs; the first has the model's floats.
INPUTS = {
    RMS_NORMALIZATION: ("X", "scale"),
    ROTARY_EMBEDDING: ("X", "cos_cache", "sin_cache", "position_ids"),
    SWISH: ("X",),
    TRANSPOSE: ("X",),
    GATHER: ("data", "indices"),
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    RMS_NORMALIZATION: {"epsilon": 1e-6},
    TRANSPOSE: {"perm": [0, 2, 1, 3]},
}
_TYPES = {
    "cos_cache": ir.DataType.FLOAT,
    "sin_cache": ir.DataType.FLOAT,
    "position_ids": ir.DataType.INT64,
    "indices": ir.DataType.INT64,
}


def model_of_operator(
    op: str,
    dtype: str = "float32",
    attributes: Mapping[str, Any] | None = None,
    constants: Mapping[str, Array] | None = None,
    *,
    around: bool = True,
) -> bytes:
    """Neg of the first input, the operator, Neg of what it gives; shapes are not in the model.

    Args:
        op: name of the operator.
        dtype: of its floats.
        attributes: those of the node, where they are not ``ATTRIBUTES``.
        constants: inputs that are initializers, by name.
        around: whether there are the two other nodes.
    """
    element = ir.DataType[{"float32": "FLOAT"}.get(dtype, dtype.upper())]
    given = dict(constants or {})
    values = {}
    for name in INPUTS[op]:
        values[name] = ir.Value(name=name, type=ir.TensorType(_TYPES.get(name, element)))
        if name in given:
            values[name].const_value = ir.tensor(given[name], name=name)
            values[name].shape = ir.Shape(given[name].shape)
    # The provider has no Neg of bfloat16.
    other = "Identity" if dtype == "bfloat16" else "Neg"
    nodes: list[ir.Node] = []

    def add(name: str, kind: str, inputs: list[ir.Value], **given: Any) -> ir.Value:
        node = ir.node(kind, inputs, given, domain=DOMAIN if kind == op else "", name=name)
        node.outputs[0].name = f"{name}_output"
        node.outputs[0].type = ir.TensorType(element)
        nodes.append(node)
        return node.outputs[0]

    first, *others = values.values()
    shown = ATTRIBUTES.get(op, {}) if attributes is None else attributes
    before = add("before", other, [first]) if around else first
    result = add(op, op, [before, *others], **shown)
    graph = ir.Graph(
        [value for name, value in values.items() if name not in given],
        [add("after", other, [result]) if around else result],
        nodes=nodes,
        initializers=[value for name, value in values.items() if name in given],
        opset_imports={"": 18, DOMAIN: VERSION},
        name=op,
    )
    data: bytes = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
    return data


def feeds_of(op: str, dtype: str, shape: tuple[int, ...], **others: Array) -> dict[str, Array]:
    """Inputs: the first of this shape, the others that fit it, where they are not given."""
    rng = np.random.default_rng(0)
    made = {INPUTS[op][0]: rng.standard_normal(shape).astype(dtype)}
    if op == RMS_NORMALIZATION:
        made["scale"] = rng.standard_normal(shape[-1:]).astype(dtype)
    if op == ROTARY_EMBEDDING:
        angles = rng.uniform(0, 6, (POSITIONS, shape[-1] // 2))
        made |= {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
        made = {
            name: array.astype("float32" if "_" in name else dtype) for name, array in made.items()
        }
        made["position_ids"] = np.arange(shape[2])[None] + 3
    if op == GATHER:
        made["indices"] = np.array([[0, 5, shape[0] - 1]])
    return {**made, **others}
