"""What the form of a norm tells: the formula, something near it, or an operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.ascend.lowering.parts import part
from tq_onnx.graph.rmsnorm import RmsNorm, constant_channels, match_norms
from tq_onnx.ops.domain import MICROSOFT

FORMULA = """two = Constant<value_float = 2.0>()
last = Constant<value_ints = [-1]>()
epsilon = Constant<value_float = 0.5>()
square = Pow(x, two)
mean = ReduceMean<keepdims = 1>(square, last)
above = Add(mean, epsilon)
root = Sqrt(above)
unit = Div(x, root)
y = Mul(w, unit)
"""
WEIGHT = {"w": np.arange(1, 5, dtype=np.float32)}


def matched(body: str, outputs: str = "float[2, 3, 4] y") -> list[RmsNorm]:
    inputs = "float[2, 3, 4] x, float[2, 3, 4] z"
    model = part(inputs, outputs, body, WEIGHT, opset=23)
    return [norm for node in model.graph for norm in match_norms(node)]


def name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name


def test_the_formula() -> None:
    (norm,) = matched(FORMULA)
    assert (name(norm.source), name(norm.weight), norm.epsilon) == ("x", "w", 0.5)
    assert norm.weight_index == 0 and norm.is_of_last_axis
    assert not norm.is_operator and not norm.centers and not norm.summands and norm.bias is None
    weight = constant_channels(norm.weight, 4)
    assert weight is not None and np.array_equal(weight, WEIGHT["w"])
    assert constant_channels(norm.weight, 3) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Add(mean, epsilon)", "Max(mean, epsilon)"),
        ("Div(x, root)", "Div(z, root)"),
        ("keepdims = 1", "keepdims = 0"),
    ],
)
def test_what_is_near_the_formula_has_no_source(old: str, new: str) -> None:
    (norm,) = matched(FORMULA.replace(old, new))
    assert norm.source is None and name(norm.weight) == "w"


@pytest.mark.parametrize(
    ("old", "new"),
    [("Div(x, root)", "Add(x, root)"), ("[-1]", "[1]"), ("Sqrt(above)", "Exp(above)")],
)
def test_what_is_no_norm(old: str, new: str) -> None:
    assert matched(FORMULA.replace(old, new)) == []


@pytest.mark.parametrize(
    ("body", "epsilon", "last", "centers", "bias"),
    [
        ("y = RMSNormalization(x, w)", 1e-5, True, False, None),
        ("y = SimplifiedLayerNormalization<epsilon = 0.5, axis = 2>(x, w)", 0.5, True, False, None),
        ("y = RMSNormalization<axis = 1>(x, w)", 1e-5, False, False, None),
        ("y = LayerNormalization(x, w)", 1e-5, True, True, None),
        ("y = LayerNormalization(x, w, w)", 1e-5, True, True, "w"),
    ],
)
def test_operators(body: str, epsilon: float, last: bool, centers: bool, bias: str | None) -> None:
    (norm,) = matched(body)
    assert norm.is_operator and norm.weight_index == 1
    assert (name(norm.source), name(norm.weight)) == ("x", "w")
    assert norm.epsilon == pytest.approx(epsilon)
    assert (norm.is_of_last_axis, norm.centers, name(norm.bias)) == (last, centers, bias)


def test_a_sum_and_its_norm() -> None:
    skip = f"{MICROSOFT}.SkipSimplifiedLayerNormalization"
    (norm,) = matched(f"y, m, i, t = {skip}(x, z, w)", "float[2, 3, 4] y, float[2, 3, 4] t")
    assert (name(norm.source), [name(value) for value in norm.summands]) == ("x", ["z"])
    assert (name(norm.weight), name(norm.total), norm.bias) == ("w", "t", None)
