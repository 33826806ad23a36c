"""Quantised weights as numbers, against onnxruntime's own kernels for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tq_onnx.ascend.lowering import weights
from tq_onnx.ascend.lowering.weights import TYPES, ExpandWeightsPass, NarrowProductsPass
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.streamed import StreamedTensor, streamed
from tq_onnx.ops.singleop import OperatorModel

K, N = 80, 48
"""K is no multiple of a block of 32, as weights of MatMulNBits may be."""


def _blocks(rows: int, block: int) -> int:
    return -(-rows // block)


def product(
    bits: int = 4,
    block: int = 32,
    zero_points: str = "",
    dtype: str = "float32",
    **attributes: int,
) -> onnx.ModelProto:
    """``y = MatMulNBits(x)`` with random weights; ``zero_points`` is '', 'packed' or 'floats'."""
    rng = np.random.default_rng(bits + block)
    blocks = _blocks(K, block)
    weights = {
        "codes": rng.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.1, (N, blocks)).astype(dtype),
    }
    if zero_points == "packed":
        weights["zeros"] = rng.integers(0, 256, (N, -(-blocks * bits // 8))).astype(np.uint8)
    elif zero_points:
        weights["zeros"] = rng.uniform(0, 1 << bits, (N, blocks)).astype(dtype)
    attributes = {"K": K, "N": N, "bits": bits, "block_size": block, **attributes}
    ours = ir.DataType.from_numpy(np.dtype(dtype))
    x = _value("x", ours, K)
    return _model("MatMulNBits", x, weights, attributes, _value("y", ours, N))


def table(bits: int = 4, zero_points: bool = False, block: int = 16) -> onnx.ModelProto:
    """``y = GatherBlockQuantized(x)`` of a table with 40 rows."""
    rng = np.random.default_rng(bits)
    rows, width = 40, 64
    weights = {
        "codes": rng.integers(0, 256, (rows, width * bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.1, (rows, width // block)).astype(np.float32),
    }
    if zero_points:
        count = width // block * bits // 8
        weights["zeros"] = rng.integers(0, 256, (rows, count)).astype(np.uint8)
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": block, "bits": bits}
    x, y = _value("x", ir.DataType.INT64), _value("y", ir.DataType.FLOAT, width)
    return _model("GatherBlockQuantized", x, weights, attributes, y)


def _value(name: str, dtype: ir.DataType, *inner: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(["T", *inner]))


def _model(
    op_type: str,
    x: ir.Value,
    weights: dict[str, np.ndarray],
    attributes: dict[str, int],
    y: ir.Value,
) -> onnx.ModelProto:
    """A model of one node; the indices of a table are its second input."""
    constants = [
        ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        for name, array in weights.items()
    ]
    first, *others = constants
    inputs = [x, first, *others] if op_type == "MatMulNBits" else [first, x, *others]
    node = ir.node(op_type, inputs, attributes, domain="com.microsoft", outputs=[y], name="product")
    graph = ir.Graph(
        [x], [y], nodes=[node], initializers=constants, name="weights",
        opset_imports={"": 17, "com.microsoft": 1},
    )  # fmt: skip
    return ir.to_proto(ir.Model(graph, ir_version=9))


def expanded(proto: onnx.ModelProto, dtype: str = "float32") -> onnx.ModelProto:
    model = ir.from_proto(proto)
    ir.passes.Sequential(ExpandWeightsPass(), NarrowProductsPass(TYPES[dtype]))(model)
    assert not {node.op_type for node in model.graph} & {
        *("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear")
    }
    return ir.to_proto(model)


def run(proto: onnx.ModelProto, x: np.ndarray, *, as_written: bool = False) -> np.ndarray:
    """Otherwise ONNX Runtime may make other products of nodes, which round activations."""
    options = ort.SessionOptions()
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


def activations(dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(1).standard_normal((7, K)).astype(dtype)


# onnxruntime has no floating-point zero points for 8 bits to compare with.
@pytest.mark.parametrize(
    ("bits", "zero_points"), [(4, ""), (4, "packed"), (4, "floats"), (8, ""), (8, "packed")]
)
@pytest.mark.parametrize("block", [16, 32, 128])
def test_products_are_those_of_the_codes(bits: int, block: int, zero_points: str) -> None:
    model, x = product(bits, block, zero_points), activations()
    np.testing.assert_allclose(run(expanded(model), x), run(model, x), atol=2e-4)


LINEAR = [
    ("int8", (), 1, 0),
    ("int8", (N,), 1, 0),
    ("uint8", (K,), 0, 0),
    ("uint8", (N,), -1, 0),
    ("int16", (N,), 1, 0),
    ("int8", (K // 16, N), 0, 16),
    ("int4", (K // 16, N), 0, 16),
    ("uint4", (K, N // 16), 1, 16),
]


def linear(
    codes: str, scales: tuple[int, ...], axis: int, block: int, dtype: str = "float32"
) -> onnx.ModelProto:
    """``y = MatMul(x, DequantizeLinear(codes))``, which has zero points."""
    rng = np.random.default_rng(3)
    kind = ir.DataType[codes.upper()]
    lowest, highest = (-8, 8) if kind.is_signed() else (0, 16)
    model = OperatorModel(
        dtype,
        constants={
            "codes": rng.integers(lowest, highest, (K, N)).astype(kind.numpy()),
            "scales": rng.uniform(0.01, 0.1, scales).astype(dtype),
            "zeros": rng.integers(lowest, highest, scales).astype(kind.numpy()),
        },
        shapes={"x": ["T", K], "y": ["T", N]},
    )
    quantised = [model.input(name, kind) for name in ("codes", "scales", "zeros")]
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    weight = model.node(
        "DequantizeLinear", quantised, {"weight": model.dtype}, attributes if scales else {}
    )
    model.node("MatMul", [model.input("x", model.dtype), weight], {"y": model.dtype})
    return model.build(["y"], opsets={"": 21})


@pytest.mark.parametrize(("codes", "scales", "axis", "block"), LINEAR)
def test_constants_of_the_qdq_format(
    codes: str, scales: tuple[int, ...], axis: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 7 * N)
    model, x = linear(codes, scales, axis, block), activations()
    made = expanded(model)
    assert [node.op_type for node in made.graph.node] == ["MatMul"]
    np.testing.assert_allclose(run(made, x), run(model, x, as_written=True), atol=1e-4)


def test_constants_of_the_qdq_format_in_another_type() -> None:
    model, x = linear("int8", (N,), 1, 0), activations()
    made = expanded(model, "float16")
    assert [node.op_type for node in made.graph.node] == ["Cast", "MatMul", "Cast"]
    np.testing.assert_allclose(run(made, x), run(model, x, as_written=True), atol=0.05, rtol=2e-3)


def test_scales_that_do_not_fit_are_refused() -> None:
    model = linear("int8", (K,), 1, 0)
    with pytest.raises(UnsupportedModelError, match=r"scales of the shape \[80\] for \[80, 48\]"):
        ExpandWeightsPass()(ir.from_proto(model))


def test_products_of_float16() -> None:
    model, x = product(dtype="float16", zero_points="packed"), activations("float16")
    made = expanded(model, "float16")
    assert [node.op_type for node in made.graph.node] == ["MatMul"]
    np.testing.assert_allclose(run(made, x), run(model, x), atol=0.05, rtol=2e-3)


def test_weights_of_float16_in_a_model_of_float32() -> None:
    model, x = product(), activations()
    made = expanded(model, "float16")
    assert [node.op_type for node in made.graph.node] == ["Cast", "MatMul", "Cast"]
    weights = {one.name: one.data_type for one in made.graph.initializer}
    assert int(ir.DataType.FLOAT16) in weights.values()
    np.testing.assert_allclose(run(made, x), run(model, x), atol=0.05, rtol=2e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
def test_rows_of_a_table(bits: int, zero_points: bool) -> None:
    model, x = table(bits, zero_points), np.array([0, 39, 7, 7])
    np.testing.assert_allclose(run(expanded(model), x), run(model, x), atol=1e-6)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; the last one is shorter."""
    whole = {one.name: one.raw_data for one in expanded(product()).graph.initializer}
    rows = {one.name: one.raw_data for one in expanded(table()).graph.initializer}
    monkeypatch.setattr("tq_onnx.ascend.lowering.weights._PIECE", 3 * 64)
    monkeypatch.setattr("tq_onnx.ascend.lowering.weights._TURNED", 7 * 64)
    assert whole == {one.name: one.raw_data for one in expanded(product()).graph.initializer}
    assert rows == {one.name: one.raw_data for one in expanded(table()).graph.initializer}


