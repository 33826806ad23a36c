"""Plans: facts of the layers, sizes, seeds, and what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir
import pytest

from tests.decoders.running import load
from tests.decoders.synthetic import decoder
from tq_onnx import __version__
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.spec import Codec, layout_digest
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.plan import PLAN_VERSION, Plan
from tq_onnx.recognise.match import Recognition, recognise


def test_a_plan_says_what_each_layer_becomes() -> None:
    plan = make_plan(recognise(load("genai-cpu-int4-hd128")), PRESETS["int4"])

    assert (plan.tool_version, plan.layout_digest) == (
        __version__,
        layout_digest({Codec("lloyd_max", 4)}, has_window=True, has_planes=False),
    )
    assert (plan.recent, plan.sinks, plan.overlay_rows) == (32, 4, 36 * 4)
    assert (plan.preset, plan.rotation, plan.seed) == ("int4", "qr", 42)
    assert plan.fixed_capacity
    assert [layer.rotation_seed for layer in plan.layers] == [42, 1042]
    assert {(layer.key.row_bytes, layer.value.row_bytes) for layer in plan.layers} == {(66, 66)}
    # Two layers, two heads, keys and values.
    assert plan.bytes_per_token == 2 * 2 * 2 * 66


@pytest.mark.parametrize(("preset", "width"), [("int4", 34), ("int3", 26), ("int2", 18)])
def test_row_bytes_follow_the_preset(preset: str, width: int) -> None:
    plan = make_plan(recognise(load("genai-cpu-fp32")), PRESETS[preset])

    assert {layer.key.row_bytes for layer in plan.layers} == {width}


@pytest.mark.parametrize(
    ("fixture", "bits", "width"),
    [("dynamo-op18-sdpa", 32, 256), ("dynamo-op18-sdpa-hd128-fp16", 16, 256)],
)
def test_raw_has_the_width_of_the_models_floats(fixture: str, bits: int, width: int) -> None:
    plan = make_plan(recognise(load(fixture)), PRESETS["raw"])

    assert (plan.preset, plan.rotation) == ("raw", "none")
    for layer in plan.layers:
        for cache in layer.caches:
            assert (cache.codec, cache.row_bytes) == (Codec("raw", bits), width)
    assert Plan.from_json(plan.to_json()) == plan


def test_raw_next_to_codes_rotates_the_codes() -> None:
    mixed = replace(PRESETS["int4"], key=PRESETS["raw"].key)
    plan = make_plan(recognise(load("dynamo-op18-sdpa-hd128-fp16")), mixed)

    assert plan.rotation == "qr"
    assert [layer.rotation_seed for layer in plan.layers][:2] == [42, 1042]
    assert plan.pairs == ((Codec("raw", 16), Codec("lloyd_max", 4)),)


@pytest.mark.parametrize("rotation", ["qr", "hadamard"])
def test_a_preset_that_does_not_rotate_takes_no_rotation(rotation: str) -> None:
    with pytest.raises(UsageError, match="preset raw does not rotate"):
        make_plan(recognise(decoder()), PRESETS["raw"], Options(rotation=rotation))


def test_no_rotation_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="'none' is not one of qr, hadamard"):
        make_plan(recognise(decoder()), PRESETS["int4"], Options(rotation="none"))


def test_rotation_and_seed_can_be_chosen() -> None:
    plan = make_plan(recognise(decoder()), PRESETS["int4"], Options(rotation="hadamard", seed=7))

    assert plan.rotation == "hadamard"
    assert [layer.rotation_seed for layer in plan.layers] == [7, 7 + 1337]


def test_a_plan_survives_its_json() -> None:
    plan = make_plan(recognise(load("dynamo-op18-sdpa")), PRESETS["int4"])

    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["layers"][1]["key"]["past"] == "past_key_values.1.key"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": [{}]}'])
def test_damaged_json_is_told(text: str) -> None:
    with pytest.raises(ModelFileError, match="metadata"):
        Plan.from_json(text.replace("{", f'{{"version": {PLAN_VERSION}, ', 1).replace(", }", "}"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("dtype", "INT8"), ("causal", 1), ("layer", -1), ("key", []), ("unknown", 1)),
        *(("scale", float("inf")), ("scale", "1"), ("head_size", 0), ("value.row_bytes", 2**70)),
        *(("key.past", []), ("key.size", 1), ("value.size", 17), ("value.unknown", 1)),
        *(("key.codec", []), ("key.codec.bits", None), ("key.codec.bits", 7)),
        *(("value.codec.kind", []), ("value.codec.kind", "none")),
    ],
)
def test_a_plan_has_fields_of_its_types(path: str, value: object) -> None:
    fields = json.loads(make_plan(recognise(decoder()), PRESETS["int4"]).to_json())
    assert Plan.from_json(json.dumps(fields)).layers
    entry = fields["layers"][0]
    *parents, name = path.split(".")
    for parent in parents:
        entry = entry[parent]
    entry[name] = value
    with pytest.raises(ModelFileError, match="cannot be read"):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize(("name", "value"), [("gains", -1), ("gains", 17), ("norm_correction", 3)])
def test_a_plan_has_an_encoder_that_there_is(name: str, value: int) -> None:
    fields = json.loads(make_plan(recognise(decoder()), PRESETS["int4"]).to_json())
    with pytest.raises(ModelFileError, match="cannot be read"):
        Plan.from_json(json.dumps(fields | {name: value}))


@pytest.mark.parametrize("version", [0, PLAN_VERSION + 1, "2"])
def test_plans_of_other_versions_are_refused(version: object) -> None:
    fields = json.loads(make_plan(recognise(decoder()), PRESETS["int4"]).to_json())
    with pytest.raises(ModelFileError, match=f"the plan is of version {version}, and this"):
        Plan.from_json(json.dumps(fields | {"version": version}))
    del fields["version"]
    for earlier in ({}, {"version": PLAN_VERSION - 1}):
        with pytest.raises(ModelFileError, match="by an earlier version of tq-onnx; convert the"):
            Plan.from_json(json.dumps(fields | earlier))


def test_a_miss_is_told_with_layer_node_and_reason() -> None:
    recognition = recognise(decoder(scores="s1 = Relu(s0)"))

    with pytest.raises(UnsupportedModelError, match=r"^layer 0 .*Relu \(and 1 more"):
        make_plan(recognition, PRESETS["int4"])


def test_nothing_found_is_told() -> None:
    with pytest.raises(UnsupportedModelError, match="no attention"):
        make_plan(Recognition((), ()), PRESETS["int4"])


def test_an_unknown_rotation_is_told() -> None:
    with pytest.raises(UsageError, match="'spin' is not one of qr, hadamard"):
        make_plan(recognise(decoder()), PRESETS["int4"], Options(rotation="spin"))


def resize(size: int) -> Callable[[ir.Model], None]:
    """Pretends that heads have another size; enough for a plan, not for a run."""

    def change(model: ir.Model) -> None:
        values = [*model.graph.inputs, *model.graph.outputs]
        values += [value for node in model.graph for value in node.outputs]
        for value in values:
            if value.shape is not None:
                dims = [size if dim == 16 else dim for dim in value.shape]
                value.shape = ir.Shape(dims)

    return change


@pytest.mark.parametrize("size", [20, 520])
def test_a_head_size_without_a_row_layout_is_refused(size: int) -> None:
    model = decoder()
    resize(size)(model)

    with pytest.raises(UnsupportedModelError, match=f"layer 0: head size {size}"):
        make_plan(recognise(model), PRESETS["int4"])


def test_a_hadamard_rotation_needs_a_power_of_two() -> None:
    model = decoder()
    resize(24)(model)

    with pytest.raises(UsageError, match="power of two, not 24"):
        make_plan(recognise(model), PRESETS["int4"], Options(rotation="hadamard"))
