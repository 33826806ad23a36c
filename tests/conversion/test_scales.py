"""Offsets and scales from statistics: exact, in place, and in no layer that is not quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.running import CHUNKS, Batch, Decoder, batch, load, session
from tests.decoders.synthetic import SLIDING_CACHE, SLIDING_MASK, SLIDING_REPEAT, decoder
from tq_onnx.codec.calibration import Calibration, LayerStatistics
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotaryangles import STILL
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.check import check, snapshot_interface
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.options import Options, without
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt
from tq_onnx.errors import TqOnnxError, UsageError
from tq_onnx.ops.features import EXACT_WINDOW
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.recognise.match import recognise

CENTERED = Options(calibration=Path("statistics"), center_from=2)
NORMED = "dynamo-op18-sdpa"


def statistics(plan: Plan, positions: int = 5) -> Calibration:
    """Made-up numbers: means far from zero, energies of channels that are far apart."""
    rng = np.random.default_rng(5)
    layers = []
    for layer in plan.layers:
        heads = (layer.kv_num_heads, layer.head_size)
        k_mean, v_mean = rng.standard_normal((2, positions, *heads))
        spread = 4.0 ** rng.uniform(-1, 1, heads)
        layers.append(
            LayerStatistics(
                k_mean=k_mean,
                k_energy=k_mean**2 + spread**2,
                v_mean=v_mean,
                v_energy=v_mean**2 + 1,
                q_energy=4.0 ** rng.uniform(-1, 1, (layer.num_heads, layer.head_size)),
                query_covariance=np.eye(heads[1], dtype=np.float32)[None].repeat(heads[0], 0),
                frequencies=np.zeros(heads[1], np.float32),
                k_turned_mean=np.stack([k_mean[-1], np.zeros(heads)]),
                pairing=STILL,
            )
        )
    return Calibration(tuple(layers), np.ones(positions, np.int64), 5, 5, "1", "0" * 64)


def converted(
    model: ir.Model, preset: str, options: Options, calibration: Calibration | None = None
) -> tuple[Plan, Calibration]:
    before = snapshot_interface(model)
    found = recognise(model)
    options = without(options, [EXACT_WINDOW])
    plan = make_plan(found, PRESETS[preset], options, feeds_back=calibration is not None)
    ConvertPass(plan, found)(model)
    known = calibration or statistics(plan)
    plan, _ = adapt(model, plan, options, known if options.calibration else None)
    bake_metadata(model, plan)
    check(before, model, plan)
    return plan, known


def logits(model: ir.Model, data: Batch, *, library: bool = False) -> np.ndarray:
    return Decoder(session(model, library=library)).run(data)


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Median over the tokens of the largest difference of a logit."""
    return float(np.median(np.abs(found - wanted).max(axis=-1)) / np.abs(wanted).max())


def array(model: ir.Model, name: str) -> np.ndarray:
    return model.graph.initializers[name].const_value.numpy()


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("k8v4", CENTERED),
        ("k5v3", replace(CENTERED, bits_v=5)),
        ("int4", replace(CENTERED, bits_k=5, bits_v=5, layers="1")),
    ],
)
def test_logits_stay_what_they_were(preset: str, options: Options) -> None:
    data = batch(12)
    wanted, model = logits(decoder(layers=3), data), decoder(layers=3)
    converted(model, preset, options)
    # The model is a sensitive one; without statistics the presets lose as much.
    lost = apart(logits(model, data, library=True), wanted)
    assert lost < 0.2
    damaged = ir.from_proto(ir.to_proto(model))
    offset = next(v for k, v in damaged.graph.initializers.items() if k.startswith("tq.value_off"))
    reader = next(
        node for node in Attention.nodes(damaged.graph) if Attention.value_offset.of(node) is offset
    )
    other = ir.Value(name="other", const_value=ir.tensor(3 * offset.const_value.numpy(), name="o"))
    damaged.graph.register_initializer(other)
    Attention.value_offset.replace(reader, other)
    assert apart(logits(damaged, data, library=True), wanted) > 2 * lost


