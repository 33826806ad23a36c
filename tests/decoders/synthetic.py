"""A decoder in a few lines of ONNX text, in as many forms as a test wants.

Two layers by default, H query heads, 2 key/value heads, D = 16, hidden 32, vocabulary 97. Names are
those of Hugging Face exports; ``attention_mask`` may pad on the left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir

HEAD_SIZE = 16
KV_HEADS = 2

ADDITIVE = "s2 = Add(s1, bias)"
"""Ways to apply the mask, from ``s1`` to ``s2``."""
SELECTING = "s2 = Where(keep, s1, lowest)"
HIDING = """hide = Not(keep)
        s2 = Where(hide, lowest, s1)"""
UNMASKED = "s2 = Identity(s1)"

REPEAT = """ku = Unsqueeze(present_key, two)
        ke = Expand(ku, expansion)
        kr = Reshape(ke, repeated)
        vu = Unsqueeze(present_value, two)
        ve = Expand(vu, expansion)
        vr = Reshape(ve, repeated)"""
PLAIN = """kr = Identity(present_key)
        vr = Identity(present_value)"""

LAYER = """
        q0 = MatMul(x, w_q)
        k0 = MatMul(x, w_k)
        v0 = MatMul(x, w_v)
        q1 = Reshape(q0, q_shape)
        k1 = Reshape(k0, kv_shape)
        v1 = Reshape(v0, kv_shape)
        q = Transpose<perm = [0, 2, 1, 3]>(q1)
        k = Transpose<perm = [0, 2, 1, 3]>(k1)
        v = Transpose<perm = [0, 2, 1, 3]>(v1)
        CACHE
        REPEAT
        KEYS
        QUERY
        PRODUCT
        SCORES
        MASK
        p0 = Softmax<axis = -1>(s2)
        PROBABILITIES
        WEIGHTED
        o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged)
        x_out = Add(x, o2)
"""
KEYS = "kt = Transpose<perm = [0, 1, 3, 2]>(kr)"
PRODUCT = "s0 = MatMul(qs, kt)"
WEIGHTED = "o = MatMul(p, vr)"
CACHE = """present_key = Concat<axis = -2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v)"""

SLIDING_CACHE = """joined_key = Concat<axis = -2>(past_key, k)
        joined_value = Concat<axis = 2>(past_value, v)
        present_key = Slice(joined_key, window_start, window_end, two)
        present_value = Slice(joined_value, window_start, window_end, two)"""
"""Caches that keep what a window of 4 tokens will need."""
SLIDING_REPEAT = REPEAT.replace("present_", "joined_")
SLIDING_MASK = """recent = Greater(slots, oldest)
        near = And(keep, recent)
        s2 = Where(near, s1, lowest)"""
FORGOTTEN = """old = Shape<start = 2, end = 3>(past_key_0)
        fresh = Shape<start = 1, end = 2>(input_ids)
        present = Add(old, fresh)
        since = Neg(present)
        bools = Slice(whole, since, window_end, one)"""
"""Of the mask only what the caches still hold."""

MODEL = """
<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
decoder (int64[B, T] input_ids, int64[B, S] attention_mask, PASTS)
    => (float[B, T, 97] logits, PRESENTS)