def test_a_tensor_of_a_file_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(1000, dtype=np.float32)
    (tmp_path / "data").write_bytes(bytes(64) + array.tobytes())
    external = ir.ExternalTensor(
        "data", 64, array.nbytes, ir.DataType.FLOAT,
        shape=ir.Shape([10, 100]), name="w", base_dir=tmp_path,
    )  # fmt: skip
    monkeypatch.setattr("tq_onnx.files.streamed.PIECE_BYTES", 4 * 300)
    made = streamed(external, "w")
    assert isinstance(made, StreamedTensor)
    assert [len(piece) for piece in made.pieces()] == [1200, 1200, 1200, 400]
    np.testing.assert_array_equal(made.numpy(), array.reshape(10, 100))
    assert made.sources == (tmp_path / "data",)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 3}, "product: MatMulNBits has codes of 3 bits, and 2, 4 and 8 can be expanded"),
        ({"weight_prepacked": 1}, "packed for one kernel"),
        ({"K": 200}, "bytes for 200 by 48 codes of 4 bits"),
        ({"N": 0}, "is of 80 by 0 numbers"),
    ],
)
def test_forms_that_are_not_known_are_refused(change: dict[str, int], sentence: str) -> None:
    model = product(weight_prepacked=0)
    for attribute in model.graph.node[0].attribute:
        attribute.i = change.get(attribute.name, attribute.i)
    _refused(model, sentence)


def test_weights_that_the_graph_computes_are_refused() -> None:
    model = product()
    model.graph.node[0].input[1] = "x"
    _refused(model, "MatMulNBits has B that are no constant; export its weights")
    model = product()
    model.graph.node[0].input.extend(["", "scales"])
    _refused(model, "has g_idx")


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        ("quantize_axis", 0, "gathers and has its blocks along the axes [0, 0]"),
        ("gather_axis", 1, "gathers and has its blocks along the axes [1, 1]"),
        ("block_size", 48, "bytes for 64 by 40 codes of 4 bits"),
        ("block_size", 32, "has 160 scales for 80 blocks"),
    ],
)
def test_tables_of_other_forms_are_refused(attribute: str, value: int, sentence: str) -> None:
    model = table()
    next(a for a in model.graph.node[0].attribute if a.name == attribute).i = value
    _refused(model, sentence)


def _refused(model: onnx.ModelProto, sentence: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        ExpandWeightsPass()(ir.from_proto(model))
    assert sentence in str(raised.value)


def test_a_large_model_is_never_whole_in_memory(tmp_path: Path) -> None:
    """300 MB of weights are written, of which 128 MB are one tensor."""
    command = [sys.executable, "-m", "tests.ascend.lowering.int4_models", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["written_mb"] > 290
    assert figures["more_mb"] < 120
