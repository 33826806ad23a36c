"""Single-node models of the two operators and sessions over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from tests.operatormodels import (
    OperatorModel,
    attention_attributes,
    encode_attributes,
    single_operator,
)
from tests.singleop import optional_inputs, with_features
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.features import ATTENTION_BIAS, HEAD_SINK, LEFT_PADDING, OFFSETS
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.runtime.library import get_library_path

Array = npt.NDArray[np.generic]

FLOATS = {
    "float32": (ir.DataType.FLOAT, np.dtype(np.float32)),
    "float16": (ir.DataType.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (ir.DataType.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
ENCODE_DEFAULTS = encode_attributes(Codec(LLOYD_MAX, 4))
ATTENTION_DEFAULTS = attention_attributes(Codec(LLOYD_MAX, 4), Codec(LLOYD_MAX, 4), 128**-0.5)


def encode_model(
    dtype: str = "float32",
    *,
    offset: bool = False,
    search: bool = False,
    constants: Mapping[str, Array] | None = None,
    **attributes: object,
) -> bytes:
    """A model of one TurboQuantEncode; inputs named as in the operator."""
    chosen = {k: v for k, v in {**ENCODE_DEFAULTS, **attributes}.items() if v is not None}
    optional = [Encode.offset] * offset + [Encode.gains, Encode.feedback] * search
    return single_operator(Encode, chosen, dtype, constants=constants, optional=optional)


def attention_model(
    dtype: str = "float32",
    *,
    bias: bool = False,
    sink: bool = False,
    offset: bool = False,
    padding: bool = False,
    without: str = "",
    constants: Mapping[str, Array] | None = None,
    **attributes: object,
) -> bytes:
    """A model of one TurboQuantDequantAttention; inputs named as in the operator."""
    chosen = {k: v for k, v in {**ATTENTION_DEFAULTS, **attributes}.items() if v is not None}
    has = optional_inputs(
        with_features(
            {ATTENTION_BIAS: bias, HEAD_SINK: sink, OFFSETS: offset, LEFT_PADDING: padding}
        )
    )
    optional = [each for each in has if each.name != without]
    return single_operator(Attention, chosen, dtype, constants=constants, optional=optional)


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
    to = ir.DataType.FLOAT
    model = OperatorModel("bfloat16")
    x = model.input("x", ir.DataType.BFLOAT16)
    model.node("Cast", [x], {"y": to}, {"to": int(to)})
    session = ort.InferenceSession(
        model.build(["y"]).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wide = session.run_with_ort_values(None, {"x": value})[0].numpy()
    assert list(wide.shape) == list(shape)
    return wide