def test_offsets_go_into_both_operators_of_quantised_layers() -> None:
    model = decoder(layers=3)
    plan, known = converted(model, "int4", replace(CENTERED, boundary_layers=1))

    assert [layer.centered for layer in plan.layers] == [False, True, False]
    assert Plan.from_json(model.metadata_props[METADATA_PLAN]) == plan
    names = {name for name in model.graph.initializers if "offset" in name}
    assert names == {"tq.key_offset.1", "tq.value_offset.1", "tq.no_offset.2x16"}
    key, value = known.offsets(1, 2, key_scale=known.scales(1, 2))
    assert np.array_equal(array(model, "tq.key_offset.1"), key)
    assert np.array_equal(array(model, "tq.value_offset.1"), value)
    assert key.shape == (3, 2, 16)
    assert not array(model, "tq.no_offset.2x16").any()
    read = [
        [value.name for value in node.inputs[Attention.key_offset.slot :]]
        for node in Attention.nodes(model.graph)
    ]
    none = ["tq.no_offset.2x16"] * 2
    assert read == [none, ["tq.key_offset.1", "tq.value_offset.1"], none]
    # Neither bias nor sink is missing in between by accident.
    assert [Attention.head_sink.of(node) for node in Attention.nodes(model.graph)] == [None] * 3
    assert {len(node.inputs) for node in Encode.nodes(model.graph)} == {Encode.gains.slot + 1}


def with_covariance(known: Calibration) -> Calibration:
    rng = np.random.default_rng(8)
    layers = []
    for layer in known.layers:
        queries = rng.standard_normal((layer.kv_num_heads, 99, layer.head_size))
        moments = (queries.swapaxes(1, 2) @ queries / 99).astype(np.float32)
        layers.append(replace(layer, query_covariance=moments))
    return replace(known, layers=tuple(layers))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("value_bits", [None, 3])
def test_errors_of_keys_are_fed_back(value_bits: int | None) -> None:
    model = decoder(layers=3)
    options = replace(CENTERED, boundary_layers=1, bits_v=value_bits)
    known = with_covariance(statistics(make_plan(recognise(model), PRESETS["int4"])))
    plan, _ = converted(model, "int4", options, known)

    assert [layer.key.feedback for layer in plan.layers] == [False, True, False]
    assert Plan.from_json(model.metadata_props[METADATA_PLAN]) == plan
    nodes = Encode.nodes(model.graph)
    feedback = [Encode.feedback.of(node).name for node in nodes]
    assert feedback == ["tq.none"] * 2 + ["tq.key_feedback.1", "tq.none"] + ["tq.none"] * 2
    gains = [Encode.gains.of(node).name for node in nodes]
    assert gains == ["tq.none"] * 2 + ["tq.gains.16"] * 2 + ["tq.none"] * 2
    rotation, scales = array(model, "tq.rotation.1"), known.scales(1, 2)
    made = feedback_of(known.query_covariance(1), rotation, scales)
    assert np.array_equal(array(model, "tq.key_feedback.1"), made)
    # The kernel and the function body choose the same codes, of keys and of values.
    data = batch(sum(CHUNKS))
    assert apart(logits(model, data), logits(model, data, library=True)) < 1e-4
    plan = replace(plan, layers=tuple(layer.with_caches(feedback=False) for layer in plan.layers))
    with pytest.raises(TqOnnxError, match="input feedback of"):
        check(snapshot_interface(decoder(layers=3)), model, plan)


def test_presets_that_do_not_search_feed_nothing_back() -> None:
    model = decoder(layers=3)
    known = with_covariance(statistics(make_plan(recognise(model), PRESETS["mse4"])))
    plan, _ = converted(model, "mse4", CENTERED, known)
    assert not plan.feeds_back
    assert {len(node.inputs) for node in Encode.nodes(model.graph)} == {Encode.offset.slot + 1}


def test_fillers_go_where_nothing_needs_them() -> None:
    model = decoder()
    converted(model, "int4", CENTERED)

    assert not [name for name in model.graph.initializers if name.startswith("tq.no_offset")]


def test_attention_has_scaled_keys_beside_its_scaled_queries() -> None:
    """Where a window keeps tokens exactly, its new keys are those that are encoded."""
    model = decoder(layers=2)
    plan, _ = converted(model, "int4", replace(CENTERED, residual_length=3, sink_tokens=1))
    assert [layer.equalised for layer in plan.layers] == [True, True]
    for layer in converted_layers(model, plan):
        assert layer.attention.new_keys is layer.key.vectors
        assert layer.attention.new_values is layer.value.vectors


def test_scales_are_nodes_in_front_of_both_operators() -> None:
    model = decoder(layers=3)
    plan, known = converted(model, "4bit_nc", replace(CENTERED, layers="1-2"))

    assert [layer.equalised for layer in plan.layers] == [False, True, True]
    for layer in (1, 2):
        scales = known.scales(layer, 2)
        assert scales.max() > 1.5 * scales.min()
        query, key = (array(model, f"tq.{role}_scale.{layer}") for role in ("query", "key"))
        assert (query.shape, key.shape) == ((1, 4, 1, 16), (1, 2, 1, 16))
        np.testing.assert_allclose(query[0, :, 0], np.repeat(scales, 2, axis=0))
        np.testing.assert_allclose(key[0, :, 0] * scales, 1, rtol=1e-6)
    muls = [n for n in model.graph if n.op_type == "Mul" and "equalise" in (n.name or "")]
    assert {node.name for node in muls} == {
        f"layers.{layer}.attention/equalise_{role}" for layer in (1, 2) for role in ("query", "key")
    }


