"""Scales and offsets, which a calibration adds."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto
from onnx.numpy_helper import to_array

from tests.verification.damages.editing import (
    OF_CALIBRATION,
    attentions,
    change,
    damage,
    encoders,
    initializer,
    integer,
)
from tq_onnx.ops.operators import Attention, Encode

OFFSETS = "layer 1: scales or offsets"


def offset_of(model: onnx.ModelProto) -> TensorProto:
    return initializer(model, encoders(model)[-2].input[Encode.offset.slot])


@damage(OFFSETS, OF_CALIBRATION)
def shift_offsets(model: onnx.ModelProto) -> None:
    """Taken from the keys and given back, so that nothing but their codes changes."""
    change(offset_of(model), lambda table: table + 0.1)


@damage(OFFSETS, OF_CALIBRATION)
def larger_offsets(model: onnx.ModelProto) -> None:
    change(offset_of(model), lambda table: table * 1.01)


@damage(OFFSETS, OF_CALIBRATION)
def offsets_of_another_token(model: onnx.ModelProto) -> None:
    change(offset_of(model), lambda table: table[::-1])


@damage(OFFSETS, OF_CALIBRATION)
def mean_of_another_layer(model: onnx.ModelProto) -> None:
    """Taken from the keys and given back; so are the following ones."""
    other = to_array(initializer(model, "tq.key_offset.0"))
    change(offset_of(model), lambda table: other)


@damage(OFFSETS, OF_CALIBRATION)
def angles_of_another_theta(model: onnx.ModelProto) -> None:
    change(initializer(model, "tq.key_frequencies.1"), lambda table: table**1.01)


@damage(OFFSETS, OF_CALIBRATION)
def mean_of_the_next_position(model: onnx.ModelProto) -> None:
    angles = to_array(initializer(model, "tq.key_frequencies.1"))

    def turn(table: np.ndarray) -> np.ndarray:
        cosines, sines = np.cos(angles), np.sin(angles)
        turned = table[0] * cosines + table[1] * sines, table[1] * cosines - table[0] * sines
        return np.concatenate([turned, table[2:]])

    change(offset_of(model), turn)


@damage(OFFSETS, OF_CALIBRATION)
def conjugate_mean(model: onnx.ModelProto) -> None:
    """It turns the other way."""

    def turn(table: np.ndarray) -> np.ndarray:
        return np.concatenate([table[:1], -table[1:2], table[2:]])

    change(offset_of(model), turn)


@damage(OFFSETS, OF_CALIBRATION)
def first_means_one_later(model: onnx.ModelProto) -> None:
    change(offset_of(model), lambda table: np.concatenate([table[:2], table[-1:], table[2:-1]]))


@damage("layer 1: attention has another key_frequencies", OF_CALIBRATION)
def angles_where_they_are_read(model: onnx.ModelProto) -> None:
    slot = Attention.key_frequencies.slot
    attentions(model)[-1].input[slot] = attentions(model)[0].input[slot]


@damage("layer 1: attention has another left_padding", OF_CALIBRATION)
def padding_taken_from_positions(model: onnx.ModelProto) -> None:
    """Where the keys are encoded, and not where they are read."""
    encoders(model)[-2].input[Encode.left_padding.slot] = integer(model, 1)


@damage(OFFSETS, OF_CALIBRATION)
def swap_offsets(model: onnx.ModelProto) -> None:
    """Those of keys and values, wherever they are read."""
    slot = Encode.offset.slot
    key, value = encoders(model)[-2:]
    key.input[slot], value.input[slot] = value.input[slot], key.input[slot]
    node = attentions(model)[-1]
    slots = Attention.key_offset.slot, Attention.value_offset.slot
    node.input[slots[0]], node.input[slots[1]] = node.input[slots[1]], node.input[slots[0]]


@damage("layer 1", OF_CALIBRATION)
def larger_query_scale(model: onnx.ModelProto) -> None:
    last = len(attentions(model)) - 1
    change(initializer(model, f"tq.query_scale.{last}"), lambda table: table * 1.1)


@damage("layer 1: attention has another key_offset", OF_CALIBRATION)
def offset_where_it_is_read(model: onnx.ModelProto) -> None:
    slot = Attention.key_offset.slot
    attentions(model)[-1].input[slot] = attentions(model)[0].input[slot]
