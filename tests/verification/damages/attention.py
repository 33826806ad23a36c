"""Attention: scale, mask, heads, and vectors on their way in and out."""

from __future__ import annotations

import numpy as np
import onnx

from tests.verification.damages.editing import (
    NothingToDamageError,
    attentions,
    attribute,
    before,
    constant,
    damage,
    element,
    encoders,
    gathered,
    number,
    plan_of,
    reader_of,
    set_last_layer,
    sort,
    through_half,
)
from tq_onnx.ops.operators import Attention, Encode

QUERY, VECTORS = Attention.query.slot, Encode.vectors.slot
BIAS = Attention.attention_bias.slot


def no_bias(model: onnx.ModelProto) -> str:
    return constant(model, "damage.bias", np.zeros((1, 1, 1, 1), element(model)))


def bias_of(model: onnx.ModelProto) -> onnx.NodeProto:
    node = attentions(model)[-1]
    if len(node.input) <= BIAS or not node.input[BIAS] or node.input[BIAS].startswith("tq."):
        raise NothingToDamageError
    return node


@damage("layer 1: attention has scale")
def larger_scale(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "scale").f *= 1.1


@damage("layer 1: scale")
def larger_scale_in_the_plan_too(model: onnx.ModelProto) -> None:
    larger_scale(model)
    set_last_layer(model, scale=plan_of(model).layers[-1].scale * 1.1)


@damage("layer 1: sliding_window")
def a_window(model: onnx.ModelProto) -> None:
    """One that no text of the test is long enough to show."""
    attribute(attentions(model)[-1], "sliding_window").i = 4095
    set_last_layer(model, sliding_window=4095)


@damage("layer 1")
def a_narrow_window(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "sliding_window").i = 4


@damage("layer 1")
def a_softcap(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "softcap").f = 30.0


@damage("layer 1")
def see_the_future(model: onnx.ModelProto) -> None:
    node = attentions(model)[-1]
    attribute(node, "causal").i = 0
    if len(node.input) > BIAS and node.input[BIAS]:
        node.input[BIAS] = no_bias(model)


@damage("layer 1")
def another_causality(model: onnx.ModelProto) -> None:
    """Where the mask hides the future too, no number of a single sequence changes."""
    causal = attribute(attentions(model)[-1], "causal")
    causal.i = 1 - causal.i


@damage("layers.1.attention")
def drop_bias(model: onnx.ModelProto) -> None:
    bias_of(model).input[BIAS] = no_bias(model)


@damage("TurboQuantDequantAttention reads")
def another_bias(model: onnx.ModelProto) -> None:
    """All keys alike, which no softmax shows."""
    before(model, bias_of(model), BIAS, "Add", number(model, 1.0))


@damage("TurboQuantDequantAttention reads")
def a_fainter_bias(model: onnx.ModelProto) -> None:
    """Of what hides, half of it still does."""
    before(model, bias_of(model), BIAS, "Mul", number(model, 0.5))


@damage("layer 1, queries")
def rotate_query_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].num_heads))
    before(model, attentions(model)[-1], QUERY, "Gather", heads, axis=1)


@damage("layer 1, keys")
def swap_kv_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].kv_num_heads))
    for encoder in encoders(model)[-2:]:
        before(model, encoder, VECTORS, "Gather", heads, axis=1)


@damage("logits")
def rotate_result_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].num_heads))
    reader = reader_of(model, attentions(model)[-1].output[0])
    before(model, *reader, "Gather", heads, axis=1)


@damage("layer 1, keys")
def swap_keys_and_values(model: onnx.ModelProto) -> None:
    key, value = encoders(model)[-2:]
    if list(model.graph.node).index(key) > list(model.graph.node).index(value):
        key, value = value, key
    key.input[VECTORS], value.input[VECTORS] = value.input[VECTORS], key.input[VECTORS]
    sort(model)


@damage("layer 1, values")
def double_the_values(model: onnx.ModelProto) -> None:
    encoder = encoders(model)[-1]
    before(model, encoder, VECTORS, "Add", encoder.input[VECTORS])


@damage("layer 1")
def mirror_the_keys(model: onnx.ModelProto) -> None:
    """The wrong half in a rotary embedding has the other sign."""
    before(model, encoders(model)[-2], VECTORS, "Neg")


@damage("layer 1, queries")
def slightly_larger_queries(model: onnx.ModelProto) -> None:
    before(model, attentions(model)[-1], QUERY, "Mul", number(model, 1.001))


@damage("layer 1, queries")
def queries_of_the_layer_before(model: onnx.ModelProto) -> None:
    first, *_, last = attentions(model)
    last.input[QUERY] = first.input[QUERY]


@damage("reads damage.")
def queries_in_half_precision(model: onnx.ModelProto) -> None:
    through_half(model, attentions(model)[-1], QUERY)


@damage("reads damage.")
def keys_in_half_precision(model: onnx.ModelProto) -> None:
    through_half(model, encoders(model)[-2], VECTORS)


@damage("reads damage.")
def results_in_half_precision(model: onnx.ModelProto) -> None:
    through_half(model, *reader_of(model, attentions(model)[-1].output[0]))


@damage("reads damage.")
def keys_without_outliers(model: onnx.ModelProto) -> None:
    """A limit that no key of the text reaches."""
    limit = number(model, 1000.0)
    before(model, encoders(model)[-2], VECTORS, "Min", limit)