<int64[1] one = {{1}}, int64[1] two = {{2}}, int64 zero = {{0}}, int64 step = {{1}},
 int64[2] ends = {{0, 1}}, int64[2] middle = {{1, 2}}, int64[2] last = {{2, 3}},
 int64[4] q_shape = {{0, 0, {heads}, 16}}, int64[4] kv_shape = {{0, 0, 2, 16}},
 int64[4] repeated = {{0, {heads}, -1, 16}}, int64[5] expansion = {{1, 1, {group}, 1, 1}},
 int64[1] nought = {{0}}, int64[1] three = {{3}}, int64[5] split = {{0, 2, 1, -1, 16}},
 int64[4] wide_repeated = {{0, -1, {heads}, 16}}, int64[5] wide_expansion = {{1, 1, 1, {group}, 1}},
 int64[1] rest = {{-1}}, int64[1] sixteen = {{16}}, int64 window = {{4}},
 int64[1] window_start = {{-3}}, int64[1] window_end = {{10000}}, int64[1] all_heads = {{{heads}}},
 int64[3] merged = {{0, 0, {width}}},
 float quarter = {{0.25}}, float half = {{0.5}}, float cap = {{0.7}}, float nothing = {{0}},
 float lowest = {{-3.0e38}}>
{{
        whole = Cast<to = 9>(attention_mask)
        BOOLS
        kept = Unsqueeze(bools, middle)
        new = Shape<start = 1, end = 2>(input_ids)
        past = Shape<start = 2, end = 3>(past_key_0)
        total = Add(past, new)
        new0 = Squeeze(new)
        past0 = Squeeze(past)
        total0 = Squeeze(total)
        steps = Range(zero, new0, step)
        standing = Add(steps, past0)
        slots = Range(zero, total0, step)
        rows = Unsqueeze(standing, one)
        causal = LessOrEqual(slots, rows)
        keep = And(kept, causal)
        oldest = Sub(rows, window)
        bias = Where(keep, nothing, lowest)
        x_0 = Gather(table, input_ids)
        LAYERS
        logits = MatMul(x_{layers}, head)
}}
"""

OUTSIDE = ("x", "past_key", "past_value", "w_q", "w_k", "w_v")
"""Names that a layer reads and another part of the model makes, one for each layer."""


def decoder(
    *,
    layers: int = 2,
    heads: int = 4,
    cache: str = CACHE,
    repeat: str = REPEAT,
    keys: str = KEYS,
    product: str = PRODUCT,
    weighted: str = WEIGHTED,
    query: str = "qs = Mul(q, quarter)",
    scores: str = "s1 = Identity(s0)",
    mask: str = ADDITIVE,
    probabilities: str = "p = Identity(p0)",
    extra: str = "",
    infer: bool = True,
    broken: int | None = None,
    breakage: Sequence[tuple[str, str]] = (),
) -> ir.Model:
    """Builds a decoder.

    Args:
        layers: their number.
        heads: H.
        cache: and the other parts of a layer, in the order in which they stand.
        repeat: from ``present_key`` to ``kr``.
        keys: from ``kr`` to ``kt``.
        query: from ``q`` to ``qs``.
        product: from ``qs`` and ``kt`` to ``s0``.
        scores: to ``s1``.
        mask: to ``s2``.
        probabilities: from ``p0`` to ``p``.
        weighted: from ``p`` and ``vr`` to ``o``.
        extra: goes at the end.
        infer: whether the model tells the shapes of all values.
        broken: a layer that differs from the others.
        breakage: what is replaced in it, by what.
    """
    parts = {
        "CACHE": cache,
        "REPEAT": repeat,
        "KEYS": keys,
        "QUERY": query,
        "PRODUCT": product,
        "SCORES": scores,
        "MASK": mask,
        "PROBABILITIES": probabilities,
        "WEIGHTED": weighted,
    }
    body = re.sub(r"\b[A-Z]{4,}\b", lambda found: parts[found[0]], LAYER)
    other = body
    for old, new in breakage:
        assert old in other, old
        other = other.replace(old, new)
    template = MODEL.replace(
        "BOOLS", FORGOTTEN if cache == SLIDING_CACHE else "bools = Identity(whole)"
    )
    text = template.format(heads=heads, group=heads // KV_HEADS, width=heads * 16, layers=layers)
    text = text.replace(
        "LAYERS",
        "\n".join(_layer(other if index == broken else body, index) for index in range(layers)),
    )
    text = text.replace("        logits =", f"{extra}\n        logits =")
    roles = [(index, role) for index in range(layers) for role in ("key", "value")]
    pasts = ", ".join(f"float[B, 2, P, 16] past_{role}_{index}" for index, role in roles)
    presents = ", ".join(f"float[B, 2, S, 16] present_{role}_{index}" for index, role in roles)
    text = text.replace("PASTS", pasts).replace("PRESENTS", presents)
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(_weights(layers, heads))
    if infer:
        proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    else:
        del proto.graph.value_info[:]
    model = ir.from_proto(proto)
    for value in (*model.graph.inputs, *model.graph.outputs):
        kind, _, rest = (value.name or "").partition("_")
        role, _, index = rest.rpartition("_")
        if kind in ("past", "present"):
            prefix = "past_key_values" if kind == "past" else "present"
            value.name = f"{prefix}.{index}.{role}"
    return model


def _layer(body: str, index: int) -> str:
    """Gives the names of a layer its number."""
    plain = re.sub(r"<[^>]*>", "", body)
    made = {*re.findall(r"(\w+)(?=(?: *, *\w+)* = )", plain), *OUTSIDE}

    def numbered(found: re.Match[str]) -> str:
        name = found[0]
        if name in ("x", "x_out"):
            return f"x_{index + (name == 'x_out')}"
        return f"{name}_{index}" if name in made else name

    # Attributes stand between angles and keep their names.
    return re.sub(r"<[^>]*>|\w+", numbered, body)


def _weights(layers: int, heads: int) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(3)
    hidden = heads * HEAD_SIZE
    shapes = {"table": (97, hidden), "head": (hidden, 97)}
    for index in range(layers):
        shapes[f"w_q_{index}"] = (hidden, hidden)
        shapes[f"w_k_{index}"] = (hidden, KV_HEADS * HEAD_SIZE)
        shapes[f"w_v_{index}"] = (hidden, KV_HEADS * HEAD_SIZE)
    # Large enough for attention to be far from uniform.
    return [
        onnx.numpy_helper.from_array(
            (rng.standard_normal(shape) * (1 if name == "table" else 2 / np.sqrt(hidden))).astype(
                np.float32
            ),
            name,
        )
        for name, shape in shapes.items()
    ]