@pytest.mark.parametrize("name", ["legacy-op17-sdpa-fp16", "dynamo-op18-sdpa-bf16"])
def test_scales_of_half_precision_are_powers_of_two(name: str) -> None:
    """Else s and 1 / s, each rounded, would make every score another."""
    model = load(name)
    plan, known = converted(model, "int4", CENTERED)

    assert {layer.equalised for layer in plan.layers} == {True}
    for layer in plan.layers:
        query, key = (array(model, f"tq.{role}_scale.{layer.layer}") for role in ("query", "key"))
        assert query.dtype == key.dtype == ir.DataType[layer.dtype].numpy()
        exact = known.scales(layer.layer, 2)
        group = layer.num_heads // layer.kv_num_heads
        scales = query[0, ::group, 0].astype(np.float32)
        assert np.array_equal(scales * key[0, :, 0].astype(np.float32), np.ones_like(scales))
        assert np.abs(np.log2(scales / exact)).max() <= 0.5
        offset = known.offsets(layer.layer, 2, key_scale=scales)[0]
        assert np.array_equal(array(model, f"tq.key_offset.{layer.layer}"), offset)


def test_rows_that_move_to_other_slots_have_one_offset() -> None:
    parts = {"cache": SLIDING_CACHE, "repeat": SLIDING_REPEAT, "mask": SLIDING_MASK, "infer": False}
    data, chunks, lost = batch(12, 2), (1,) * 12, []
    wanted = Decoder(session(decoder(**parts)), 2).run(data, chunks)
    for center_from in (0, 2):
        model = decoder(**parts)
        options = replace(CENTERED, bits_k=5, bits_v=5, center_from=center_from)
        _, known = converted(model, "int4", options)
        found = Decoder(session(model, library=True), 2).run(data, chunks)
        lost.append(apart(found, wanted))
        offset = known.offsets(0, center_from, key_scale=known.scales(0, center_from))[0]
        assert np.array_equal(array(model, "tq.key_offset.0"), offset[-1:])
    assert lost[1] < 2 * lost[0]


@pytest.mark.parametrize("preset", ["k8v4", "safe-lowbit", "int4"])
def test_only_rotated_keys_get_scales(preset: str) -> None:
    model = decoder()
    plan, known = converted(model, preset, CENTERED)

    rotated = PRESETS[preset].key.is_rotated
    assert {layer.equalised for layer in plan.layers} == {rotated}
    scale = known.scales(0, 2) if rotated else None
    wanted = known.offsets(0, 2, key_scale=scale)[0]
    assert np.array_equal(array(model, "tq.key_offset.0"), wanted)


def test_scales_can_be_left_out() -> None:
    model = decoder()
    plan, known = converted(model, "int4", replace(CENTERED, equalize=False))

    assert {layer.equalised for layer in plan.layers} == {False}
    assert np.array_equal(array(model, "tq.key_offset.0"), known.offsets(0, 2)[0])


def test_a_calibration_tells_more_than_norm_weights() -> None:
    model = load(NORMED)
    for name, value in model.graph.initializers.items():
        if "k_norm" in name:
            value.const_value = ir.tensor(np.linspace(0.2, 5, 64, dtype=np.float32), name=name)
    own = model.clone()
    _, known = converted(model, "int4", CENTERED)
    scales = array(model, "tq.key_scale.0")[0, :, 0]
    np.testing.assert_allclose(scales * known.scales(0, 2), 1, rtol=1e-6)
    plan, _ = converted(own, "int4", Options())
    assert {(layer.equalised, layer.centered) for layer in plan.layers} == {(True, False)}
    assert not np.allclose(array(own, "tq.key_scale.0")[0, :, 0], scales)


@pytest.mark.parametrize(
    ("preset", "options", "told"),
    [
        ("int4", Options(equalize=True), "no norm weights.*`calibration`"),
        ("k8v4", Options(equalize=True), "k8v4 are not rotated"),
        ("k8v4", replace(CENTERED, equalize=True), "k8v4 are not rotated"),
        ("raw", CENTERED, "raw quantises nothing"),
    ],
)
def test_what_would_do_nothing_is_refused(preset: str, options: Options, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        converted(decoder(), preset, options)
