"""Schemas of the decoder's own operators: what is inferred, what is refused and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError

from tests.ops.decoder_oracles import SHAPES, TYPES, decoder_feeds
from tests.singleop import decoder_model
from tq_onnx.ops.domain import (
    DECODER,
    DOMAIN,
    GATHER,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    SWISH,
    TRANSPOSE,
    VERSION,
)
from tq_onnx.ops.operators import BY_NAME, OPERATORS
from tq_onnx.ops.schema import registered

Sizes = dict[str, list[int | str]]


@pytest.fixture(autouse=True)
def schemas() -> Iterator[None]:
    with registered():
        yield


def inferred(op: str, sizes: Sizes) -> list[Any] | None:
    """The shape of Y; None if it is unknown."""
    model = decoder_model(op, shapes=sizes)
    result = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    kind = result.graph.output[0].type.tensor_type
    assert kind.elem_type == onnx.TensorProto.FLOAT
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]


@pytest.mark.parametrize("op", DECODER)
def test_everything_is_documented(op: str) -> None:
    schema = onnx.defs.get_schema(op, VERSION, DOMAIN)
    operator = BY_NAME[op]
    assert schema.doc == operator.summary
    for found, expected in ((schema.inputs, operator.inputs), (schema.outputs, operator.outputs)):
        described = [(p.name, p.description) for p in found]
        assert described == [(p.name, p.meaning) for p in expected]
    meanings = {a.name: a.meaning for a in operator.attributes}
    assert {name: a.description for name, a in schema.attributes.items()} == meanings
    assert all(attribute.required for attribute in schema.attributes.values())


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("op", "shape"), SHAPES)
def test_models_are_accepted(op: str, shape: tuple[int, ...], dtype: ir.DataType) -> None:
    feeds = decoder_feeds(op, shape)
    sizes: Sizes = {name: list(array.shape) for name, array in feeds.items()}
    model = decoder_model(op, dtype, shapes=sizes)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model), full_check=True)


@pytest.mark.parametrize(
    ("op", "sizes", "expected"),
    [
        (RMS_NORMALIZATION, {"X": ["b", "t", 64], "scale": [64]}, ["b", "t", 64]),
        (RMS_NORMALIZATION, {}, None),
        (
            ROTARY_EMBEDDING,
            {"X": ["b", 8, "t", 64], "cos_cache": [9, 32], "position_ids": [1, "t"]},
            ["b", 8, "t", 64],
        ),
        (SWISH, {"X": [3, "e"]}, [3, "e"]),
        (SWISH, {}, None),
        (TRANSPOSE, {"X": ["b", "t", 8, 64]}, ["b", 8, "t", 64]),
        (TRANSPOSE, {}, ["unk__0", "unk__1", "unk__2", "unk__3"]),
        (GATHER, {"data": [256, 64], "indices": ["b", "t"]}, ["b", "t", 64]),
        (GATHER, {"data": ["v", 64], "indices": [3]}, [3, 64]),
        (GATHER, {"data": [256, 64]}, None),
        (GATHER, {"indices": ["t"]}, ["t", "unk__0"]),
    ],
)
def test_what_is_inferred(op: str, sizes: Sizes, expected: list[Any] | None) -> None:
    assert inferred(op, sizes) == expected


@pytest.mark.parametrize(
    ("op", "sizes", "message"),
    [
        (
            RMS_NORMALIZATION,
            {"X": [3, 64], "scale": [32]},
            "last dimension of X and scale differs: 32 and 64",
        ),
        (RMS_NORMALIZATION, {"scale": [1, 64]}, "scale has 2 dimensions, not 1"),
        (RMS_NORMALIZATION, {"X": []}, "X has no dimensions"),
        (ROTARY_EMBEDDING, {"X": [3, 4, 64]}, "X has 3 dimensions, not 4"),
        (
            ROTARY_EMBEDDING,
            {"X": [1, 2, 3, 64], "cos_cache": [9, 64]},
            "the head size of X and twice the width of cos_cache differs: 64 and 128",
        ),
        (
            ROTARY_EMBEDDING,
            {"cos_cache": [9, 32], "sin_cache": [8, 32]},
            "number of rows of cos_cache and sin_cache differs: 8 and 9",
        ),
        (
            ROTARY_EMBEDDING,
            {"cos_cache": [9, 32], "sin_cache": [9, 16]},
            "width of cos_cache and sin_cache differs: 16 and 32",
        ),
        (
            ROTARY_EMBEDDING,
            {"X": [2, 2, 3, 64], "position_ids": [3, 3]},
            "batch size of position_ids is 3, not 1 or 2",
        ),
        (
            ROTARY_EMBEDDING,
            {"X": [2, 2, 3, 64], "position_ids": [1, 4]},
            "number of tokens of X and position_ids differs: 3 and 4",
        ),
        (ROTARY_EMBEDDING, {"position_ids": [4]}, "position_ids has 1 dimensions, not 2"),
        (TRANSPOSE, {"X": [2, 3]}, "X has 2 dimensions, not 4"),
        (GATHER, {"data": [2, 3, 4]}, "data has 3 dimensions, not 2"),
        (GATHER, {"indices": []}, "indices has 0 dimensions, not 1 or 2"),
        (GATHER, {"indices": [1, 2, 3]}, "indices has 3 dimensions, not 1 or 2"),
    ],
)
def test_contradictions_are_refused(op: str, sizes: Sizes, message: str) -> None:
    with pytest.raises(InferenceError, match=message):
        inferred(op, sizes)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        (RMS_NORMALIZATION, {"epsilon": -1.0}, "epsilon is -1, not a finite number from 0 on"),
        (RMS_NORMALIZATION, {"epsilon": float("nan")}, "epsilon is nan, not a finite number"),
        (RMS_NORMALIZATION, {"epsilon": float("inf")}, "epsilon is inf, not a finite number"),
        (TRANSPOSE, {"perm": [0, 1, 3, 2]}, r"perm is \[0, 1, 3, 2\], not \[0, 2, 1, 3\]"),
        (TRANSPOSE, {"perm": [1, 0]}, r"perm is \[1, 0\], not"),
    ],
)
def test_attributes_are_refused(op: str, attributes: dict[str, Any], message: str) -> None:
    model = decoder_model(op, attributes=attributes)
    with pytest.raises(InferenceError, match=message):
        onnx.shape_inference.infer_shapes(model, strict_mode=True)


@pytest.mark.parametrize("op", [RMS_NORMALIZATION, TRANSPOSE])
def test_attributes_are_required(op: str) -> None:
    sizes: Sizes = {"X": [1, 2, 3, 64], "scale": [64]}
    model = decoder_model(op, attributes={}, shapes=sizes)
    model.graph.output[0].type.tensor_type.shape.SetInParent()
    with pytest.raises(ValidationError, match="Required attribute"):
        onnx.checker.check_model(model)


def test_there_is_an_operator_for_each_name() -> None:
    assert tuple(each.name for each in OPERATORS[4:]) == DECODER
