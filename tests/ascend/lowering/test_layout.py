"""Shapes become constants, cut projections several, and Transposes of tokens and heads ours."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from tests.ascend.lowering.parts import Array, finish, left_alone, lowered, numbers, part, run
from tq_onnx.ascend.lowering.layout import lower_layout
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import TRANSPOSE

OURS = f".{TRANSPOSE}"
WEIGHTS = {
    "w": numbers(12, 32, seed=1),
    "bias": numbers(32, seed=2),
    "row": numbers(1, 32, seed=2),
    "sizes": np.array([16, 8, 8], np.int64),
    "zero": np.array([0], np.int64),
    "one": np.array([1], np.int64),
    "two": np.array([2], np.int64),
    "middle": np.array([16], np.int64),
    "end": np.array([2**31], np.int64),
    "last": np.array([-1], np.int64),
    "d": np.array([8], np.int64),
    "n": np.array([4], np.int64),
    "merged": np.array([0, 0, 32], np.int64),
    "joined": np.array([0, -1, 32], np.int64),
    "flat": np.array([0, -1, 8], np.int64),
    "split": np.array([0, 0, 4, 8], np.int64),
    "groups": np.array([0, -1, 4, 8], np.int64),
}
SIZES = """b = Shape<start = 0, end = 1>(ids)
t = Shape<start = 1, end = 2>(ids)
"""
IDS = "int64[B, T] ids"
FEEDS = {"ids": np.zeros((2, 5), np.int64)}


def graph(inputs: str, outputs: str, body: str) -> ir.Model:
    used = {name: array for name, array in WEIGHTS.items() if re.search(rf"\b{name}\b", body)}
    return part(inputs, outputs, body, used)


RESHAPES = {
    "to heads": ("B, T, 32", "B, T, 4, 8", "s = Concat<axis = 0>(b, t, n, d)", (0, 0, 4, 8)),
    "to heads, free": ("B, T, 32", "B, T, 4, 8", "s = Concat<axis = 0>(b, t, last, d)",
                       (0, 0, 4, 8)),
    "from heads": ("B, T, 4, 8", "B, T, M", "s = Concat<axis = 0>(b, t, last)", (0, 0, 32)),
    "to rows": ("B, T, 32", "R, 32", "bt = Mul(b, t)\nm = Mul(n, d)\n"
                "s = Concat<axis = 0>(bt, m)", (-1, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPES)
def test_computed_shapes_become_constants(name: str) -> None:
    source, result, body, expected = RESHAPES[name]
    model = graph(
        f"{IDS}, float[{source}] x", f"float[{result}] y", f"{SIZES}{body}\ny = Reshape(x, s)"
    )
    shape = (2, 5, 32) if source == "B, T, 32" else (2, 5, 4, 8)
    count, nodes = lowered(model, lower_layout, {**FEEDS, "x": numbers(*shape)}, 0)
    assert (count, nodes) == (1, {"Reshape": 1})
    (node,) = model.graph
    assert node.inputs[1] is not None and node.inputs[1].const_value is not None
    assert tuple(node.inputs[1].const_value.numpy()) == expected


STAYING = {
    "two sizes of something else": ("B, T, 32", "more", "B, U, V, 8",
                                    "u = Shape<start = 0, end = 1>(more)\n"
                                    "v = Shape<start = 1, end = 2>(more)\n"
                                    "s = Concat<axis = 0>(b, u, v, d)"),
    "sizes that change places": ("B, T, 32", "ids", "T, B, 32",
                                 "m = Mul(n, d)\ns = Concat<axis = 0>(t, b, m)"),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYING)
def test_shapes_that_are_not_known_stay(name: str) -> None:
    source, other, result, body = STAYING[name]
    more = "" if other == "ids" else ", int64[U, V] more"
    inputs = f"{IDS}, float[{source}] x{more}"
    left_alone(
        graph(inputs, f"float[{result}] y", f"{SIZES}{body}\ny = Reshape(x, s)"), lower_layout
    )


def test_sizes_follow_through_what_inference_does_not_know() -> None:
    """Names that an exporter's inference lost come back from the inputs."""
    body = f"""{SIZES}zeros = Reshape(x, merged)
h = ai.turboquant.Swish(zeros)
s = Concat<axis = 0>(b, t, n, last)
y = Reshape(h, s)"""
    model = graph(f"{IDS}, float[B, T, 4, 8] x", "float[P, Q, 4, 8] y", body)
    for node in model.graph:
        if node.op_type in ("Swish", "Reshape"):
            node.outputs[0].shape = ir.Shape([None] * (3 if node.outputs[0].name != "y" else 4))
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    assert lower_layout(model, Builder(model.graph)) == 1
    assert finish(model) == {"Reshape": 2, ".Swish": 1}
    assert run(model, {**FEEDS, "x": numbers(2, 5, 4, 8)})[0].shape == (2, 5, 4, 8)


