"""Models of the decoder's own operators for the host bridge: each between nodes of the provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.cann.session import Array
from tests.operatormodels import OperatorModel
from tests.singleop import DECODER_ATTRIBUTES, INPUTS
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE
from tq_onnx.ops.operators import BY_NAME

POSITIONS = 40
ROWS = 24

SHAPES: list[tuple[str, tuple[int, ...]]] = [
    *((RMS_NORMALIZATION, shape) for shape in ((16,), (3, 24), (2, 3, 4, 128), (1, 2, 1601))),
    *((ROTARY_EMBEDDING, shape) for shape in ((1, 2, 1, 64), (2, 3, 9, 128), (1, 1, 33, 64))),
    *((SWISH, shape) for shape in ((15,), (2, 3, 48), (1, 5, 6400))),
    *((TRANSPOSE, shape) for shape in ((1, 2, 3, 7), (2, 5, 4, 64), (1, 3, 33, 128))),
    *((GATHER, shape) for shape in ((9, 1), (24, 64), (200, 33))),
]


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
        attributes: of the node, where they are not ``DECODER_ATTRIBUTES``.
        constants: inputs that are initializers, by name.
        around: whether there are the two other nodes.
    """
    operator = BY_NAME[op]
    model = OperatorModel(dtype, constants=constants)
    # The provider has no Neg of bfloat16.
    other = "Identity" if dtype == "bfloat16" else "Neg"
    first, output = operator.inputs[0], f"{op}_output"
    names = {}
    if around:
        given = model.input(first.name, model.dtype)
        model.node(other, [given], {"before_output": model.dtype})
        names = {first: "before_output"}
    shown = DECODER_ATTRIBUTES.get(op, {}) if attributes is None else attributes
    result = model.operator(operator, shown, output, names=names)
    if around:
        output = "after_output"
        model.node(other, [result], {output: model.dtype})
    data: bytes = model.build([output]).SerializeToString()
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
