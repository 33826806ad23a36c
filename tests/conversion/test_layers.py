"""The operators of a layer are found by its caches, and their inputs by their names."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from tests.decoders.running import convert, load
from tests.decoders.synthetic import SLIDING_CACHE, SLIDING_MASK, SLIDING_REPEAT, decoder
from tq_onnx.conversion.layers import SHARED, ConvertedLayer, converted_layers, shares_length
from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

PLAIN = "dynamo-op18-sdpa"


def found(name: str = PLAIN) -> tuple[ir.Model, Plan, tuple[ConvertedLayer, ...]]:
    model = load(name)
    plan = convert(model, "int4")
    return model, plan, converted_layers(model, plan)


@pytest.mark.parametrize("name", [PLAIN, "genai-cpu-fp32", "hf-prefill", "mobius-static"])
def test_the_nodes_of_every_layer_are_found(name: str) -> None:
    model, plan, layers = found(name)
    assert [layer.plan for layer in layers] == list(plan.layers)
    assert [layer.attention.node for layer in layers] == Attention.nodes(model.graph)
    assert {e.node for layer in layers for e in layer.encoders} == {*Encode.nodes(model.graph)}
    for layer in layers:
        assert layer.operators == (*layer.encoders, layer.attention)
        assert not layer.is_shortened
        assert layer.attention.key_cache is layer.key.output
        assert layer.attention.value_cache is layer.value.output
        for encoder in layer.encoders:
            assert encoder.cache.present == encoder.output.name
            assert encoder.codec == plan.layers[0].key.codec and encoder.cache.row_bytes
            for its, theirs in SHARED[encoder.role].items():
                if its is not Encode.past_length or not plan.interface.static:
                    assert its.of(encoder.node) is theirs.of(layer.attention.node)
            assert shares_length(encoder, layer.attention, plan)
            strange = encoder.past_length
            encoder.past_length = encoder.past
            assert not shares_length(encoder, layer.attention, plan)
            encoder.past_length = strange
        assert (layer.attention.bias is not None) == layer.plan.has_bias
        assert layer.attention.sink is None and layer.key.offset is None


def test_a_cache_that_is_shortened_belongs_to_its_encoder() -> None:
    model = decoder(cache=SLIDING_CACHE, repeat=SLIDING_REPEAT, mask=SLIDING_MASK, infer=False)
    plan = convert(model, "int4")
    for layer in converted_layers(model, plan):
        assert layer.is_shortened
        assert layer.key.output.name != layer.plan.key.present


def test_inputs_are_replaced_by_name() -> None:
    model, plan, (layer, _) = found()
    bias, count = layer.attention.bias, len(layer.attention.node.inputs)
    assert bias is not None
    layer.attention.bias = None
    assert layer.attention.bias is None
    assert len(layer.attention.node.inputs) == count - 1
    layer.attention.sink = bias
    assert layer.attention.bias is None
    assert Attention.head_sink.of(layer.attention.node) is bias
    layer.key.past_length = layer.value.vectors
    assert Encode.past_length.of(layer.key.node) is layer.value.vectors
    assert converted_layers(model, plan)[0].attention.sink is bias


def lost_encoder(layers: tuple[ConvertedLayer, ...]) -> None:
    layers[1].value.node.op_type = "Other"


def lost_attention(layers: tuple[ConvertedLayer, ...]) -> None:
    layers[1].attention.node.domain = "other"


def crossed_caches(layers: tuple[ConvertedLayer, ...]) -> None:
    Attention.value_cache.replace(layers[1].attention.node, layers[0].value.output)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lost_encoder, r"layer 1 .*present\.1\.value is not made by TurboQuantEncode"),
        (lost_attention, "layer 1 .*0 attentions read the caches"),
        (crossed_caches, "layer 1 .*0 attentions read the caches"),
    ],
)
def test_a_model_without_the_nodes_of_its_plan_is_refused(
    damage: Callable[[tuple[ConvertedLayer, ...]], None], text: str
) -> None:
    model, plan, layers = found()
    damage(layers)
    with pytest.raises(UnsupportedModelError, match=f"^a file: {text}"), located("a file"):
        converted_layers(model, plan)


def test_a_node_without_a_required_input_is_refused() -> None:
    _, _, (layer, _) = found()
    layer.key.node.replace_input_with(Encode.rotation.slot, None)
    with pytest.raises(UnsupportedModelError, match="TurboQuantEncode has no input rotation"):
        _ = layer.key.rotation
