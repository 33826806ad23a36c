"""Single-node models of the two operators and sessions over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION
from tq_onnx.runtime.library import get_library_path

Array = npt.NDArray[np.generic]

FLOATS = {
    "float32": (ir.DataType.FLOAT, np.dtype(np.float32)),
    "float16": (ir.DataType.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (ir.DataType.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
F32, U8, I64 = ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT64

ENCODE_DEFAULTS = {"codec": "lloyd_max", "bits": 4, "norm_correction": 1}
ATTENTION_DEFAULTS = {
    "scale": 128**-0.5,
    "causal": 1,
    "sliding_window": 0,
    "softcap": 0.0,
    "key_codec": "lloyd_max",
    "key_bits": 4,
    "value_codec": "lloyd_max",
    "value_bits": 4,
}


def _single_node(
    op: str,
    inputs: Sequence[tuple[str, ir.DataType] | None],
    output: tuple[str, ir.DataType],
    attributes: Mapping[str, object],
    constants: Mapping[str, Array],
) -> bytes:
    values: list[ir.Value | None] = []
    initializers = []
    for given in inputs:
        if given is None:
            values.append(None)
            continue
        name, dtype = given
        # No shapes: the operators must check whatever arrives.
        value = ir.Value(name=name, type=ir.TensorType(dtype))
        if name in constants:
            value.const_value = ir.tensor(constants[name], name=name)
            value.shape = ir.Shape(constants[name].shape)
            initializers.append(value)
        values.append(value)
    node = ir.node(op, values, dict(attributes), domain=DOMAIN, version=VERSION)
    node.outputs[0].name = output[0]
    node.outputs[0].type = ir.TensorType(output[1])
    graph = ir.Graph(
        [value for value in values if value is not None and value.name not in constants],
        node.outputs,
        nodes=[node],
        initializers=initializers,
        opset_imports={"": 18, DOMAIN: VERSION},
        name="single_node",
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


def encode_model(
    dtype: str = "float32",
    *,
    offset: bool = False,
    constants: Mapping[str, Array] | None = None,
    **attributes: object,
) -> bytes:
    """A model of one TurboQuantEncode; inputs named as in the operator."""
    inputs = [
        ("vectors", FLOATS[dtype][0]),
        ("past", U8),
        ("past_length", I64),
        ("rotation", F32),
        ("centroids", F32),
        ("boundaries", F32),
        *([("offset", F32)] if offset else []),
    ]
    chosen = {k: v for k, v in {**ENCODE_DEFAULTS, **attributes}.items() if v is not None}
    return _single_node(ENCODE, inputs, ("present", U8), chosen, constants or {})


def attention_model(
    dtype: str = "float32",
    *,
    bias: bool = False,
    sink: bool = False,
    offset: bool = False,
    without: str = "",
    constants: Mapping[str, Array] | None = None,
    **attributes: object,
) -> bytes:
    """A model of one TurboQuantDequantAttention; inputs named as in the operator."""
    inputs: list[tuple[str, ir.DataType] | None] = [
        ("query", FLOATS[dtype][0]),
        ("key_cache", U8),
        ("value_cache", U8),
        ("past_length", I64),
        ("key_rotation", F32),
        ("key_centroids", F32),
        ("value_rotation", F32),
        ("value_centroids", F32),
    ]
    inputs.append(("attention_bias", FLOATS[dtype][0]) if bias else None)
    inputs.append(("head_sink", FLOATS[dtype][0]) if sink else None)
    if offset:
        names = ("key_offset", "value_offset")
        inputs += [None if name == without else (name, F32) for name in names]
    while inputs[-1] is None:
        del inputs[-1]
    chosen = {k: v for k, v in {**ATTENTION_DEFAULTS, **attributes}.items() if v is not None}
    output = ("output", FLOATS[dtype][0])
    return _single_node(ATTENTION, inputs, output, chosen, constants or {})


def make_session(model: bytes, threads: int = 1) -> ort.InferenceSession:
    """A CPU session with the library."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(get_library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ort_value(array: Array) -> ort.OrtValue:
    """An OrtValue of any dtype, bfloat16 included; the array must stay alive."""
    if array.dtype == FLOATS["bfloat16"][1]:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(array).view(np.uint16), int(ir.DataType.BFLOAT16)
        )
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def run(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> Array:
    """The single output; bfloat16 passes through I/O binding."""
    bfloat = FLOATS["bfloat16"][1]
    if not any(array.dtype == bfloat for array in feeds.values()):
        return session.run(None, dict(feeds))[0]
    values = session.run_with_ort_values(None, {k: ort_value(v) for k, v in feeds.items()})
    raw = values[0]
    if raw.element_type() != int(ir.DataType.BFLOAT16):
        return raw.numpy()
    shape = raw.shape()
    widened = _widen(shape, raw)
    return widened.astype(bfloat)


def _widen(shape: Sequence[int], value: ort.OrtValue) -> npt.NDArray[np.float32]:
    """bfloat16 OrtValues have no numpy view; a Cast brings them over exactly."""
    model = ir.Model(
        ir.Graph(
            inputs := [ir.Value(name="x", type=ir.TensorType(ir.DataType.BFLOAT16))],
            (node := ir.node("Cast", inputs, {"to": int(F32)})).outputs,
            nodes=[node],
            opset_imports={"": 18},
            name="widen",
        ),
        ir_version=10,
    )
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(F32)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wide = session.run_with_ort_values(None, {"x": value})[0].numpy()
    assert list(wide.shape) == list(shape)
    return wide
