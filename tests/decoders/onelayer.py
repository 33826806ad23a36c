"""A decoder of one layer in ONNX text, whose attention is written out by the test.

Given: the projections ``q0`` ``[B, T, heads * 16]``, ``k0`` and ``v0`` ``[B, T, kv_heads * 16]``;
the same with heads of their own, ``q``, ``k``, ``v`` ``[B, heads, T, 16]``; the constants below.
The body makes ``present_key``, ``present_value`` and ``merged`` ``[B, T, heads * 16]``.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir

from tests.decoders.running import Array
from tq_onnx.recognise.match import recognise

SIZE, TOKENS = 16, 61

MODEL = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
decoder (int64[B, T] input_ids, INPUTS) => (float[B, T, 61] logits, OUTPUTS)
<int64[1] one = {1}, int64[1] zero_1 = {0}, int64[1] minus_one = {-1},
 int64 zero = {0}, int64 step = {1}, int64 two = {2}, float nothing = {0}, float quarter = {0.25},
 int64[2] first_two = {0, 1}, int64[3] zeros_ends = {0, 0, 0},
 int64[4] heads_shape = {0, 0, HEADS, 16}, int64[4] kv_shape = {0, 0, KV, 16},
 int64[3] merged_shape = {0, 0, WIDTH}, float lowest = {-3.0e38}>
{
        x = Gather(table, input_ids)
        q0 = MatMul(x, w_q)
        k0 = MatMul(x, w_k)
        v0 = MatMul(x, w_v)
        q1 = Reshape(q0, heads_shape)
        k1 = Reshape(k0, kv_shape)
        v1 = Reshape(v0, kv_shape)
        q = Transpose<perm = [0, 2, 1, 3]>(q1)
        k = Transpose<perm = [0, 2, 1, 3]>(k1)
        v = Transpose<perm = [0, 2, 1, 3]>(v1)
        BODY
        y = Add(x, merged)
        logits = MatMul(y, head)
}
"""

CACHES = "float[B, KV, P, 16] past_key, float[B, KV, P, 16] past_value"
PRESENTS = "float[B, KV, S, 16] present_key, float[B, KV, S, 16] present_value"


def decoder(
    body: str,
    *,
    inputs: str = "",
    outputs: str = PRESENTS,
    heads: int = 2,
    kv_heads: int = 2,
    opset: int = 20,
) -> ir.Model:
    """Builds the decoder.

    Args:
        body: the attention, in ONNX text.
        inputs: further inputs, with their types.
        outputs: the caches, with their types.
        heads: H.
        kv_heads: N.
        opset: of the default domain.
    """
    text = MODEL.replace("BODY", body).replace("INPUTS", inputs).replace("OUTPUTS", outputs)
    text = text.replace('"" : 20', f'"" : {opset}')
    text = text.replace(", ) =>", ") =>")
    numbers = {"HEADS": heads, "KV": kv_heads, "WIDTH": heads * SIZE}
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    proto = onnx.parser.parse_model(text)
    hidden = heads * SIZE
    proto.graph.initializer.extend(
        _weight(name, shape)
        for name, shape in {
            "table": (TOKENS, hidden),
            "head": (hidden, TOKENS),
            "w_q": (hidden, hidden),
            "w_k": (hidden, kv_heads * SIZE),
            "w_v": (hidden, kv_heads * SIZE),
        }.items()
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def assert_refused(model: ir.Model, reason: str) -> None:
    """The attention of the first layer is not recognised, for this reason."""
    recognition = recognise(model)
    assert recognition.misses
    assert reason in str(recognition.misses[0])


def _weight(name: str, shape: tuple[int, int]) -> onnx.TensorProto:
    rng = np.random.default_rng(sum(map(ord, name)))
    factor = 1 if name == "table" else 2 / np.sqrt(shape[0])
    numbers: Array = rng.standard_normal(shape) * factor
    return onnx.numpy_helper.from_array(numbers.astype(np.float32), name)
