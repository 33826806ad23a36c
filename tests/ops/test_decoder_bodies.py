"""The decoder's own operators: bodies in two runtimes and the best kernels against numpy."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.native.single_node import make_session
from tests.ops.decoder_oracles import (
    EMPTY_SHAPES,
    ORACLES,
    SHAPES,
    TYPES,
    Array,
    Shape,
    assert_close,
    decoder_feeds,
)
from tests.singleop import DECODER_ATTRIBUTES, INPUTS, RUNTIMES, decoder_model
from tq_onnx.ops.domain import (
    BODY_OPSET,
    DECODER,
    DOMAIN,
    GATHER,
    RMS_NORMALIZATION,
    SWISH,
    TRANSPOSE,
)
from tq_onnx.ops.functions import decoder_function_protos
from tq_onnx.ops.operators import BY_NAME

# Of one meaning in all opsets from 15 to 24.
SAFE = {
    *("Cast", "CastLike", "Constant", "ReduceSum", "Mul", "Div", "Add", "Sub", "Sqrt", "Shape"),
    *("Gather", "Unsqueeze", "Slice", "Concat", "Neg", "Exp", "Transpose"),
}


def run_kernel(model: onnx.ModelProto, feeds: dict[str, Array], threads: int = 2) -> list[Array]:
    """With the library; a registered operator never runs its body."""
    return make_session(model.SerializeToString(), threads).run(None, feeds)


EVERYTHING = {**RUNTIMES, "kernel": run_kernel}


@pytest.mark.parametrize("runtime", EVERYTHING)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("op", "shape"), SHAPES)
def test_the_numbers(op: str, shape: Shape, dtype: ir.DataType, runtime: str) -> None:
    feeds = decoder_feeds(op, shape, dtype)
    model = decoder_model(op, dtype)
    (given,) = EVERYTHING[runtime](model, feeds)
    if op in {TRANSPOSE, GATHER}:
        np.testing.assert_array_equal(given, ORACLES[op](feeds))
    else:
        assert_close(given, ORACLES[op](feeds), dtype)
    if runtime == "kernel":
        np.testing.assert_array_equal(given, *run_kernel(model, feeds, 4))


@pytest.mark.parametrize("runtime", ["onnxruntime", "kernel"])
@pytest.mark.parametrize(("op", "shape"), EMPTY_SHAPES)
def test_nothing(op: str, shape: Shape, runtime: str) -> None:
    feeds = decoder_feeds(op, shape)
    (given,) = EVERYTHING[runtime](decoder_model(op), feeds)
    assert given.shape == ORACLES[op](feeds).shape


@pytest.mark.parametrize("opset", [15, 17, 18, 21, 23, 24])
@pytest.mark.parametrize("op", DECODER)
def test_the_model_around_it_may_have_any_opset_from_15(op: str, opset: int) -> None:
    """onnxruntime reads an inlined body with the opset of the graph that calls it."""
    shape = next(shape for name, shape in SHAPES if name == op)
    feeds = decoder_feeds(op, shape)
    (given,) = RUNTIMES["onnxruntime"](decoder_model(op, opset=opset), feeds)
    assert_close(given, ORACLES[op](feeds), ir.DataType.FLOAT)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_swish_where_the_exponential_overflows(runtime: str) -> None:
    feeds = {"X": np.array([-1e4, -100.0, -0.0, 100.0, 1e4], np.float32)}
    (given,) = RUNTIMES[runtime](decoder_model(SWISH), feeds)
    np.testing.assert_allclose(given, [0, 0, 0, 100, 1e4], atol=1e-30)


def test_a_row_of_zeros_stays_one() -> None:
    feeds = {"X": np.zeros((2, 8), np.float32), "scale": np.ones(8, np.float32)}
    (given,) = RUNTIMES["onnxruntime"](decoder_model(RMS_NORMALIZATION), feeds)
    np.testing.assert_array_equal(given, feeds["X"])


@pytest.mark.parametrize("op", DECODER)
def test_what_travels_in_a_model(op: str) -> None:
    (proto,) = decoder_function_protos([op])
    operator = BY_NAME[op]
    assert (proto.name, proto.domain) == (op, DOMAIN)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", BODY_OPSET)]
    assert tuple(proto.input) == INPUTS[op] == tuple(each.name for each in operator.inputs)
    assert list(proto.output) == [each.name for each in operator.outputs]
    assert list(proto.attribute) == list(DECODER_ATTRIBUTES.get(op, {}))
    assert {node.op_type for node in proto.node} <= SAFE
    assert all(node.domain == "" for node in proto.node)
    for each in (*operator.inputs, *operator.outputs, *operator.attributes):
        assert f"`{each.name}`: {each.meaning}" in proto.doc_string
    onnx.checker.check_function(proto)


def test_bodies_come_in_the_order_of_the_names_and_are_fresh() -> None:
    names = DECODER[::-1]
    first, second = (decoder_function_protos(names) for _ in range(2))
    assert tuple(proto.name for proto in first) == names
    first[0].name = "another"
    assert second[0].name == names[0]
    assert decoder_function_protos([]) == []
