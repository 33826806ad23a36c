"""Each promise of ``check`` has its negative twin: a converted model that breaks just this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.files.models import DYNAMO, FIXTURES, GENAI
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.check import InterfaceSnapshot, check, complaint, snapshot_interface
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.errors import TqOnnxError
from tq_onnx.files.load import load
from tq_onnx.ops.domain import DOMAIN, ENCODE
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import METADATA_DIGEST, METADATA_PLAN, Plan
from tq_onnx.recognise.match import recognise

Converted = tuple[InterfaceSnapshot, ir.Model, Plan]
ALL = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


def converted(
    fixture: str = DYNAMO, preset: str = "int4", options: Options | None = None
) -> Converted:
    model = load(FIXTURES / f"{fixture}.onnx").model
    before = snapshot_interface(model)
    recognition = recognise(model)
    plan = make_plan(recognition, PRESETS[preset], options or Options())
    ConvertPass(plan, recognition)(model)
    bake_metadata(model, plan)
    return before, model, plan


def constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


@pytest.mark.parametrize(
    ("fixture", "preset"),
    [
        *((name, preset) for name in ALL for preset in ("int4", "raw")),
        *((GENAI, name) for name in PRESETS if name not in ("int4", "raw")),
    ],
)
def test_every_conversion_holds(fixture: str, preset: str) -> None:
    check(*converted(fixture, preset))


def other_name(model: ir.Model) -> None:
    model.graph.inputs[0].name = "renamed"


def other_type(model: ir.Model) -> None:
    model.graph.inputs[0].type = ir.TensorType(ir.DataType.INT32)


def other_order(model: ir.Model) -> None:
    first = model.graph.outputs[0]
    model.graph.outputs[0] = model.graph.outputs[1]
    model.graph.outputs[1] = first


def free_width(model: ir.Model) -> None:
    shape = Encode.past.of(Encode.nodes(model.graph)[0]).shape
    Encode.past.of(Encode.nodes(model.graph)[0]).shape = ir.Shape([*shape[:3], "w"])


def float_cache(model: ir.Model) -> None:
    Encode.nodes(model.graph)[0].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)


def crooked_rotation(model: ir.Model) -> None:
    matrix = np.eye(64, dtype=np.float32)
    matrix[0, 1] = 1e-3
    replace_rotation(model, matrix)


def nan_rotation(model: ir.Model) -> None:
    replace_rotation(model, np.full((64, 64), np.nan, np.float32))


def small_rotation(model: ir.Model) -> None:
    replace_rotation(model, np.eye(32, dtype=np.float32))


def replace_rotation(model: ir.Model, matrix: np.ndarray) -> None:
    value = constant(model, "other", matrix)
    old = Encode.rotation.of(Encode.nodes(model.graph)[0])
    old.replace_all_uses_with(value)


def lopsided_centroids(model: ir.Model) -> None:
    old = Encode.centroids.of(Encode.nodes(model.graph)[0])
    array = old.const_value.numpy().copy()
    array[-1] = np.nextafter(array[-1], np.float32(9))
    old.replace_all_uses_with(constant(model, "other", array))


def unsorted_boundaries(model: ir.Model) -> None:
    old = Encode.boundaries.of(Encode.nodes(model.graph)[0])
    array = -old.const_value.numpy()
    old.replace_all_uses_with(constant(model, "other", array))


def other_codebook_in_attention(model: ir.Model) -> None:
    old = Encode.centroids.of(Encode.nodes(model.graph)[0])
    copy = constant(model, "copy", old.const_value.numpy())
    Attention.key_centroids.replace(Attention.nodes(model.graph)[0], copy)


def caches_of_the_other_layer(model: ir.Model) -> None:
    first, second = Attention.nodes(model.graph)
    for cache in (Attention.key_cache, Attention.value_cache):
        cache.replace(first, cache.of(second))


def appends_to_the_other_cache(model: ir.Model) -> None:
    first, second = Encode.nodes(model.graph)[:2]
    Encode.past.replace(first, Encode.past.of(second))


def attention_without_scale(model: ir.Model) -> None:
    Attention.nodes(model.graph)[0].attributes["scale"] = ir.AttrFloat32("scale", 0.5)


def attention_with_sinks(model: ir.Model) -> None:
    node = Attention.nodes(model.graph)[0]
    Attention.head_sink.replace(node, constant(model, "sinks", np.zeros(4, np.float32)))


def missing_attribute(model: ir.Model) -> None:
    Encode.nodes(model.graph)[0].attributes.pop("bits")


def one_layer_less(model: ir.Model) -> None:
    node = Attention.nodes(model.graph)[0]
    node.outputs[0].replace_all_uses_with(node.inputs[0])
    model.graph.remove(node, safe=True)


def no_body(model: ir.Model) -> None:
    del model.functions[(DOMAIN, ENCODE, "")]


def no_import(model: ir.Model) -> None:
    del model.opset_imports[DOMAIN]


def other_plan(model: ir.Model) -> None:
    plan = Plan.from_json(model.metadata_props[METADATA_PLAN])
    model.metadata_props[METADATA_PLAN] = replace(plan, seed=plan.seed + 1).to_json()


def other_digest(model: ir.Model) -> None:
    model.metadata_props[METADATA_DIGEST] = "0" * 16


def invalid_node(model: ir.Model) -> None:
    softmax = next(node for node in model.graph if node.op_type == "MatMul")
    softmax.attributes["bogus"] = ir.AttrInt64("bogus", 1)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (other_name, "inputs are not the same"),
        (other_type, "input input_ids is INT32"),
        (other_order, "outputs are not the same"),
        (free_width, "'w'"),
        (float_cache, "is FLOAT"),
        (crooked_rotation, "not orthogonal"),
        (nan_rotation, "not orthogonal"),
        (small_rotation, "not a float32 initializer of the head's size"),
        (lopsided_centroids, "centroids .* antisymmetric"),
        (unsorted_boundaries, "boundaries .* not sorted"),
        (other_codebook_in_attention, "attention has another .*centroids than the encoder"),
        (caches_of_the_other_layer, "attentions read the caches"),
        (appends_to_the_other_cache, "has the cache"),
        (attention_without_scale, "has scale 0.5, not"),
        (attention_with_sinks, "input head_sink of .* is not as planned"),
        (missing_attribute, "has bits None, not"),
        (one_layer_less, "4 encoders and 1 attentions for 2 layers"),
        (no_body, f"body of {ENCODE} is missing"),
        (no_import, "not imported"),
        (other_plan, "plan in the metadata"),
        (other_digest, "layout digest"),
        (invalid_node, "onnx.checker"),
    ],
)
def test_a_broken_promise_is_found(damage: Callable[[ir.Model], None], text: str) -> None:
    before, model, plan = converted()
    damage(model)
    with pytest.raises(TqOnnxError, match=text) as caught:
        check(before, model, plan)
    assert caught.value.exit_code == 1
    assert "nothing was written" in str(caught.value)


def other_correction(model: ir.Model) -> None:
    Encode.nodes(model.graph)[2].attributes["norm_correction"] = ir.AttrInt64("norm_correction", 0)


def other_index(model: ir.Model) -> None:
    node = Attention.nodes(model.graph)[1]
    node.attributes["value_codec_index"] = ir.AttrInt64("value_codec_index", 0)


def no_index(model: ir.Model) -> None:
    Encode.nodes(model.graph)[0].attributes.pop("codec_index")


def offset_of_its_own(model: ir.Model) -> None:
    node = Attention.nodes(model.graph)[1]
    copy = constant(model, "copy", np.zeros((1, 2, 64), np.float32))
    Attention.key_offset.replace(node, copy)


def replace_offsets(model: ir.Model, array: np.ndarray) -> None:
    Encode.offset.of(Encode.nodes(model.graph)[0]).replace_all_uses_with(
        constant(model, "other", array)
    )


def endless_offset(model: ir.Model) -> None:
    replace_offsets(model, np.full((1, 2, 64), np.inf, np.float32))


def small_offset(model: ir.Model) -> None:
    replace_offsets(model, np.zeros((1, 1, 64), np.float32))


def offset_of_a_raw_layer(model: ir.Model) -> None:
    replace_offsets(model, np.ones((1, 2, 64), np.float32))


def no_offset(model: ir.Model) -> None:
    Encode.nodes(model.graph)[3].resize_inputs(Encode.offset.slot)


def square_rotation(model: ir.Model) -> None:
    replace_rotation_of(model, lambda matrix: matrix[:, :64])


def endless_projection(model: ir.Model) -> None:
    replace_rotation_of(model, lambda matrix: np.where(np.arange(128) < 64, matrix, np.nan))


def replace_rotation_of(model: ir.Model, change: Callable[[np.ndarray], np.ndarray]) -> None:
    node = Encode.nodes(model.graph)[2]
    rotation = Encode.rotation.of(node)
    changed = change(rotation.const_value.numpy()).astype(np.float32)
    rotation.replace_all_uses_with(constant(model, "other", changed))


MIXED = Options(layers="1", calibration=Path("a file"))


def test_a_mixed_conversion_holds() -> None:
    check(*converted(DYNAMO, "prod4", MIXED))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (other_correction, "has norm_correction 0, not 2"),
        (other_index, "has value_codec_index 0, not 1"),
        (no_index, "has codec_index None, not 0"),
        (offset_of_its_own, "attention has another key_offset"),
        (endless_offset, "offset of .* not finite"),
        (small_offset, "offset of .* is not a float32 initializer"),
        (offset_of_a_raw_layer, "offset of .* is not zero"),
        (no_offset, "input offset of .* is not as planned"),
        (square_rotation, "not a float32 initializer of the head's size"),
        (endless_projection, "projection beside the rotation is not finite"),
    ],
)
def test_a_broken_promise_of_a_mixed_model_is_found(
    damage: Callable[[ir.Model], None], text: str
) -> None:
    preset = "prod4" if damage in (square_rotation, endless_projection) else "int4"
    before, model, plan = converted(DYNAMO, preset, MIXED)
    damage(model)
    with pytest.raises(TqOnnxError, match=text):
        check(before, model, plan)


def test_rows_that_are_too_short_are_found() -> None:
    before, model, plan = converted()
    layers = (plan.layers[0].with_caches(codec=Codec("lloyd_max", 5)), plan.layers[1])
    with pytest.raises(TqOnnxError, match="rows of 34 bytes are too short for lloyd_max 5"):
        check(before, model, replace(plan, layers=layers))


def test_the_checker_sees_ours_and_skips_what_only_a_runtime_knows() -> None:
    _, model, _ = converted(GENAI)
    assert complaint(model) == ""
    node = Attention.nodes(model.graph)[0]
    node.attributes.pop("scale")
    assert "scale" in complaint(model)


def test_an_original_that_the_checker_refuses_is_not_held_against_the_result() -> None:
    before, model, plan = converted()
    invalid_node(model)
    check(replace(before, complaint="was so before"), model, plan)


def test_the_checker_leaves_weights_alone() -> None:
    model = load(FIXTURES / f"{DYNAMO}.onnx").model
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert complaint(model) == ""
    after = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert before.keys() == after.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
