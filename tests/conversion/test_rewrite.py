"""The pass: what it keeps, what it adds, what it removes, and when it refuses to begin."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.covering import exports
from tests.decoders.running import DECOMPOSED, GROWING, Decoder, batch, convert, load, session
from tests.decoders.synthetic import ADDITIVE, SELECTING, UNMASKED, decoder
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise


def of_type(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def ports(model: ir.Model) -> list[tuple[str | None, str]]:
    return [
        (value.name, str(value.shape[:3] if value.shape else None))
        for value in (*model.graph.inputs, *model.graph.outputs)
    ]


@cache
def converted(name: str) -> tuple[ir.Model, Plan]:
    """An export's conversion and its plan, which tests read only."""
    model = load(name)
    return model, convert(model)


@pytest.mark.parametrize("name", exports(GROWING))
def test_inputs_and_outputs_keep_name_order_and_leading_dimensions(name: str) -> None:
    original, (model, plan) = load(name), converted(name)

    assert ports(model) == ports(original)
    caches = {layer.key.past: layer.key.row_bytes for layer in plan.layers}
    caches |= {layer.value.present: layer.value.row_bytes for layer in plan.layers}
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in caches:
            assert value.dtype == ir.DataType.UINT8
            assert value.shape is not None
            assert value.shape[3] == caches[value.name] == plan.layers[0].head_size // 2 + 2


@pytest.mark.parametrize("name", exports(GROWING))
def test_three_operators_a_layer_with_readable_names(name: str) -> None:
    model, plan = converted(name)

    assert [node.name for node in Attention.nodes(model.graph)] == [
        "layers.0.attention/TurboQuantDequantAttention",
        "layers.1.attention/TurboQuantDequantAttention",
    ]
    assert {node.name for node in Encode.nodes(model.graph)} == {
        f"layers.{layer}.attention/TurboQuantEncode_{role}"
        for layer in range(2)
        for role in ("key", "value")
    }
    for node, layer in zip(Attention.nodes(model.graph), plan.layers, strict=True):
        attributes = {key: item.value for key, item in node.attributes.items()}
        assert attributes == {
            "scale": pytest.approx(layer.scale),
            "causal": int(layer.causal),
            "sliding_window": 0,
            "softcap": 0.0,
            "key_codec": "lloyd_max",
            "key_bits": 4,
            "value_codec": "lloyd_max",
            "value_bits": 4,
        }
        assert len(node.inputs) == (9 if layer.has_bias else 8)


@pytest.mark.parametrize("name", exports(GROWING))
def test_old_attention_is_gone_and_everything_else_is_there(name: str) -> None:
    original, (model, _) = load(name), converted(name)

    gone = {"Softmax", "IsNaN", "GroupQueryAttention", "Attention", "TensorScatter"}
    assert not [node for node in model.graph if node.op_type in gone]
    kept = ("MatMul", "MatMulNBits", "Sigmoid", "SkipSimplifiedLayerNormalization")
    attention_products = 4 if of_type(original, "Softmax") else 0
    for op_type in kept:
        lost = attention_products if op_type == "MatMul" else 0
        assert len(of_type(model, op_type)) == len(of_type(original, op_type)) - lost
    weights = {
        key: value.const_value
        for key, value in original.graph.initializers.items()
        if value.const_value is not None and value.const_value.size > 16
    }
    for key, tensor in weights.items():
        assert np.array_equal(model.graph.initializers[key].const_value.numpy(), tensor.numpy())


@pytest.mark.parametrize("name", exports(GROWING))
def test_rotations_per_layer_and_codebooks_once(name: str) -> None:
    model, plan = converted(name)
    size = plan.layers[0].head_size
    own = {key for key in model.graph.initializers if key.startswith("tq.")}
    codebooks = {f"tq.centroids.4bit_d{size}", f"tq.boundaries.4bit_d{size}"}

    assert codebooks | {"tq.rotation.0", "tq.rotation.1"} <= own
    for layer in range(2):
        array = model.graph.initializers[f"tq.rotation.{layer}"].const_value.numpy()
        assert np.array_equal(array, make_rotation("qr", size, layer, 42))
    array = model.graph.initializers[f"tq.centroids.4bit_d{size}"].const_value.numpy()
    assert np.array_equal(array, lloyd_max(4, size).centroids)


@pytest.mark.parametrize("name", exports(GROWING))
def test_types_opsets_functions_and_metadata(name: str) -> None:
    model, plan = converted(name)

    assert all(
        value.dtype is not None
        for node in model.graph
        if node.name.startswith(("layers.", "turboquant/"))
        for value in node.outputs
    )
    assert model.opset_imports[DOMAIN] == 1
    uses_microsoft = any(node.domain == "com.microsoft" for node in model.graph)
    assert ("com.microsoft" in model.opset_imports) == uses_microsoft
    assert (DOMAIN, ENCODE, "") in model.functions
    assert (DOMAIN, ATTENTION, "") in model.functions
    assert Plan.from_json(model.metadata_props["tq_onnx.plan"]) == plan
    assert model.metadata_props["tq_onnx.preset"] == "int4"
    assert "converted_from" not in model.metadata_props


@pytest.mark.parametrize("name", DECOMPOSED)
def test_a_standard_model_passes_the_checker(name: str) -> None:
    model, _ = converted(name)

    onnx.checker.check_model(ir.to_proto(model), full_check=False)


def test_a_file_that_was_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    model = load("dynamo-op18-sdpa")
    convert(model)
    data = batch(5)
    expected = Decoder(session(model)).run(data, (4, 1))
    ir.save(model, tmp_path / "model.onnx")

    again = Decoder(session(ir.load(tmp_path / "model.onnx"))).run(data, (4, 1))

    assert np.array_equal(expected, again)


