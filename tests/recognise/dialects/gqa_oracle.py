"""Oracle for GroupQueryAttention: everything else by ONNX Runtime, attention in numpy.

``Holes`` cuts the attention nodes out of an original model: what went into them becomes an output,
what came out of them an input. ``GqaDecoder`` runs the rest once per layer and fills the holes with
``attend``, written from the operator's documentation. Without a codec it must give what ONNX
Runtime's own kernel gives; with one it is what a converted model must give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from tests.decoders.running import CHUNKS, Array, Batch, session
from tq_onnx.codec import reference, rotation
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.spec import Codec
from tq_onnx.plan import LayerPlan, Plan

SLOTS = {
    0: "query",
    1: "key",
    2: "value",
    5: "seqlens_k",
    9: "position_ids",
    10: "bias",
    11: "sink",
}


@dataclass
class Layer:
    """One attention: its attributes and constant inputs."""

    attributes: dict[str, Any]
    slots: set[int]
    cos: Array | None
    sin: Array | None
    q_norm: Array | None
    k_norm: Array | None
    dtype: Any


@dataclass
class Holes:
    """A model without its attention nodes."""

    session: onnxruntime.InferenceSession
    layers: list[Layer]


def cut_holes(model: ir.Model) -> Holes:
    """Cuts in place."""
    graph = model.graph
    layers = []
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        index = len(layers)
        inputs = [*node.inputs, *[None] * (16 - len(node.inputs))]
        for slot, name in SLOTS.items():
            value = inputs[slot]
            if value is not None:
                probe = ir.Value(name=f"hole.{index}.{name}", type=value.type, shape=value.shape)
                source = ir.node("Identity", [value], outputs=[probe])
                graph.insert_before(node, source)
                graph.outputs.append(probe)
        constants = [
            None if inputs[slot] is None else inputs[slot].const_value.numpy()
            for slot in (7, 8, 14, 15)
        ]
        attributes = {name: item.value for name, item in node.attributes.items()}
        used = {slot for slot in SLOTS if inputs[slot] is not None}
        dtype = inputs[3].dtype
        layers.append(Layer(attributes, used, *constants, dtype.numpy()))
        hole = ir.Value(
            name=f"hole.{index}", type=ir.TensorType(dtype), shape=ir.Shape([None, None, None])
        )
        graph.inputs.append(hole)
        node.outputs[0].replace_all_uses_with(hole)
        for output in node.outputs[1:3]:
            graph.outputs.remove(output)
        pasts = [inputs[3], inputs[4]]
        graph.remove(node, safe=True)
        for past in pasts:
            graph.inputs.remove(past)
    return Holes(session(model), layers)


@dataclass
class Cache:
    """Decoded keys and values ``[B, N, S, D]``."""

    key: Array
    value: Array


@dataclass
class GqaDecoder:
    """Runs a model with holes; a plan gives codecs, None keeps exact rows."""

    holes: Holes
    head_size: int
    size: int = 1
    plan: Plan | None = None
    caches: list[Cache] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.holes.layers:
            shape = (self.size, layer.attributes["kv_num_heads"], 0, self.head_size)
            self.caches.append(Cache(np.zeros(shape), np.zeros(shape)))

    def feed(self, feeds: dict[str, Array]) -> Array:
        names = [entry.name for entry in self.holes.session.get_inputs()]
        feeds = {name: value for name, value in feeds.items() if name in names}
        outputs = [entry.name for entry in self.holes.session.get_outputs()]
        new = feeds["input_ids"].shape[1]
        for index, layer in enumerate(self.holes.layers):
            width = layer.attributes["num_heads"] * self.head_size
            feeds[f"hole.{index}"] = np.zeros((self.size, new, width), layer.dtype)
        for index, layer in enumerate(self.holes.layers):
            results = dict(zip(outputs, self.holes.session.run(outputs, feeds), strict=True))
            operands = {SLOTS[slot]: results[f"hole.{index}.{SLOTS[slot]}"] for slot in layer.slots}
            output = attend(layer, operands, self.caches[index], index, self.plan)
            feeds[f"hole.{index}"] = output.astype(layer.dtype)
        results = dict(zip(outputs, self.holes.session.run(outputs, feeds), strict=True))
        return np.asarray(results["logits"], np.float64)

    def run(self, data: Batch, chunks: Sequence[int] = CHUNKS) -> Array:
        return np.concatenate([self.feed(feeds) for feeds in data.feeds(chunks)], axis=1)


def attend(
    layer: Layer, operands: dict[str, Array], cache: Cache, index: int, plan: Plan | None
) -> Array:
    """Appends to the cache and attends, ``[B, T, H * D]``."""
    head_size = cache.key.shape[3]
    attributes = layer.attributes
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    query = operands["query"].astype(np.float64)
    if "key" in operands:
        key, value = operands["key"].astype(np.float64), operands["value"].astype(np.float64)
    else:
        ends = [heads * head_size, (heads + kv_heads) * head_size]
        query, key, value = np.split(query, ends, axis=-1)
    count, new = query.shape[:2]
    past = np.maximum(operands["seqlens_k"].reshape(-1).astype(np.int64) + 1 - new, 0)
    positions = operands.get("position_ids", past[:, None] + np.arange(new))
    q = query.reshape(count, new, heads, head_size)
    k = key.reshape(count, new, kv_heads, head_size)
    v = value.reshape(count, new, kv_heads, head_size)
    if layer.q_norm is not None:
        epsilon = attributes["qk_norm_epsilon"]
        q, k = rms_norm(q, layer.q_norm, epsilon), rms_norm(k, layer.k_norm, epsilon)
    if attributes.get("do_rotary"):
        interleaved = bool(attributes.get("rotary_interleaved"))
        q = rotate(q, positions, layer.cos, layer.sin, interleaved)
        k = rotate(k, positions, layer.cos, layer.sin, interleaved)
    q, k, v = (item.transpose(0, 2, 1, 3) for item in (q, k, v))
    if plan is not None:
        codecs = plan.layers[index]
        k = through(k, codecs.key.codec.bits, codecs, plan)
        v = through(v, codecs.value.codec.bits, codecs, plan)
    cache.key, cache.value = append(cache.key, k, past), append(cache.value, v, past)
    total = cache.key.shape[2]
    group = heads // kv_heads
    keys, values = np.repeat(cache.key, group, 1), np.repeat(cache.value, group, 1)
    scores = q @ keys.transpose(0, 1, 3, 2) * (attributes.get("scale") or head_size**-0.5)
    cap = attributes.get("softcap") or 0.0
    if cap:
        scores = cap * np.tanh(scores / cap)
    if "bias" in operands:
        scores = scores + operands["bias"][..., :total]
    standing = (past[:, None] + np.arange(new))[:, None, :, None]
    slots = np.arange(total)
    window = attributes.get("local_window_size", -1)
    seen = (
        slots <= standing
        if attributes.get("causal", 1)
        else slots < past[:, None, None, None] + new
    )
    if window > 0:
        seen = seen & (standing - slots < window)
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full(heads, 0.0 if attributes.get("smooth_softmax") == 1 else -np.inf)
    sinks = operands.get("sink", sinks).astype(np.float64)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - top)
    output = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks - top)) @ values
    return output.transpose(0, 2, 1, 3).reshape(count, new, heads * head_size)


def rms_norm(x: Array, weight: Array | None, epsilon: float) -> Array:
    assert weight is not None
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight.astype(np.float64)


def rotate(
    x: Array, positions: Array, cos: Array | None, sin: Array | None, interleaved: bool
) -> Array:
    """``x`` is ``[B, T, heads, D]``."""
    assert cos is not None and sin is not None
    half = cos.shape[1]
    c = cos.astype(np.float64)[positions][:, :, None]
    s = sin.astype(np.float64)[positions][:, :, None]
    x = x.copy()
    part = x[..., : 2 * half].copy()
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = part[..., :half], part[..., half:]
        x[..., :half], x[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return x


def through(rows: Array, bits: int, layer: LayerPlan, plan: Plan) -> Array:
    """Encoded and decoded."""
    turn = rotation.make_rotation(plan.rotation, layer.head_size, layer.layer, plan.seed)
    codec, book = Codec(layer.key.codec.kind, bits), lloyd_max(bits, layer.head_size)
    encoded = reference.encode(rows.astype(np.float32), codec, turn, book)
    return reference.decode(encoded, codec, turn, book)


def append(past: Array, rows: Array, lengths: Array) -> Array:
    count, heads, new, size = rows.shape
    slots = max(past.shape[2], int(lengths.max()) + new)
    present = np.zeros((count, heads, slots, size))
    present[:, :, : past.shape[2]] = past
    for index, length in enumerate(lengths):
        present[index, :, length : length + new] = rows[index]
    return present
