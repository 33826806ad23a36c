"""Rotary embeddings of every spelling become one operator with tables of the graph's own angles."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from tests.ascend.lowering.parts import Array, left_alone, lowered, numbers, part, run
from tq_onnx.ascend.lowering.rotary import lower_rotary
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import ROTARY_EMBEDDING
from tq_onnx.ops.operators import RotaryEmbedding

POSITIONS = 50
LOWER = partial(lower_rotary, positions=POSITIONS)
SIZE = 16
OURS = f".{ROTARY_EMBEDDING}"

FREQUENCIES = 10000.0 ** (-np.arange(0, SIZE, 2, dtype=np.float32) / SIZE)
TABLE = (np.arange(40)[:, None] * FREQUENCIES).astype(np.float32)
WEIGHTS = {
    "f": FREQUENCIES,
    "column": FREQUENCIES[None, :, None],
    "scale": np.array(1.25, np.float32),
    "sizes": np.array([1, 8, 1], np.int64),
    "cosines": np.cos(TABLE),
    "sines": np.sin(TABLE),
    "few": np.cos(TABLE[:, :4]),
    "fewer": np.sin(TABLE[:, :4]),
    "zero": np.array(0, np.int64),
    "step": np.array(1, np.int64),
    "one": np.array([1], np.int64),
    "two": np.array([2], np.int64),
    "last": np.array([-1], np.int64),
    "first": np.array([0], np.int64),
    "half": np.array([8], np.int64),
    "quarter": np.array([4], np.int64),
    "end": np.array([2**31], np.int64),
    "axis": np.array([3], np.int64),
    "wide": np.array([0, 0, 3, 16], np.int64),
}

BY_PRODUCT = """places = Unsqueeze(ids, last)
floats = Cast<to = 1>(places)
angles = Mul(floats, f)
twice = Concat<axis = -1>(angles, angles)
c = Cos(twice)
s = Sin(twice)
cos = Unsqueeze(c, one)
sin = Unsqueeze(s, one)
"""
ANGLES = {
    "by a product": BY_PRODUCT,
    "by a matrix product": """row = Unsqueeze(ids, one)
floats = Cast<to = 1>(row)
batch = Shape<start = 0, end = 1>(ids)
whole = Concat<axis = 0>(batch, half, one)
columns = Expand(column, whole)
product = MatMul(columns, floats)
angles = Transpose<perm = [0, 2, 1]>(product)
twice = Concat<axis = -1>(angles, angles)
c = Cos(twice)
s = Sin(twice)
cs = Mul(c, scale)
ss = Mul(s, scale)
cos = Unsqueeze(cs, one)
sin = Unsqueeze(ss, one)
""",
    "from tables": """c = Gather<axis = 0>(cosines, ids)
s = Gather<axis = 0>(sines, ids)
cc = Concat<axis = -1>(c, c)
ss = Concat<axis = -1>(s, s)
cos = Unsqueeze(cc, one)
sin = Unsqueeze(ss, one)
""",
    "counted": """count = Shape<start = 2, end = 3>(x)
tokens = Squeeze(count)
ids_counted = Range(zero, tokens, step)
"""
    + BY_PRODUCT.replace("ids", "ids_counted")
    .replace("(c, one)", "(c, first)")
    .replace("(s, one)", "(s, first)"),
}
SLICES = """x1 = Slice(x, first, half, axis, one)
x2 = Slice(x, half, end, axis, one)
"""
ROTATE = """neg = Neg(x2)
turned = Concat<axis = -1>(neg, x1)
straight = Mul(x, cos)
across = Mul(turned, sin)
y = Add(straight, across)
"""
TURNS = {
    "slices": SLICES + ROTATE,
    "a split": "x1, x2 = Split<axis = -1, num_outputs = 2>(x)\n" + ROTATE,
    "operands the other way round": SLICES
    + ROTATE.replace("(x, cos)", "(cos, x)")
    .replace("(turned, sin)", "(sin, turned)")
    .replace("(straight, across)", "(across, straight)"),
    "computed slices": """size = Shape<start = 3, end = 4>(x)
