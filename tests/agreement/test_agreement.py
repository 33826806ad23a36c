"""Every real export in the fixtures agrees with its conversion, however it is fed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from tests.agreement.harness import (
    AS_THEY_ARE,
    agreement,
    compare,
    difference,
    element_type,
    opened,
    runs,
    simulated,
)
from tests.agreement.tolerances import allowed
from tests.covering import exports
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.ops.domain import ATTENTION
from tq_onnx.runtime.opening import open_original

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: ONNX Runtime's CPU provider has no bfloat16; the reference evaluator has.
BFLOAT16 = {"dynamo-op18-sdpa-bf16"}
EXPORTS = sorted({path.stem for path in FIXTURES.glob("*.onnx")} - BFLOAT16)
FORMS = exports(EXPORTS)
#: Feedings that every graph must have been compared in, unless it is listed here.
ONE_PROMPT = {"hf-ortcpu-prefill", "hf-ortcuda-prefill", "hf-prefill", "hf-static-prefill"}
#: ONNX Runtime's CPU runs the original's first call only.
FIRST_CALL_RUNS = {"genai-cpu-fp16"}
#: All presets but the two that every export is converted with.
OTHERS = [name for name in PRESETS if name not in ("raw", "int4")]
TOKENS = 6


#: Exports in turn by the kernels and by the bodies.
RAW_RUNS = [
    pytest.param(name, place % 2 == 0, id=f"{name}-{'bodies' if place % 2 else 'library'}")
    for place, name in enumerate(EXPORTS)
    if name in FORMS
]


@pytest.mark.parametrize(("name", "library"), RAW_RUNS)
def test_a_raw_conversion_is_its_original(name: str, library: bool) -> None:
    found = agreement(FIXTURES / f"{name}.onnx", "raw", library=library)

    assert found.refusal == ""
    assert found.layers > 0
    assert found.worst <= allowed(found, "raw"), found.figures
    if name not in ONE_PROMPT | FIRST_CALL_RUNS:
        assert {"chunks", "steps"} & set(found.figures), found.figures


@pytest.mark.parametrize("name", FORMS)
def test_a_quantised_conversion_is_the_raw_one_over_decoded_caches(name: str) -> None:
    found = agreement(FIXTURES / f"{name}.onnx", "int4", library=True)

    assert found.refusal == ""
    assert found.worst <= allowed(found, "int4"), found.figures


@pytest.mark.parametrize("index", range(len(OTHERS)))
def test_every_preset_is_the_raw_conversion_over_decoded_caches(index: int) -> None:
    """Some by the kernels and some by the bodies; that both agree is shown elsewhere."""
    name = ("dynamo-op18-sdpa", "genai-cpu-fp32")[index % 2]
    found = agreement(FIXTURES / f"{name}.onnx", OTHERS[index], library=index % 4 < 2)

    assert found.refusal == ""
    assert found.worst <= allowed(found, OTHERS[index]), found.figures


@pytest.mark.parametrize("preset", ["k5v3", "k8v4", "experimental-max"])
def test_layers_of_several_codecs(preset: str) -> None:
    options = replace(AS_THEY_ARE, layers="1")
    found = agreement(FIXTURES / "dynamo-op18-sdpa.onnx", preset, options, library=False)

    assert found.refusal == ""
    assert found.worst <= allowed(found, preset), found.figures


@pytest.mark.parametrize("name", sorted(BFLOAT16))
def test_a_bfloat16_conversion_is_its_original(name: str) -> None:
    path = FIXTURES / f"{name}.onnx"
    logits = []
    for model in (ir.load(path), prepare(path, preset="raw").loaded.model):
        evaluator = ReferenceEvaluator(ir.to_proto(model))
        feeds = {
            "input_ids": np.arange(3, 3 + TOKENS)[None],
            "attention_mask": np.ones((1, TOKENS), np.int64),
            "position_ids": np.arange(TOKENS)[None],
        }
        for value in model.graph.inputs:
            if value.name not in feeds:
                assert value.name is not None and value.shape is not None and value.dtype
                heads, width = value.shape[1], value.shape[3]
                feeds[value.name] = np.zeros((1, heads, 0, width), value.dtype.numpy())
        logits.append(np.asarray(evaluator.run(None, feeds)[0], np.float64))

    # Steps of bfloat16 are 2^-8 of the number; the original rounds scores and weights too.
    assert difference(*logits) <= 2.0**-6


@pytest.mark.parametrize("name", ["dynamo-op18-sdpa", "genai-cpu-fp32"])
def test_a_wrong_scale_is_seen(name: str) -> None:
    path = FIXTURES / f"{name}.onnx"
    model = prepare(path, preset="raw").loaded.model
    node = next(node for node in model.graph if node.op_type == ATTENTION)
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.05 * node.attributes["scale"].as_float())
    original, made = open_original(path, threads=1), opened(model, path, library=False)

    figures = compare(lambda run, seed: run.logits(original, seed), made, runs(original))

    assert min(figures.values()) > 1e-3


def test_another_codec_is_seen() -> None:
    path = FIXTURES / "dynamo-op18-sdpa.onnx"
    made = opened(prepare(path, preset="int4").loaded.model, path, library=False)
    reference = simulated(path, "int3")

    figures = compare(
        lambda run, seed: run.logits(reference, seed), made, runs(reference), typical=True
    )

    assert min(figures.values()) > 1e-3


def test_a_model_with_caches_of_float16_has_the_noise_of_float16() -> None:
    half, single = (FIXTURES / f"legacy-op17-sdpa{end}.onnx" for end in ("-fp16", ""))
    assert element_type(half, "FLOAT") == "FLOAT16"
    assert element_type(single, "FLOAT") == "FLOAT"


def test_a_difference_is_relative_and_no_number_is_infinite() -> None:
    expected = np.array([[4.0, -8.0], [1.0, 2.0]])
    assert difference(expected, expected + np.array([[0, 0.8], [0, 0]])) == pytest.approx(0.1)
    assert difference(expected, expected * np.nan) == float("inf")
    assert difference(expected, expected[:1]) == float("inf")
