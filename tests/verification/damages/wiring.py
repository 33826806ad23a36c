"""Caches and lengths: who reads and writes what."""

from __future__ import annotations

import onnx

from tests.verification.damages.editing import attentions, before, damage, encoders, integer, sort
from tq_onnx.ops.operators import Attention, Encode

PAST, LENGTH = Encode.past.slot, Encode.past_length.slot
READ_LENGTH = Attention.past_length.slot


@damage("layer 0: the encoder of keys has the cache")
def cross_caches(model: onnx.ModelProto) -> None:
    first, last = encoders(model)[0], encoders(model)[-2]
    first.input[PAST], last.input[PAST] = last.input[PAST], first.input[PAST]


@damage("layer 1: the encoder of keys has the cache")
def cross_keys_and_values(model: onnx.ModelProto) -> None:
    """The caches of one layer."""
    key, value = encoders(model)[-2:]
    key.input[PAST], value.input[PAST] = value.input[PAST], key.input[PAST]


@damage("layer 1: the encoder of values has the cache")
def a_cache_that_two_write(model: onnx.ModelProto) -> None:
    key, value = encoders(model)[-2:]
    value.input[PAST] = key.input[PAST]


@damage("layer 0")
def cross_results(model: onnx.ModelProto) -> None:
    """Each layer's keys leave by the other's name."""
    first, last = encoders(model)[0].output[0], encoders(model)[-2].output[0]
    names = {first: last, last: first}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


@damage("2 attentions read the caches")
def read_the_caches_of_the_layer_before(model: onnx.ModelProto) -> None:
    first, *_, last = attentions(model)
    for slot in (Attention.key_cache.slot, Attention.value_cache.slot):
        last.input[slot] = first.input[slot]


@damage("layer 1")
def read_keys_as_values(model: onnx.ModelProto) -> None:
    node = attentions(model)[-1]
    key, value = Attention.key_cache.slot, Attention.value_cache.slot
    node.input[key], node.input[value] = node.input[value], node.input[key]


@damage("present.1.key")
def past_length_of_zero(model: onnx.ModelProto) -> None:
    zero = integer(model, 0)
    for node in encoders(model)[-2:]:
        node.input[LENGTH] = zero
    attentions(model)[-1].input[READ_LENGTH] = zero


@damage("layer")
def past_length_of_one_less(model: onnx.ModelProto) -> None:
    before(model, attentions(model)[-1], READ_LENGTH, "Sub", integer(model, 1))


@damage("layer")
def past_length_of_one_more(model: onnx.ModelProto) -> None:
    before(model, attentions(model)[-1], READ_LENGTH, "Add", integer(model, 1))


@damage("layer")
def one_row_later(model: onnx.ModelProto) -> None:
    for node in encoders(model)[-2:]:
        before(model, node, LENGTH, "Add", integer(model, 1))


@damage("layers.1.attention")
def values_over_the_first_rows(model: onnx.ModelProto) -> None:
    encoders(model)[-1].input[LENGTH] = integer(model, 0)


@damage("reads damage.")
def a_length_with_an_end(model: onnx.ModelProto) -> None:
    """One that the text does not reach."""
    most = integer(model, 4095)
    before(model, encoders(model)[-2], LENGTH, "Min", most)
    limited = encoders(model)[-2].input[LENGTH]
    encoders(model)[-1].input[LENGTH] = limited
    attentions(model)[-1].input[READ_LENGTH] = limited
    sort(model)
