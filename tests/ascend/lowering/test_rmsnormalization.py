"""RMS norms of every spelling become one operator; what is nearly one stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.ascend.lowering.parts import left_alone, lowered, numbers, part
from tq_onnx.ascend.lowering.rmsnormalization import lower_norms
from tq_onnx.ops.domain import RMS_NORMALIZATION

SPELLED = """two = Constant<value_float = 2.0>()
last = Constant<value_ints = [-1]>()
epsilon = Constant<value_float = 1e-6>()
square = Pow(x, two)
mean = ReduceMean<keepdims = 1>(square, last)
above = Add(mean, epsilon)
root = Sqrt(above)
inverse = Reciprocal(root)
unit = Mul(x, inverse)
y = Mul(w, unit)
"""
SPELLINGS = {
    "as torch exports it": [],
    "squares by Mul": [("Pow(x, two)", "Mul(x, x)")],
    "one over": [
        ("inverse = Reciprocal(root)", "one = Constant<value_float = 1.0>()\n"
         "inverse = Div(one, root)")
    ],
    "over the root": [("inverse = Reciprocal(root)\n", ""), ("Mul(x, inverse)", "Div(x, root)")],
    "the power of minus a half": [
        ("root = Sqrt(above)\n", "half = Constant<value_float = -0.5>()\n"),
        ("Reciprocal(root)", "Pow(above, half)"),
    ],
    "over the power of a half": [
        ("root = Sqrt(above)\n", "half = Constant<value_float = 0.5>()\nroot = Pow(above, half)\n"),
        ("inverse = Reciprocal(root)\n", ""),
        ("Mul(x, inverse)", "Div(x, root)"),
    ],
    "operands the other way round": [
        ("Add(mean, epsilon)", "Add(epsilon, mean)"),
        ("Mul(x, inverse)", "Mul(inverse, x)"),
        ("Mul(w, unit)", "Mul(unit, w)"),
    ],
    "the last axis by its number": [("[-1]", "[2]")],
    "a Cast to itself": [
        ("square = Pow(x, two)", "same = Cast<to = 1>(x)\nsquare = Pow(same, two)"),
        ("Mul(x, inverse)", "Mul(same, inverse)"),
    ],
    "one plus the weight": [
        ("y = Mul(w, unit)", "one = Constant<value_float = 1.0>()\nmore = Add(w, one)\n"
         "y = Mul(unit, more)")
    ],
}  # fmt: skip
TWINS = {
    "cubes": [("value_float = 2.0", "value_float = 3.0")],
    "another axis": [("[-1]", "[1]")],
    "two axes": [("[-1]", "[1, 2]")],
    "the mean of something else": [("Pow(x, two)", "Pow(z, two)")],
    "products of two things": [("Pow(x, two)", "Mul(x, z)")],
    "an epsilon that is computed": [("Add(mean, epsilon)", "Add(mean, mean)")],
    "a negative epsilon": [("1e-6", "-1e-6")],
    "without a root": [("root = Sqrt(above)", "root = Identity(above)")],
    "times the root": [("inverse = Reciprocal(root)", "inverse = Identity(root)")],
    "two over the root": [
        ("inverse = Reciprocal(root)", "inverse = Div(two, root)")
    ],
    "a weight that is an input": [("Mul(w, unit)", "Mul(z, unit)")],
    "a weight of one element": [("Mul(w, unit)", "Mul(two, unit)")],
    "a sum for a mean": [("ReduceMean", "ReduceSum")],
    "rounded on the way in": [
        ("square = Pow(x, two)", "short = Cast<to = 10>(x)\nlong = Cast<to = 1>(short)\n"
         "square = Pow(long, two)"),
    ],
}  # fmt: skip


def spelled(edits: list[tuple[str, str]], *, weight: np.ndarray | None = None) -> ir.Model:
    body = SPELLED
    for old, new in edits:
        assert old in body
        body = body.replace(old, new)
    weights = {"w": numbers(32, seed=1) if weight is None else weight}
    types = "float[B, 3, 32] x, float[B, 3, 32] z"
    return part(types, "float[B, 3, 32] y", body, weights)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_node(name: str) -> None:
    feeds = {"x": numbers(2, 3, 32), "z": numbers(2, 3, 32)}
    count, nodes = lowered(spelled(SPELLINGS[name]), lower_norms, feeds)
    assert (count, nodes) == (1, {f".{RMS_NORMALIZATION}": 1})


@pytest.mark.parametrize("shape", [(1, 1, 32), (32,)])
def test_weights_of_any_rank(shape: tuple[int, ...]) -> None:
    feeds = {"x": numbers(2, 3, 32), "z": numbers(2, 3, 32)}
    model = spelled([], weight=numbers(*shape, seed=1))
    assert lowered(model, lower_norms, feeds)[1] == {f".{RMS_NORMALIZATION}": 1}


@pytest.mark.parametrize("name", TWINS)
def test_what_is_nearly_a_norm_stays(name: str) -> None:
    left_alone(spelled(TWINS[name]), lower_norms)


def test_a_weight_per_token_stays() -> None:
    left_alone(spelled([], weight=numbers(3, 1, seed=1)), lower_norms)


HALF = """two = Constant<value_float = 2.0>()
last = Constant<value_ints = [-1]>()
epsilon = Constant<value_float = 1e-6>()
wide = Cast<to = 1>(x)
square = Pow(wide, two)
mean = ReduceMean<keepdims = 1>(square, last)
above = Add(mean, epsilon)
root = Sqrt(above)
inverse = Reciprocal(root)
unit = Mul(wide, inverse)
"""
HALVES = {
    "weighted in half": ("unit16 = Cast<to = 10>(unit)\ny = Mul(w, unit16)", "float16", {}),
    "weighted in single": ("v = Cast<to = 1>(w)\nz = Mul(unit, v)\ny = Cast<to = 10>(z)",
                           "float16", {"Cast": 2}),
    "single throughout": ("unit16 = Cast<to = 10>(unit)\ny = Mul(w, unit16)", "float",
                          {"Cast": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_rounded_where_it_was(name: str) -> None:
    end, source, casts = HALVES[name]
    weight = numbers(32, seed=1, dtype=np.float16)
    model = part(f"{source}[B, 3, 32] x", "float16[B, 3, 32] y", HALF + end, {"w": weight})
    x = numbers(2, 3, 32).astype(np.float32 if source == "float" else np.float16)
    # Half an ulp of the largest results, twice.
    count, nodes = lowered(model, lower_norms, {"x": x}, tolerance=8e-3)
    assert (count, nodes) == (1, {f".{RMS_NORMALIZATION}": 1, **casts})


FUSED = {
    "ONNX Runtime's": "y = SimplifiedLayerNormalization<axis = -1, epsilon = 1e-6>(x, w)",
    "by its number": "y = SimplifiedLayerNormalization<axis = 2, epsilon = 1e-6>(x, w)",
    "ONNX 23": "y = RMSNormalization<axis = -1, epsilon = 1e-6>(x, w)",
    "default epsilon": "y = RMSNormalization(x, w)",
}
FUSED_TWINS = {
    "two axes": "y = RMSNormalization<axis = 1>(x, w)",
    "computed in half": "y = RMSNormalization<stash_type = 10>(x, w)",
    "a norm with a mean": "y = LayerNormalization(x, w)",
}


def fused(body: str, weight: np.ndarray) -> ir.Model:
    return part("float[B, 3, 32] x", "float[B, 3, 32] y", body, {"w": weight}, opset=23)


@pytest.mark.parametrize("name", FUSED)
def test_norms_that_are_a_node(name: str) -> None:
    model = fused(FUSED[name], numbers(32, seed=1))
    count, nodes = lowered(model, lower_norms, {"x": numbers(2, 3, 32) * 1e-3})
    assert (count, nodes) == (1, {f".{RMS_NORMALIZATION}": 1})


@pytest.mark.parametrize("name", FUSED_TWINS)
def test_nodes_that_are_other_norms_stay(name: str) -> None:
    weight = numbers(3, 32) if name == "two axes" else numbers(32)
    left_alone(fused(FUSED_TWINS[name], weight), lower_norms)


SKIP = "com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 1e-6>"
SKIPS = {
    "with its sum": (f"y, m, v, s = {SKIP}(x, z, w)", {"Add": 1}),
    "with a bias": (f"y, m, v, s = {SKIP}(x, z, w, b)", {"Add": 2}),
}


@pytest.mark.parametrize("name", SKIPS)
def test_norms_of_sums(name: str) -> None:
    body, adds = SKIPS[name]
    weights = {"w": numbers(32, seed=1), "b": numbers(32, seed=2)}
    model = part(
        "float[B, 3, 32] x, float[B, 3, 32] z",
        "float[B, 3, 32] y, float[B, 3, 32] s",
        body,
        weights,
    )
    feeds = {"x": numbers(2, 3, 32), "z": numbers(2, 3, 32, seed=3)}
    count, nodes = lowered(model, lower_norms, feeds)
    assert (count, nodes) == (1, {f".{RMS_NORMALIZATION}": 1, **adds})


def test_a_norm_of_a_sum_whose_variance_is_read_stays() -> None:
    model = part(
        "float[B, 3, 32] x, float[B, 3, 32] z",
        "float[B, 3, 32] y, float[B, 3, 1] v",
        f"y, m, v, s = {SKIP}(x, z, w)",
        {"w": numbers(32)},
    )
    left_alone(model, lower_norms)


def test_what_reads_the_inside_keeps_it() -> None:
    model = part(
        "float[B, 3, 32] x, float[B, 3, 32] z",
        "float[B, 3, 32] y, float[B, 3, 32] unit",
        SPELLED,
        {"w": numbers(32)},
    )
    feeds = {"x": numbers(2, 3, 32), "z": numbers(2, 3, 32)}
    count, nodes = lowered(model, lower_norms, feeds)
    assert count == 1 and nodes[f".{RMS_NORMALIZATION}"] == 1 and nodes["ReduceMean"] == 1
