"""A decoder that CANNExecutionProvider runs as it is: projections and both of our operators.

It takes embeddings, has one head, and only a batch of 1: then heads need no transpose. Its plan is
in its metadata, so that it is opened like any converted model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

from simulated_kernels import INT4, rotation_of, row_bytes
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.spec import Codec, layout_digest
from tq_onnx.plan import (
    METADATA_PLAN,
    PAST_LENGTH,
    CachePlan,
    ExtraInput,
    Interface,
    LayerPlan,
    Plan,
)

HEAD_SIZE, VOCABULARY, LAYERS = 64, 97, 2
ROW = row_bytes(HEAD_SIZE)

_LAYER = """
    q{i} = MatMul(h{i}, wq{i})
    k{i} = MatMul(h{i}, wk{i})
    v{i} = MatMul(h{i}, wv{i})
    query{i} = Reshape(q{i}, heads)
    key{i} = Reshape(k{i}, heads)
    value{i} = Reshape(v{i}, heads)
    present_key{i} = ai.turboquant.TurboQuantEncode<codec = "lloyd_max", bits = 4,
        norm_correction = 1>(key{i}, past_key{i}, past_length, kr{i}, centroids, boundaries)
    present_value{i} = ai.turboquant.TurboQuantEncode<codec = "lloyd_max", bits = 4,
        norm_correction = 1>(value{i}, past_value{i}, past_length, vr{i}, centroids, boundaries)
    attended{i} = ai.turboquant.TurboQuantDequantAttention<scale = 0.125, causal = 1,
        sliding_window = 0, softcap = 0.0, key_codec = "lloyd_max", key_bits = 4,
        value_codec = "lloyd_max", value_bits = 4>(query{i}, present_key{i}, present_value{i},
        past_length, kr{i}, centroids, vr{i}, centroids)
    flat{i} = Reshape(attended{i}, tokens)
    o{i} = MatMul(flat{i}, wo{i})
    h{n} = Add(o{i}, h{i})
"""


def decoder(path: Path, extra: str = "", last: str = "") -> Path:
    """Writes the model.

    Args:
        path: where to.
        extra: nodes between the input ``inputs_embeds`` and ``h0``; by default it is scaled.
        last: nodes that make ``logits`` of ``given``.
    """
    caches = [f"{kind}{i}" for i in range(LAYERS) for kind in ("key", "value")]
    past = "".join(f", uint8[1, 1, P, {ROW}] past_{name}" for name in caches)
    present = "".join(f", uint8[1, 1, S, {ROW}] present_{name}" for name in caches)
    layers = "".join(_LAYER.format(i=i, n=i + 1) for i in range(LAYERS))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18, "ai.turboquant" : 1]>
        decoder (float[1, T, {HEAD_SIZE}] inputs_embeds, int64[1] past_length{past})
            => (float[1, T, {VOCABULARY}] logits{present}) {{
            {extra or "h0 = Mul(inputs_embeds, fifty)"}
            {layers}
            given = MatMul(h{LAYERS}, head)
            {last or "logits = Neg(given)"}
        }}"""
    )
    rng = np.random.default_rng(0)
    book = codebook_of(INT4, HEAD_SIZE)
    weights = {
        "fifty": np.full(1, 50, np.float32),
        "heads": np.array([1, 1, -1, HEAD_SIZE]),
        "tokens": np.array([1, -1, HEAD_SIZE]),
        "least": np.array([1, 1, VOCABULARY]),
        "centroids": book.centroids,
        "boundaries": book.boundaries,
        "head": rng.standard_normal((HEAD_SIZE, VOCABULARY)).astype(np.float32),
    }
    for i in range(LAYERS):
        weights |= {f"{kind}r{i}": rotation_of(HEAD_SIZE, 2 * i + n) for n, kind in enumerate("kv")}
        for name in ("wq", "wk", "wv", "wo"):
            drawn = rng.standard_normal((HEAD_SIZE, HEAD_SIZE)) / HEAD_SIZE**0.5
            weights[f"{name}{i}"] = drawn.astype(np.float32)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = node.output[0]
    model.metadata_props.add(key=METADATA_PLAN, value=_plan().to_json())
    onnx.save(model, path)
    return path


def _plan() -> Plan:
    return Plan(
        tool_version="0",
        layout_digest=layout_digest({Codec("lloyd_max", 4)}, has_window=False, has_planes=False),
        preset="int4",
        rotation="qr",
        seed=0,
        norm_correction=True,
        fixed_capacity=True,
        interface=Interface(
            "inputs_embeds", None, None, "logits", fed=(ExtraInput("past_length", PAST_LENGTH),)
        ),
        layers=tuple(_layer(i) for i in range(LAYERS)),
        target="cann",
    )


def _layer(i: int) -> LayerPlan:
    return LayerPlan(
        layer=i,
        dialect="a test",
        num_heads=1,
        kv_num_heads=1,
        head_size=HEAD_SIZE,
        dtype="FLOAT",
        scale=HEAD_SIZE**-0.5,
        causal=True,
        sliding_window=0,
        softcap=0.0,
        has_bias=False,
        key=CachePlan(f"past_key{i}", f"present_key{i}", INT4, ROW, HEAD_SIZE),
        value=CachePlan(f"past_value{i}", f"present_value{i}", INT4, ROW, HEAD_SIZE),
        rotation_seed=i,
    )