def test_names_of_the_user_are_never_taken() -> None:
    model = load("dynamo-op18-sdpa")
    taken = ["layers.0.attention/TurboQuantEncode_key", "turboquant/past_length/output_0"]
    nodes = [node for node in model.graph if node.op_type == "Sigmoid"]
    for node, name in zip(nodes, taken, strict=True):
        node.name = name
        node.outputs[0].name = name
    convert(model)

    names = [value.name for node in model.graph for value in node.outputs if value.name]
    names += list(model.graph.initializers)
    assert len(set(names)) == len(names)
    session(model)


def test_layers_with_and_without_a_mask_share_one_body() -> None:
    model = decoder(mask=ADDITIVE)
    last = of_type(model, "Softmax")[-1]
    add = last.inputs[0].producer()
    last.replace_input_with(0, add.inputs[0])
    plan = convert(model)

    attentions = Attention.nodes(model.graph)
    assert [len(node.inputs) for node in attentions] == [9, 9]
    assert Attention.attention_bias.of(attentions[1]).shape == ir.Shape([1, 1, 1, 1])
    assert all(layer.has_bias for layer in plan.layers)
    session(model)


def test_growing_models_take_positions_from_their_caches() -> None:
    model = decoder(mask=UNMASKED)
    plan = convert(model)

    assert not plan.fixed_capacity
    assert plan.layers[0].has_bias is False
    shapes = [node for node in of_type(model, "Shape") if node.name.startswith("turboquant/")]
    assert [node.inputs[0].name for node in shapes] == ["past_key_values.0.key"]


def test_every_question_for_a_shape_is_answered_for_the_old_cache() -> None:
    questions = {
        "ask_past_all": "Shape(past_key_0)",
        "ask_past_some": "Shape<start = -2>(past_value_1)",
        "ask_past_row": "Shape<start = 3, end = 4>(past_value_1)",
        "ask_present_most": "Shape<start = 1>(present_value_1)",
        "ask_present_batch": "Shape<end = 1>(present_key_0)",
        "ask_heads_up": "Shape<start = 1, end = 4>(kr_0)",
        "ask_turned": "Shape<start = -2, end = -1>(kt_0)",
        "ask_wide": "Shape(ku_0)",
        "ask_repeated": "Shape<start = 1, end = 3>(ve_1)",
        "ask_heads_of_values": "Shape<start = -4, end = -2>(vr_1)",
    }
    lines = [
        f"{name}_shape = {text}\n        {name} = Identity({name}_shape)"
        for name, text in questions.items()
    ]

    def ask(mask: str) -> ir.Model:
        model = decoder(extra="\n        ".join(lines), mask=mask)
        for node in list(model.graph):
            if node.outputs[0].name in questions:
                model.graph.outputs.append(node.outputs[0])
        return model

    def answers(model: ir.Model, capacity: int = 0) -> dict[str, list[int]]:
        found = Decoder(session(model), 2, capacity)
        data = batch(5, 2)
        for feeds in data.feeds((4, 1)):
            found.feed(feeds)
        return {name: found.results[name].tolist() for name in questions}

    for mask in (ADDITIVE, UNMASKED):
        model = ask(mask)
        plan = convert(model)
        expected = answers(ask(mask))
        assert answers(model) == expected
        assert expected["ask_past_all"] == [2, 2, 4, 16]
        assert expected["ask_heads_up"] == [4, 5, 16]
        assert expected["ask_wide"] == [2, 2, 1, 5, 16]
        assert expected["ask_repeated"] == [2, 2]
        if plan.fixed_capacity:
            assert answers(model, 9) == expected


def test_a_shape_that_is_an_output_is_a_reason_to_refuse() -> None:
    model = decoder(extra="asked = Shape(past_key_0)")
    node = next(node for node in model.graph if node.outputs[0].name == "asked")
    model.graph.outputs.append(node.outputs[0])

    (miss,) = recognise(model).misses

    assert "is the shape of the cache" in miss.reason


def test_the_number_of_elements_of_a_cache_is_a_reason_to_refuse() -> None:
    model = decoder(extra="asked = Size(present_key_1)\n        told = Identity(asked)")
    node = next(node for node in model.graph if node.outputs[0].name == "told")
    model.graph.outputs.append(node.outputs[0])

    (miss,) = recognise(model).misses

    assert miss.layer == 1
    assert "Size" in miss.reason


def test_requires_a_complete_recognition_of_this_very_model() -> None:
    model, other = decoder(), decoder()
    recognition = recognise(model)
    plan = make_plan(recognition, PRESETS["int4"])

    with pytest.raises(ir.passes.PreconditionError, match="another model"):
        ConvertPass(plan, recognition)(other)
    bigger = make_plan(recognise(decoder(layers=3)), PRESETS["int4"])
    with pytest.raises(ir.passes.PreconditionError, match="plan"):
        ConvertPass(bigger, recognition)(model)

    broken = decoder(scores="s1 = Relu(s0)")
    with pytest.raises(ir.passes.PreconditionError, match="completely"):
        ConvertPass(plan, recognise(broken))(broken)
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        make_plan(recognise(broken), PRESETS["int4"])


def test_the_pass_reports_a_change_and_stays_in_place() -> None:
    model = decoder(mask=SELECTING)
    recognition = recognise(model)

    result = ConvertPass(make_plan(recognition, PRESETS["int4"]), recognition)(model)

    assert result.modified
    assert result.model is model
