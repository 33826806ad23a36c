"""Codecs, their tables and their attributes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from tests.verification.damages.editing import (
    attentions,
    attribute,
    change,
    constant,
    damage,
    encoders,
    initializer,
)
from tq_onnx.ops.operators import Attention, Encode


def table(model: onnx.ModelProto, slot: int) -> onnx.TensorProto:
    return initializer(model, encoders(model)[-1].input[slot])


def rotations(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [initializer(model, encoders(model)[at].input[Encode.rotation.slot]) for at in (0, -1)]


@damage("layer 1 key: rotation")
def transpose_rotation(model: onnx.ModelProto) -> None:
    change(rotations(model)[-1], lambda table: table.T)


@damage("layer 1 key: rotation")
def a_rotation_of_another_sign(model: onnx.ModelProto) -> None:
    """Orthogonal as before, and as good."""
    change(rotations(model)[-1], lambda table: -table)


@damage("layer 1 key: rotation")
def swapped_columns_of_a_rotation(model: onnx.ModelProto) -> None:
    change(rotations(model)[-1], lambda table: table[:, ::-1])


@damage("layer 1 value: rotation")
def a_rotation_that_is_none(model: onnx.ModelProto) -> None:
    change(rotations(model)[-1], lambda table: table + 0.05)


@damage("layer 1 key: rotation")
def a_larger_rotation(model: onnx.ModelProto) -> None:
    change(rotations(model)[-1], lambda table: table * 1.01)


@damage("layer 0 key: rotation")
def swap_rotations(model: onnx.ModelProto) -> None:
    """Those of two layers, wherever they are read."""
    first, last = rotations(model)
    theirs = numpy_helper.to_array(first).copy(), numpy_helper.to_array(last).copy()
    change(first, lambda _: theirs[1])
    change(last, lambda _: theirs[0])


@damage("layer 1 key: rotation")
def anothers_rotation(model: onnx.ModelProto) -> None:
    last, first = encoders(model)[-2:], encoders(model)[0].input[Encode.rotation.slot]
    for encoder in last:
        encoder.input[Encode.rotation.slot] = first
    for slot in (Attention.key_rotation.slot, Attention.value_rotation.slot):
        attentions(model)[-1].input[slot] = first


@damage("layer 1: attention has another value_rotation")
def anothers_rotation_where_it_is_read(model: onnx.ModelProto) -> None:
    slot = Attention.value_rotation.slot
    attentions(model)[-1].input[slot] = attentions(model)[0].input[slot]


@damage("layer 1: attention has another key_rotation")
def anothers_rotation_where_it_is_written(model: onnx.ModelProto) -> None:
    slot = Encode.rotation.slot
    encoders(model)[-2].input[slot] = encoders(model)[0].input[slot]


@damage("layer 1 key: rotation")
def rotation_without_a_column(model: onnx.ModelProto) -> None:
    change(rotations(model)[-1], lambda table: table * (np.arange(table.shape[1]) > 0))


@damage("layer 1 key: boundaries")
def shift_boundaries(model: onnx.ModelProto) -> None:
    change(table(model, Encode.boundaries.slot), lambda table: table + 0.01)


@damage("layer 1 key: boundaries")
def a_boundary_beyond_its_neighbour(model: onnx.ModelProto) -> None:
    change(
        table(model, Encode.boundaries.slot), lambda table: table[[0, 2, 1, *range(3, len(table))]]
    )


@damage("layer 0 key: centroids")
def swap_centroids(model: onnx.ModelProto) -> None:
    change(table(model, Encode.centroids.slot), lambda table: table[[1, 0, *range(2, len(table))]])


@damage("layer 0 key: centroids")
def larger_centroids(model: onnx.ModelProto) -> None:
    change(table(model, Encode.centroids.slot), lambda table: table * 1.01)


@damage("layer 1: attention has another value_centroids")
def other_centroids_where_they_are_read(model: onnx.ModelProto) -> None:
    slot = Attention.value_centroids.slot
    node = attentions(model)[-1]
    array = numpy_helper.to_array(initializer(model, node.input[slot]))
    node.input[slot] = constant(model, "damage.centroids", array * np.float32(1.02))


@damage("layer 1: the encoder of keys has norm_correction 0, not 2")
def no_norm_correction(model: onnx.ModelProto) -> None:
    attribute(encoders(model)[-2], "norm_correction").i = 0


@damage("layers.1")
def fewer_bits_for_keys(model: onnx.ModelProto) -> None:
    attribute(encoders(model)[-2], "bits").i = 3


@damage("layers.1")
def another_codec_for_values(model: onnx.ModelProto) -> None:
    attribute(encoders(model)[-1], "codec").s = b"uniform"


@damage("layers.1")
def another_codec_where_values_are_read(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "value_codec").s = b"uniform"