middle = Div(size, two)
x1 = Slice(x, first, middle, axis, one)
x2 = Slice(x, middle, end, axis, one)
"""
    + ROTATE,
}
TWINS = {
    "backwards": SLICES + ROTATE.replace("Neg(x2)", "Identity(x2)"),
    "halves that stay": SLICES + ROTATE.replace("(neg, x1)", "(x1, neg)"),
    "minus": SLICES + ROTATE.replace("Add(str", "Sub(str"),
    "uneven parts": SLICES.replace("half", "quarter") + ROTATE,
    "something else turned": SLICES.replace("(x,", "(z,") + ROTATE,
    "every other channel": SLICES.replace("first, half", "first, end")
    .replace("half, end", "one, end")
    .replace("axis, one)", "axis, two)")
    + ROTATE,
}
ANGLE_TWINS = {
    "two angles for a pair": (
        "twice = Concat<axis = -1>(angles, angles)",
        "faster = Mul(angles, scale)\ntwice = Concat<axis = -1>(angles, faster)",
    ),
    "angles that numbers have a say in": (
        "cos = Unsqueeze(c, one)",
        "wz = Unsqueeze(w, last)\ncz = Mul(c, wz)\ncos = Unsqueeze(cz, one)",
    ),
    "positions of heads": ("cos = Unsqueeze(c, one)", "cos = Unsqueeze(c, two)"),
    "positions that are floats": (
        "places = Unsqueeze(ids, last)\nfloats = Cast<to = 1>(places)",
        "floats = Unsqueeze(w, last)",
    ),
    "a position for the sine alone": (
        "s = Sin(twice)",
        "other = Cast<to = 1>(more)\nmoved = Unsqueeze(other, last)\n"
        "sum = Add(twice, moved)\ns = Sin(sum)",
    ),
    "positions that count tokens": (
        "floats = Cast<to = 1>(places)",
        "total = ReduceSum(places, one)\nmixed = Add(places, total)\nfloats = Cast<to = 1>(mixed)",
    ),
}
INPUTS = "int64[B, T] ids, int64[B, T] more, float[B, T] w, float[B, 3, T, 16] z"


def embedding(body: str, shape: str = "B, 3, T, 16", *, opset: int = 18) -> ir.Model:
    given = f"float[{shape}] x, {INPUTS}"
    return part(given, f"float[{shape}] y", body, used(body), opset=opset)


def used(body: str) -> dict[str, Array]:
    return {name: array for name, array in WEIGHTS.items() if re.search(rf"\b{name}\b", body)}


def feeds(*shape: int) -> dict[str, Array]:
    shape = shape or (2, 3, 5, SIZE)
    return {
        "x": numbers(*shape),
        "ids": np.array([[3, 4, 5, 6, 7], [0, 9, 2, 30, 1]]),
        "more": np.ones((2, 5), np.int64),
        "w": numbers(2, 5),
        "z": numbers(2, 3, 5, SIZE),
    }


@pytest.mark.parametrize("turn", TURNS)
def test_every_turn_is_one_node(turn: str) -> None:
    count, nodes = lowered(embedding(BY_PRODUCT + TURNS[turn]), LOWER, feeds())
    assert (count, nodes) == (1, {OURS: 1})


@pytest.mark.parametrize(
    ("angles", "rows"), [*zip(ANGLES, (POSITIONS, POSITIONS, 40, POSITIONS), strict=True)]
)
def test_tables_are_the_graphs_own_angles(angles: str, rows: int) -> None:
    model = embedding(ANGLES[angles] + TURNS["slices"])
    count, nodes = lowered(model, LOWER, feeds())
    assert count == 1 and nodes[OURS] == 1 and not nodes["Cos"] and not nodes["Concat"]
    (node,) = RotaryEmbedding.nodes(model.graph)
    for table in (RotaryEmbedding.cos_cache.of(node), RotaryEmbedding.sin_cache.of(node)):
        assert table is not None and table.const_value is not None
        assert table.const_value.shape == (rows, SIZE // 2)


def test_layers_share_their_tables() -> None:
    # The second has angles of its own, and they are the same.
    inner = r"\b(x1|x2|neg|turned|straight|across|y|places|floats|angles|twice|c|s|cos|sin)\b"
    once = BY_PRODUCT + TURNS["slices"]
    again = re.sub(r"\bx\b", "z", re.sub(inner, r"again_\1", once))
    model = embedding(once + again)
    assert lower_rotary(model, Builder(model.graph), POSITIONS) == 2
    tables = [n.inputs[1:] for n in model.graph if n.op_type == ROTARY_EMBEDDING]
    assert tables[0] == tables[1]


def test_positions_of_32_bits_become_those_of_64() -> None:
    body = "ids = Cast<to = 6>(long)\n" + BY_PRODUCT + TURNS["slices"]
    model = part(
        "float[B, 3, T, 16] x, int64[B, T] long",
        "float[B, 3, T, 16] y",
        body,
        used(body),
    )
    data = feeds()
    count, nodes = lowered(model, LOWER, {"x": data["x"], "long": data["ids"]})
    assert count == 1 and nodes[OURS] == 1


@pytest.mark.parametrize("name", TWINS)
def test_what_turns_otherwise_stays(name: str) -> None:
    model = embedding(BY_PRODUCT + TWINS[name])
    run(model, feeds())
    left_alone(model, LOWER)


@pytest.mark.parametrize("name", ANGLE_TWINS)
def test_other_angles_stay(name: str) -> None:
    old, new = ANGLE_TWINS[name]
    assert old in BY_PRODUCT
    body = BY_PRODUCT.replace(old, new) + TURNS["slices"]
    shape, sizes = "B, 3, T, 16", (2, 3, 5, SIZE)
    if name == "positions of heads":
        body = body.replace("sin = Unsqueeze(s, one)", "sin = Unsqueeze(s, two)")
        shape, sizes = "B, T, 3, 16", (2, 5, 3, SIZE)
    model = embedding(body, shape)
    run(model, feeds(*sizes))
    left_alone(model, LOWER)


ROWS = "angles = Mul(floats, f)\nc = Cos(angles)\ns = Sin(angles)\n"
PLAIN = "places = Unsqueeze(ids, last)\nfloats = Cast<to = 1>(places)\n" + ROWS
HEADS = ("B, 3, T, 16", (2, 3, 5, SIZE), {OURS: 1})
FLAT = ("B, T, 48", (2, 5, 48), {OURS: 1, "Reshape": 2, "Transpose": 2})
FUSED = {
    "ONNX's, angles": (PLAIN + "y = RotaryEmbedding(x, c, s)", *HEADS),
    "ONNX's, angles, in rows": (PLAIN + "y = RotaryEmbedding<num_heads = 3>(x, c, s)", *FLAT),
    "ONNX's, tables": ("y = RotaryEmbedding(x, cosines, sines, ids)", *HEADS),
    "ONNX's, tables, in rows": (
        "y = RotaryEmbedding<num_heads = 3>(x, cosines, sines, ids)", *FLAT,
    ),
    "Microsoft's": ("y = com.microsoft.RotaryEmbedding(x, ids, cosines, sines)", *HEADS),
    "Microsoft's, in rows": (
        "y = com.microsoft.RotaryEmbedding(x, ids, cosines, sines)", *FLAT,
    ),
}  # fmt: skip
FUSED_TWINS = {
    "ONNX's, interleaved": "y = RotaryEmbedding<interleaved = 1>(x, cosines, sines, ids)",
    "ONNX's, a part": "y = RotaryEmbedding<rotary_embedding_dim = 8>(x, few, fewer, ids)",
    "Microsoft's, interleaved": "y = com.microsoft.RotaryEmbedding<interleaved = 1>"
    "(x, ids, cosines, sines)",
    "Microsoft's, from one position on": "y = com.microsoft.RotaryEmbedding"
    "(x, one, cosines, sines)",
    "Microsoft's, scaled": "y = com.microsoft.RotaryEmbedding<scale = 2.0>(x, ids, cosines, sines)",
}


@pytest.mark.parametrize("name", FUSED)
def test_embeddings_that_are_a_node(name: str) -> None:
    body, shape, sizes, expected = FUSED[name]
    count, nodes = lowered(embedding(body, shape, opset=23), LOWER, feeds(*sizes))
    assert (count, nodes) == (1, expected)


@pytest.mark.parametrize("name", FUSED_TWINS)
def test_nodes_that_embed_otherwise_stay(name: str) -> None:
    left_alone(embedding(FUSED_TWINS[name], opset=23), LOWER)


def test_half_precision() -> None:
    body = (
        BY_PRODUCT.replace(
            "cos = Unsqueeze(c,", "c16 = Cast<to = 10>(c)\ncos = Unsqueeze(c16,"
        ).replace("sin = Unsqueeze(s,", "s16 = Cast<to = 10>(s)\nsin = Unsqueeze(s16,")
        + TURNS["slices"]
    )
    model = part(
        "float16[B, 3, T, 16] x, int64[B, T] ids",
        "float16[B, 3, T, 16] y",
        body,
        used(body),
    )
    data = feeds()
    given = {"x": data["x"].astype(np.float16), "ids": data["ids"]}
    assert lowered(model, LOWER, given, tolerance=6e-3)[1] == {OURS: 1}
