"""A decoder in a few lines of ONNX text, in as many forms as a test wants.

Two layers by default, H query heads, 2 key/value heads, D = 16, hidden 32, vocabulary 97. Names are
those of Hugging Face exports; ``attention_mask`` may pad on the left.
"""

from __future__ import annotations

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
        kt = Transpose<perm = [0, 1, 3, 2]>(kr)
        QUERY
        s0 = MatMul(qs, kt)
        SCORES
        MASK
        p0 = Softmax<axis = -1>(s2)
        PROBABILITIES
        o = MatMul(p, vr)
        o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged)
        x_out = Add(x, o2)
"""
CACHE = """present_key = Concat<axis = -2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v)"""

MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
decoder (int64[B, T] input_ids, int64[B, S] attention_mask, PASTS)
    => (float[B, T, 97] logits, PRESENTS)
<int64[1] one = {{1}}, int64[1] two = {{2}}, int64 zero = {{0}}, int64 step = {{1}},
 int64[2] ends = {{0, 1}}, int64[2] middle = {{1, 2}}, int64[2] last = {{2, 3}},
 int64[4] q_shape = {{0, 0, {heads}, 16}}, int64[4] kv_shape = {{0, 0, 2, 16}},
 int64[4] repeated = {{0, {heads}, -1, 16}}, int64[5] expansion = {{1, 1, {group}, 1, 1}},
 int64[3] merged = {{0, 0, {width}}},
 float quarter = {{0.25}}, float half = {{0.5}}, float cap = {{0.7}}, float nothing = {{0}},
 float lowest = {{-3.0e38}}>
{{
        bools = Cast<to = 9>(attention_mask)
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
        bias = Where(keep, nothing, lowest)
        x_0 = Gather(table, input_ids)
        LAYERS
        logits = MatMul(x_{layers}, head)
}}
"""

SHARED = {
    "x_out",
    "present_key",
    "present_value",
    "past_key",
    "past_value",
    *("w_q", "w_k", "w_v", "x"),
    *("q0", "k0", "v0", "q1", "k1", "v1", "q", "k", "v", "qs"),
    *("ku", "ke", "kr", "kt", "vu", "ve", "vr"),
    *("s0", "s1", "s2", "p0", "p", "o", "o1", "o2", "hide"),
    *(f"t{index}" for index in range(8)),
}


def decoder(
    *,
    layers: int = 2,
    heads: int = 4,
    cache: str = CACHE,
    repeat: str = REPEAT,
    query: str = "qs = Mul(q, quarter)",
    scores: str = "s1 = Identity(s0)",
    mask: str = ADDITIVE,
    probabilities: str = "p = Identity(p0)",
    extra: str = "",
    infer: bool = True,
) -> ir.Model:
    """Builds a decoder; every part of a layer may be replaced, and ``extra`` goes at the end."""
    parts = {
        "CACHE": cache,
        "REPEAT": repeat,
        "QUERY": query,
        "SCORES": scores,
        "MASK": mask,
        "PROBABILITIES": probabilities,
    }
    body = LAYER
    for name, text in parts.items():
        body = body.replace(name, text)
    text = MODEL.format(heads=heads, group=heads // KV_HEADS, width=heads * 16, layers=layers)
    text = text.replace("LAYERS", "\n".join(_layer(body, index) for index in range(layers)))
    text = text.replace("        logits =", f"{extra}\n        logits =")
    roles = [(index, role) for index in range(layers) for role in ("key", "value")]
    pasts = ", ".join(f"float[B, 2, P, 16] past_{role}_{index}" for index, role in roles)
    presents = ", ".join(f"float[B, 2, S, 16] present_{role}_{index}" for index, role in roles)
    text = text.replace("PASTS", pasts).replace("PRESENTS", presents)
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(_weights(layers, heads))
    if infer:
        proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
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
    words = []
    for word in body.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split(" "):
        bare = word.strip()
        if bare == "x":
            words.append(f"x_{index}")
        elif bare == "x_out":
            words.append(f"x_{index + 1}")
        elif bare in SHARED:
            words.append(word.replace(bare, f"{bare}_{index}"))
        else:
            words.append(word)
    return " ".join(words)


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