def test_reshapes_and_transposes_that_undo_each_other_go() -> None:
    body = """a = Transpose<perm = [0, 2, 1, 3]>(x)
m = Reshape(a, merged)
c = Reshape(m, split)
e = Transpose<perm = [0, 2, 1, 3]>(c)
y = Relu(e)"""
    model = graph("float[B, 4, T, 8] x", "float[B, 4, T, 8] y", body)
    assert lowered(model, lower_layout, {"x": numbers(2, 4, 5, 8)}, 0)[1] == {"Relu": 1}


def test_of_reshapes_in_a_row_one_is_left() -> None:
    body = "a = Reshape(x, flat)\nc = Reshape(a, groups)\ny = Relu(c)"
    model = graph("float[B, T, 32] x", "float[B, T, 4, 8] y", body)
    nodes = lowered(model, lower_layout, {"x": numbers(2, 5, 32)}, 0)[1]
    assert nodes == {"Reshape": 1, "Relu": 1}


NORMALISED = """a = Reshape(x, flat)
unit = ai.turboquant.RMSNormalization<epsilon = 1e-6>(a, scale)
c = Reshape(unit, joined)
e = Reshape(c, split)
y = Relu(e)"""


def test_heads_are_taken_apart_before_their_norm() -> None:
    model = graph("float[B, T, 32] x, float[8] scale", "float[B, T, 4, 8] y", NORMALISED)
    x, scale = numbers(2, 5, 32), numbers(8, seed=1)
    assert lower_layout(model, Builder(model.graph)) > 0
    assert finish(model) == {"Reshape": 1, ".RMSNormalization": 1, "Relu": 1}
    heads = x.reshape(2, 5, 4, 8)
    unit = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * scale
    (found,) = run(model, {"x": x, "scale": scale})
    assert np.abs(found - np.maximum(unit, 0)).max() < 1e-5


def test_a_norm_of_other_rows_stays_where_it_is() -> None:
    """Its rows are not those that are wanted after it."""
    body = """unit = ai.turboquant.RMSNormalization<epsilon = 1e-6>(x, scale)
e = Reshape(unit, split)
y = Relu(e)"""
    given = "float[B, T, 32] x, float[32] scale"
    left_alone(graph(given, "float[B, T, 4, 8] y", body), lower_layout)


def test_a_cast_to_itself_goes() -> None:
    body = "a = Cast<to = 1>(x)\nh = Cast<to = 10>(a)\ny = Cast<to = 1>(h)"
    model = graph("float[B, 4] x", "float[B, 4] y", body)
    assert lowered(model, lower_layout, {"x": numbers(2, 4)}, 0)[1] == {"Cast": 2}


def test_heads_and_tokens_change_places() -> None:
    model = graph(
        "float[B, T, 4, 8] x", "float[B, 4, T, 8] y", "y = Transpose<perm = [0, 2, 1, 3]>(x)"
    )
    assert lowered(model, lower_layout, {"x": numbers(2, 5, 4, 8)}, 0) == (1, {OURS: 1})


