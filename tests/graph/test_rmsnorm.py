"""What the form of a norm tells: the formula, something near it, or an operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference.ops.op_gathernd import _gather_nd_impl

from tests.ascend.lowering.parts import part
from tests.runtime.models import DYNAMO, converted
from tq_onnx.files.load import load
from tq_onnx.graph.copying import copy_graph
from tq_onnx.graph.evaluate import GatherND
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


# A copy can be changed, and its model stays as it is.


def test_a_copy_is_the_same_and_its_changes_are_its_own() -> None:
    model = load(converted(DYNAMO)).model
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    copied = copy_graph(model)
    assert ir.to_proto(copied).SerializeToString(deterministic=True) == before
    copied.graph.node(0).name = "another"
    copied.graph.outputs.append(copied.graph.node(0).outputs[0])
    copied.graph.initializers.popitem()
    copied.metadata_props.clear()
    copied.opset_imports["a.domain"] = 1
    copied.functions.popitem()
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# Operators that the evaluator of parts of a graph has of its own.


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shape", [(), (4,), (1, 5)])
def test_numbers_are_gathered_as_by_onnx(batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for sizes in ((3,), (3, 4), (3, 4, 2)):
        data = rng.standard_normal((*batch, *sizes))
        for width in range(1, len(sizes) + 1):
            places = [rng.integers(-size, size, (*batch, *shape)) for size in sizes[:width]]
            indices = np.stack(places, axis=-1)
            (found,) = GatherND._run(None, data, indices, len(batch))
            (wanted,) = _gather_nd_impl(data, indices, len(batch))
            np.testing.assert_array_equal(found, wanted, strict=True)


def test_places_outside_are_no_numbers() -> None:
    with pytest.raises(IndexError):
        GatherND._run(None, np.zeros((2, 3)), np.array([[2, 0]]))
