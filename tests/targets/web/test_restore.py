"""Operators made again, and ``verify`` of a model that has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from tests.decoders.running import FIXTURES, Decoder, batches, load, session
from tests.targets.web.test_lower import pair
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import plan_in
from tq_onnx.targets.registry import TARGETS
from tq_onnx.targets.restore import METADATA_LAYERS, restore
from tq_onnx.verification.verify import verify

Array = npt.NDArray[Any]


@pytest.mark.parametrize("name", ["dynamo-op18-sdpa", "genai-cpu-fp32", "dynamo-gemma2"])
def test_the_operators_are_those_of_before(name: str) -> None:
    bodies, lowered, plan = pair(load(name))
    lowered_plan = plan_in(lowered.metadata_props)
    assert lowered_plan is not None
    again = restore(lowered, lowered_plan)
    assert len(again.graph) <= len(bodies.graph)
    for before, after in zip(
        converted_layers(bodies, plan), converted_layers(again, plan), strict=True
    ):
        for one, other in zip(before.operators, after.operators, strict=True):
            assert one.node.attributes == other.node.attributes
    data = batches(12)[0]
    ours, theirs = (Decoder(session(model)).run(data) for model in (again, bodies))
    np.testing.assert_array_equal(ours, theirs)


def nothing_told(model: ir.Model) -> None:
    del model.metadata_props[METADATA_LAYERS]


def no_json(model: ir.Model) -> None:
    model.metadata_props[METADATA_LAYERS] = "{"


def another_shape(model: ir.Model) -> None:
    model.metadata_props[METADATA_LAYERS] = '[{"key": [], "value": 1}, 2]'


def a_layer_less(model: ir.Model) -> None:
    model.metadata_props[METADATA_LAYERS] = "[]"


def a_value_that_is_gone(model: ir.Model) -> None:
    told = model.metadata_props[METADATA_LAYERS]
    model.metadata_props[METADATA_LAYERS] = told.replace('"query":"', '"query":"no')


@pytest.mark.parametrize(
    "damage", [nothing_told, no_json, another_shape, a_layer_less, a_value_that_is_gone]
)
def test_what_is_told_is_not_trusted(damage: Callable[[ir.Model], None]) -> None:
    _, lowered, _ = pair(load("dynamo-op18-sdpa"))
    plan = plan_in(lowered.metadata_props)
    assert plan is not None
    damage(lowered)
    with pytest.raises(UnsupportedModelError, match="not as the conversion wrote them"):
        restore(lowered, plan)


def sound(model: ir.Model) -> None:
    """Changes nothing."""


def other_centroids(model: ir.Model) -> None:
    _change(model, "tq.centroids_of_bytes.", lambda array: array * np.float32(1.02))


def other_boundaries(model: ir.Model) -> None:
    _change(model, "tq.boundaries.", lambda array: array * np.float32(1.02))


def other_tops(model: ir.Model) -> None:
    _change(model, "tq.tops_of_bytes.", lambda array: 256 - array)


def other_weights(model: ir.Model) -> None:
    value = next(
        v for v in model.graph.initializers.values() if v.name == "decoder.model.norm.weight"
    )
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.1), name=value.name)


def _change(model: ir.Model, name: str, change: Callable[[Array], Array]) -> None:
    for value in model.graph.initializers.values():
        if str(value.name).startswith(name):
            assert value.const_value is not None
            array = change(value.const_value.numpy())
            value.const_value = ir.tensor(array, name=value.name)


@pytest.mark.parametrize(
    ("preset", "damage", "failing"),
    [
        ("int4", sound, ""),
        ("k5v3", sound, ""),
        ("k5v3", other_tops, "attention: function body equals the reference"),
        ("int4", other_centroids, "attention: function body equals the reference"),
        ("int4", other_boundaries, "encode: function body equals the reference"),
        ("int4", other_weights, "weights and nodes are the original's"),
    ],
)
def test_verify_sees_what_is_in_the_file(
    tmp_path: Path, preset: str, damage: Callable[[ir.Model], None], failing: str
) -> None:
    original = FIXTURES / "dynamo-op18-sdpa.onnx"
    converted = tmp_path / "web.onnx"
    convert(original, converted, preset=preset, target=TARGETS["web"])
    model = ir.load(converted)
    damage(model)
    ir.save(model, converted)
    options = {"new_tokens": 4, "threads": 1, "quick": bool(failing)}
    report = verify(original, converted, 48, source="numbers", **options)
    wrong = {check.name for check in report.checks if not check.holds}
    assert wrong == set() if not failing else failing in wrong
    assert not report.kernels
