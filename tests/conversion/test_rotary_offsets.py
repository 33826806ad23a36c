"""Means of keys that turn with their slots: where they go, and what they never change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.conversion.test_scales import CENTERED, apart, array, logits, statistics
from tests.decoders.running import batch
from tests.decoders.synthetic import SLIDING_CACHE, SLIDING_MASK, SLIDING_REPEAT, decoder
from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.presets import PRESETS, find_preset
from tq_onnx.codec.rotaryangles import Pairing
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.check import check, snapshot_interface
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.options import Options, without
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt, turning_layers
from tq_onnx.errors import TqOnnxError, UsageError
from tq_onnx.ops.features import EXACT_WINDOW, ROTARY_OFFSETS, features_of
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.recognise.match import recognise
from tq_onnx.targets.registry import TARGETS
from tq_onnx.verification.adapted import adaptation_problems

SIZE = 16
ALL = dict.fromkeys(range(3), 1.0)


def with_angles(known: Calibration, angles: dict[int, float]) -> Calibration:
    """The statistics of a file that tells how keys turn: the largest angle of each layer."""
    rng = np.random.default_rng(6)
    layers = tuple(
        replace(
            layer,
            frequencies=np.tile(angles[index] * 0.7 ** np.arange(SIZE // 2), 2).astype(np.float32),
            k_turned_mean=rng.standard_normal((2, layer.kv_num_heads, SIZE)),
            pairing=Pairing("halves", 0, SIZE),
        )
        for index, layer in enumerate(known.layers)
    )
    return replace(known, layers=layers)


def converted(
    model: ir.Model, angles: dict[int, float], preset: str = "int4", options: Options = CENTERED
) -> tuple[Plan, Calibration]:
    before, found = snapshot_interface(model), recognise(model)
    options = without(options, [EXACT_WINDOW])
    known = with_angles(statistics(make_plan(found, PRESETS[preset], options)), angles)
    plan = make_plan(found, PRESETS[preset], options, turning=turning_layers(known))
    ConvertPass(plan, found)(model)
    plan, _ = adapt(model, plan, options, known)
    bake_metadata(model, plan)
    check(before, model, plan)
    return plan, known


def test_only_keys_that_turn_have_frequencies() -> None:
    model = decoder(layers=3)
    plan, known = converted(model, {0: 1.0, 1: 0.0, 2: 0.5})

    assert [layer.key.rotary for layer in plan.layers] == [True, False, True]
    assert not any(layer.value.rotary for layer in plan.layers)
    assert Plan.from_json(model.metadata_props[METADATA_PLAN]) == plan
    assert ROTARY_OFFSETS in features_of(plan)
    names = {name for name in model.graph.initializers if "frequencies" in name}
    assert names == {"tq.key_frequencies.0", "tq.key_frequencies.2"}
    for layer in converted_layers(model, plan):
        index = layer.plan.layer
        statistics, scales = known.layers[index], known.scales(index, 2)
        assert statistics.k_turned_mean is not None
        mean = statistics.k_turned_mean / scales
        own = statistics.k_mean[:2] / scales  # of the first tokens
        offset = array(model, f"tq.key_offset.{index}")
        read = Attention.key_frequencies.of(layer.attention.node)
        assert read is layer.key.frequencies
        assert read is not None
        if layer.plan.key.rotary:
            assert np.array_equal(offset[:2], mean.astype(np.float32))
            phases = np.arange(2)[:, None, None] * statistics.frequencies
            turned = mean[0] * np.cos(phases) + mean[1] * np.sin(phases)
            assert np.allclose(offset[2:], own - turned, atol=1e-6)
            assert np.array_equal(array(model, read.name or ""), statistics.frequencies)
        else:
            constants = np.concatenate([own, mean[:1]])
            assert np.array_equal(offset, constants.astype(np.float32))
            assert read.name == "tq.none"
        assert Encode.frequencies.of(layer.value.node) is not read or read.name == "tq.none"
        assert array(model, f"tq.value_offset.{index}").shape == (3, 2, SIZE)


def test_a_plan_says_which_keys_turn() -> None:
    plan, _ = converted(decoder(layers=3), {0: 1.0, 1: 0.0, 2: 0.5})
    assert ROTARY_OFFSETS.says is not None
    said = ROTARY_OFFSETS.says(plan, ROTARY_OFFSETS.layers(plan))
    assert said == "of keys, turned by their positions in layers 0, 2"


@pytest.mark.parametrize(
    "other", [{"padding": False}, {"right_padding": True}, {"attention_mask": None}]
)
def test_offsets_turn_with_places_behind_padding(other: dict[str, Any]) -> None:
    plan, _ = converted(decoder(layers=3), {0: 1.0, 1: 0.0, 2: 0.5})
    assert all(layer.has_padding for layer in plan.layers)
    recognition = recognise(decoder(layers=3))
    assert recognition.interface is not None
    even = replace(recognition, interface=replace(recognition.interface, **other))
    chosen = make_plan(even, find_preset("int4"), centered={0}, turning={0})
    assert chosen.rotary
    assert not any(layer.has_padding for layer in chosen.layers)


def test_angles_of_another_model_cost_quality_and_no_more() -> None:
    data = batch(12)
    wanted, model = logits(decoder(layers=2), data), decoder(layers=2)
    converted(model, {0: 2.0, 1: 0.3}, "k8v4")
    assert apart(logits(model, data), wanted) < 0.2


def test_rows_that_move_to_other_slots_are_not_centered() -> None:
    parts = {"cache": SLIDING_CACHE, "repeat": SLIDING_REPEAT, "mask": SLIDING_MASK, "infer": False}
    model = decoder(**parts)
    plan, _ = converted(model, ALL)
    assert not plan.rotary
    for layer in plan.layers:
        assert not array(model, f"tq.key_offset.{layer.layer}").any()
        assert array(model, f"tq.value_offset.{layer.layer}").any()


def test_raw_layers_do_not_turn() -> None:
    model = decoder(layers=3)
    plan, _ = converted(model, ALL, options=replace(CENTERED, boundary_layers=1))
    assert [layer.key.rotary for layer in plan.layers] == [False, True, False]


@pytest.mark.parametrize("damage", ["frequencies", "offset"])
def test_verify_finds_what_turns_otherwise(damage: str) -> None:
    model = decoder(layers=2)
    plan, _ = converted(model, {0: 1.0, 1: 0.5})
    assert not adaptation_problems(model, plan)
    name = f"tq.key_{damage}.0"
    numbers = array(model, name)
    # Another theta; or the conjugate: the mean turns the other way.
    changed = numbers * np.float32(0.9 if damage == "frequencies" else 1)
    if damage == "offset":
        changed[1] *= -1
    tensor = ir.tensor(changed, name=name)
    model.graph.initializers[name].const_value = tensor
    assert adaptation_problems(model, plan) == [
        "layer 0: scales or offsets are not those of the conversion"
    ]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (np.full(SIZE, 4.0, np.float32), "not within half a turn of a slot"),
        (np.full(SIZE, np.nan, np.float32), "not within half a turn of a slot"),
        (np.ones(SIZE // 2, np.float32), "not a float32 initializer of 16 numbers"),
    ],
)
def test_frequencies_that_no_rotary_has_are_found(numbers: np.ndarray, message: str) -> None:
    model = decoder()
    before = snapshot_interface(decoder())
    plan, _ = converted(model, ALL)
    value = model.graph.initializers["tq.key_frequencies.0"]
    value.const_value = ir.tensor(numbers, name=value.name)
    with pytest.raises(TqOnnxError, match=message):
        check(before, model, plan)


@pytest.mark.parametrize(
    ("target", "noun"),
    [
        ("cann", "offsets of keys that turn with their positions"),
        ("web", "offsets of keys and values"),
    ],
)
def test_targets_without_it_refuse_it_by_name(target: str, noun: str) -> None:
    plan, _ = converted(decoder(), ALL)
    layers = tuple(
        replace(layer, head_size=64, has_padding=False).with_caches(row_bytes=34)
        for layer in plan.layers
    )
    with pytest.raises(UsageError, match=f"the target {target} has no [a-z]+ for {noun}; convert"):
        TARGETS[target].capabilities.expect(target, replace(plan, layers=layers, gains=0))


def test_the_paged_target_takes_it() -> None:
    assert ROTARY_OFFSETS in TARGETS["paged"].capabilities.features