TRANSPOSES = {
    "other axes": ("float[B, T, 4, 8] x", "float[B, T, 8, 4] y", "[0, 1, 3, 2]"),
    "all axes": ("float[B, T] x", "float[T, B] y", "[1, 0]"),
    "integers": ("int64[B, T, 4, 8] x", "int64[B, 4, T, 8] y", "[0, 2, 1, 3]"),
    "doubles": ("double[B, T, 4, 8] x", "double[B, 4, T, 8] y", "[0, 2, 1, 3]"),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_other_transposes_stay(name: str) -> None:
    source, result, perm = TRANSPOSES[name]
    left_alone(graph(source, result, f"y = Transpose<perm = {perm}>(x)"), lower_layout)


def test_a_transposed_weight_becomes_a_constant() -> None:
    body = "v = Transpose<perm = [1, 0]>(w)\ny = MatMul(x, v)"
    model = graph("float[B, T, 32] x", "float[B, T, 12] y", body)
    x = numbers(2, 5, 32)
    count, nodes = lowered(model, lower_layout, {"x": x}, 0)
    assert (count, nodes) == (1, {"MatMul": 1})
    (weight,) = model.graph.initializers.values()
    assert np.array_equal(weight.const_value.numpy(), WEIGHTS["w"].T)  # type: ignore[union-attr]


PACKED = "p = MatMul(x, w)\n"
BIASED = "m = MatMul(x, w)\np = Add(m, bias)\n"
Q_K_V = "float[B, T, 16] q, float[B, T, 8] k, float[B, T, 8] v"
SLICES = """q = Slice(p, zero, middle, last, one)
kv = Slice(p, middle, end, two)
"""
CUTS = {
    "a Split by sizes": (PACKED + "q, k, v = Split<axis = -1>(p, sizes)", Q_K_V, 3, 0),
    "a Split by the last axis": (PACKED + "q, k, v = Split<axis = 2>(p, sizes)", Q_K_V, 3, 0),
    "a Split in halves": (PACKED + "q, k = Split<axis = -1, num_outputs = 2>(p)",
                          "float[B, T, 16] q, float[B, T, 16] k", 2, 0),
    "a bias": (BIASED + "q, k, v = Split<axis = -1>(p, sizes)", Q_K_V, 3, 3),
    "a bias first": (BIASED.replace("(m, bias)", "(bias, m)")
                     + "q, k, v = Split<axis = -1>(p, sizes)", Q_K_V, 3, 3),
    "slices": (PACKED + SLICES, "float[B, T, 16] q, float[B, T, 16] kv", 2, 0),
    "slices with a bias": (BIASED + SLICES, "float[B, T, 16] q, float[B, T, 16] kv", 2, 2),
}  # fmt: skip
WHOLE = {
    "a Split of tokens": (PACKED + "q, k = Split<axis = 1, num_outputs = 2>(p)",
                          "float[B, U, 32] q, float[B, V, 32] k"),
    "every other column": (PACKED + "q = Slice(p, zero, end, last, two)", "float[B, T, 16] q"),
    "columns of two axes": (PACKED + "q = Slice(p, zero, middle, one, one)", "float[B, U, 32] q"),
    "read whole, too": (PACKED + "q, k, v = Split<axis = -1>(p, sizes)\nr = Relu(p)",
                        Q_K_V + ", float[B, T, 32] r"),
    "an output, too": (PACKED + "q, k, v = Split<axis = -1>(p, sizes)",
                       Q_K_V + ", float[B, T, 32] p"),
    "a weight that is an input": ("p = MatMul(x, z)\nq, k, v = Split<axis = -1>(p, sizes)", Q_K_V),
    "a bias per token": ("m = MatMul(x, w)\np = Add(m, u)\nq, k, v = Split<axis = -1>(p, sizes)",
                         Q_K_V),
}  # fmt: skip
PROJECTED = "float[B, T, 12] x, float[12, 32] z, float[B, T, 32] u"


def projected() -> dict[str, Array]:
    return {"x": numbers(2, 6, 12), "z": numbers(12, 32), "u": numbers(2, 6, 32)}


@pytest.mark.parametrize("name", CUTS)
def test_cut_projections_become_several(name: str) -> None:
    body, outputs, products, sums = CUTS[name]
    model = graph(PROJECTED, outputs, body)
    count, nodes = lowered(model, lower_layout, projected(), 1e-5)
    assert count == 1
    assert nodes == {"MatMul": products, **({"Add": sums} if sums else {})}
    # Nothing of the packed weight is kept.
    held = sum(int(np.prod(v.shape.numpy())) for v in model.graph.initializers.values())
    assert held == 12 * 32 + (32 if sums else 0)


@pytest.mark.parametrize("name", WHOLE)
def test_other_projections_stay_whole(name: str) -> None:
    body, outputs = WHOLE[name]
    model = graph(PROJECTED, outputs, body)
    run(model, projected())
    left_alone(model, lower_layout)
