"""Options of a conversion: what each does to the plan, combined with any preset, and refusals."""

from __future__ import annotations

from functools import cache

import onnx_ir as ir
import pytest

from tests.conversion.test_planning import resize
from tests.decoders.running import load
from tests.decoders.synthetic import decoder
from tq_onnx.codec.presets import NO_ROTATION, PRESETS
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import RAW
from tq_onnx.conversion.options import Options, adapted, compressed_layers
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import Recognition, recognise

FIXTURE = "genai-cpu-int4-hd128"
RAW_CODEC = Codec(RAW, 32)


@cache
def recognised(layers: int) -> Recognition:
    return recognise(decoder(layers=layers))


def planned(preset: str, options: Options | None = None, layers: int = 6) -> Plan:
    return make_plan(recognised(layers), PRESETS[preset], options or Options())


def raw_layers(plan: Plan) -> list[int]:
    return [layer.layer for layer in plan.layers if layer.codecs == (RAW_CODEC, RAW_CODEC)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_planned(name: str) -> None:
    preset = PRESETS[name]
    plan = make_plan(recognise(load(FIXTURE)), preset)

    assert (plan.preset, plan.rotation) == (name, preset.rotation)
    assert plan.norm_correction == preset.norm_correction
    for layer in plan.layers:
        assert layer.codecs == (preset.key, preset.value)
        widths = [row_layout(codec, 128).row_bytes for codec in layer.codecs]
        assert [layer.key.row_bytes, layer.value.row_bytes] == widths
        assert (layer.centered, layer.equalised) == (False, False)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("preset", "slot"), [("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102)]
)
def test_rows_are_as_small_as_in_vllm(preset: str, slot: int) -> None:
    layer = make_plan(recognise(load(FIXTURE)), PRESETS[preset]).layers[0]

    assert layer.key.row_bytes + layer.value.row_bytes == slot


@pytest.mark.parametrize("preset", ["int4", "k8v4", "experimental-max", "raw"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (Options(boundary_layers=1), [0, 5]),
        (Options(boundary_layers=2), [0, 1, 4, 5]),
        (Options(layers="2-4"), [0, 1, 5]),
        (Options(layers="3"), [0, 1, 2, 4, 5]),
        (Options(layers="0,2-3, 5"), [1, 4]),
        (Options(layers="0-3", boundary_layers=1), [0, 4, 5]),
    ],
)
def test_layers_that_are_left_out_stay_as_they_are(
    preset: str, options: Options, kept: list[int]
) -> None:
    plan = planned(preset, options)

    assert raw_layers(plan) == (list(range(6)) if preset == "raw" else kept)
    assert {layer.key.row_bytes for layer in plan.layers if layer.layer in kept} == {64}
    assert len(plan.pairs) == (1 if preset == "raw" else 2)
    before, after = planned("raw").bytes_per_token, planned(preset).bytes_per_token
    assert plan.bytes_per_token == (len(kept) * before + (6 - len(kept)) * after) // 6


def test_bits_are_those_of_the_presets_kinds() -> None:
    plan = planned("k8v4", Options(bits_v=3, boundary_layers=1))
    assert plan.pairs[1] == (PRESETS["k8v4"].key, Codec("uniform", 3))
    plan = planned("int4", Options(bits_k=5, bits_v=2, rotation="hadamard", seed=3))
    assert plan.pairs == ((Codec("lloyd_max", 5), Codec("lloyd_max", 2)),)
    assert (plan.rotation, plan.seed, plan.preset) == ("hadamard", 3, "int4")
    assert planned("prod3", Options(bits_k=4)).pairs[0][0] == Codec("prod", 4)


def test_rows_of_one_width() -> None:
    plan = planned("k5v3", Options(equal_rows=True, boundary_layers=1))

    assert [(layer.key.row_bytes, layer.value.row_bytes) for layer in plan.layers] == [
        (64, 64),
        *[(12, 12)] * 4,
        (64, 64),
    ]


@pytest.mark.parametrize(
    ("preset", "options", "told"),
    [
        ("int4", Options(boundary_layers=3), "leave nothing to compress.*give at most 2"),
        ("int4", Options(layers="4-6"), "no layer 6 in a model of 6.*from 0 to 5"),
        ("int4", Options(layers="0", boundary_layers=1), "none is left to compress"),
        *(
            ("int4", Options(layers=text), "names no layers")
            for text in ("", "4-2", "a-b", "-1", "1,,2", "1-", "1 2", "999999999999999999999")
        ),
        ("int4", Options(bits_k=6), "keys of the preset int4 are lloyd_max.*2 or 3 or 4 or 5"),
        ("k8v4", Options(bits_k=4), "keys of the preset k8v4 are fp8_e4m3.*has 8 bits"),
        ("k8v4", Options(bits_v=8), "values of the preset k8v4 are uniform.*`bits_v` 2 or 3 or 4"),
        ("raw", Options(bits_v=4), "raw keeps the values as they are"),
        ("k8v4", Options(rotation="qr"), "k8v4 does not rotate"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(preset: str, options: Options, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        planned(preset, options)


def test_a_model_of_one_layer_has_no_boundaries() -> None:
    with pytest.raises(UsageError, match="leave them out"):
        compressed_layers(Options(boundary_layers=1), 1)
    assert compressed_layers(Options(), 1) == {0}


def test_only_what_is_rotated_needs_a_power_of_two() -> None:
    model = decoder(layers=3)
    resize(24)(model)
    for options in (Options(), Options(boundary_layers=1)):
        with pytest.raises(UsageError, match=r'power of two, not 24.*`rotation="qr"`'):
            make_plan(recognise(model), PRESETS["4bit_nc"], options)
    plan = make_plan(recognise(model), PRESETS["4bit_nc"], Options(rotation="qr"))
    assert plan.rotation == "qr"
    assert make_plan(recognise(model), PRESETS["k8v4"]).rotation == NO_ROTATION


def test_raw_layers_share_one_element_type() -> None:
    found = recognise(decoder(layers=3))
    object.__setattr__(found.sites[1], "dtype", ir.DataType.FLOAT16)
    make_plan(found, PRESETS["int4"])
    for preset, options in (("raw", Options()), ("int4", Options(boundary_layers=1))):
        with pytest.raises(UnsupportedModelError, match=r"several element types \(FLOAT, FLOAT16"):
            make_plan(found, PRESETS[preset], options)


def test_a_preset_keeps_what_is_not_asked_for() -> None:
    assert adapted(PRESETS["k8v4"], Options()) == PRESETS["k8v4"]
