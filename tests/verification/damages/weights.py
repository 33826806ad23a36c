"""Weights: every kind of projection, norms, embeddings."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tests.verification.damages.editing import (
    NothingToDamageError,
    attribute,
    change,
    damage,
    matrices,
    norm,
)

HEAD, DOWN, UP, GATE, OUT, VALUES, KEYS, QUERIES = range(-1, -9, -1)
"""Projections from the end of the graph; where one weight makes all three, others come in."""
HOLDS = "holds other numbers"


def noisy(weight: np.ndarray, part: float) -> np.ndarray:
    draws = np.random.default_rng(0).standard_normal(weight.shape)
    return weight + part * weight.std() * draws


def embedding(model: onnx.ModelProto) -> TensorProto:
    return next(t for t in model.graph.initializer if "embed" in t.name and len(t.dims) == 2)


def named(model: onnx.ModelProto, part: str) -> TensorProto:
    return next(t for t in reversed(model.graph.initializer) if part in t.name)


@damage(HOLDS)
def noise_in_the_head(model: onnx.ModelProto) -> None:
    change(matrices(model)[HEAD], lambda w: noisy(w, 0.01))


@damage("logits")
def a_larger_head(model: onnx.ModelProto) -> None:
    change(matrices(model)[HEAD], lambda w: w * 1.2)


@damage(HOLDS)
def half_a_weight_zero(model: onnx.ModelProto) -> None:
    change(matrices(model)[DOWN], lambda w: np.where(np.arange(len(w))[:, None] % 2, w, 0))


@damage(HOLDS)
def a_weight_that_is_no_number(model: onnx.ModelProto) -> None:
    change(matrices(model)[DOWN], lambda w: np.where(np.arange(w.size).reshape(w.shape), w, np.nan))


@damage(HOLDS)
def a_slightly_larger_weight(model: onnx.ModelProto) -> None:
    change(matrices(model)[UP], lambda w: w * 1.001)


@damage(HOLDS)
def a_column_of_another_sign(model: onnx.ModelProto) -> None:
    change(matrices(model)[GATE], lambda w: np.where(np.arange(w.shape[1]) == 1, -w, w))


@damage(HOLDS)
def shuffled_outputs_of_heads(model: onnx.ModelProto) -> None:
    change(matrices(model)[OUT], lambda w: np.roll(w, 1, axis=0))


@damage("layer 1")
def shuffled_values(model: onnx.ModelProto) -> None:
    change(matrices(model)[VALUES], lambda w: np.roll(w, 1, axis=1))


@damage(HOLDS)
def noise_in_keys(model: onnx.ModelProto) -> None:
    change(matrices(model)[KEYS], lambda w: noisy(w, 0.01))


@damage(HOLDS)
def larger_queries(model: onnx.ModelProto) -> None:
    change(matrices(model)[QUERIES], lambda w: w * 1.02)


@damage("layer 0")
def reverse_a_weight(model: onnx.ModelProto) -> None:
    change(matrices(model)[0], lambda w: w[::-1])


@damage("layer 0")
def much_noise(model: onnx.ModelProto) -> None:
    change(matrices(model)[0], lambda w: noisy(w, 0.3))


@damage(HOLDS)
def one_bit(model: onnx.ModelProto) -> None:
    """The smallest damage that there is."""

    def flip(weight: np.ndarray) -> np.ndarray:
        weight.reshape(-1).view(np.uint8)[0] ^= 1
        return weight

    change(matrices(model)[1], flip)


@damage(HOLDS)
def weights_of_another_layer(model: onnx.ModelProto) -> None:
    last = matrices(model)[DOWN]
    first = next(one for one in matrices(model) if one.dims == last.dims)
    theirs = numpy_helper.to_array(first).copy(), numpy_helper.to_array(last).copy()
    change(first, lambda _: theirs[1])
    change(last, lambda _: theirs[0])


@damage("layer 1, queries")
def louder_query_norm(model: onnx.ModelProto) -> None:
    change(norm(model, "q"), lambda w: np.where(np.arange(len(w)) % 3, w, w * 1.4))


@damage("layer 1, keys")
def half_a_key_norm(model: onnx.ModelProto) -> None:
    change(norm(model, "k"), lambda w: np.where(np.arange(len(w)) % 2, w, 3 * w))


@damage(HOLDS)
def quieter_input_norm(model: onnx.ModelProto) -> None:
    change(named(model, ".1.input_layernorm"), lambda w: w * 0.99)


@damage(HOLDS)
def a_channel_without_a_norm(model: onnx.ModelProto) -> None:
    change(named(model, ".1.post_attention"), lambda w: np.where(np.arange(len(w)), w, 0))


@damage("logits")
def no_last_norm(model: onnx.ModelProto) -> None:
    tensor = next(
        t for t in reversed(model.graph.initializer) if "norm" in t.name and t.name[:3] != "tq."
    )
    change(tensor, np.ones_like)


@damage("layer 0")
def another_epsilon(model: onnx.ModelProto) -> None:
    tensor = next((t for t in model.graph.initializer if 0 < float(np.abs(scalar(t))) < 1e-4), None)
    node = next(
        (node for node in model.graph.node if any(a.name == "epsilon" for a in node.attribute)),
        None,
    )
    if node is not None:
        attribute(node, "epsilon").f = 0.1
    elif tensor is not None:
        change(tensor, lambda _: np.full(_.shape, 0.1))
    else:
        raise NothingToDamageError


def scalar(tensor: TensorProto) -> float:
    array = numpy_helper.to_array(tensor)
    return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind == "f" else 0.0


@damage(HOLDS)
def an_unused_embedding(model: onnx.ModelProto) -> None:
    """One row of a token that the text has not."""
    change(embedding(model), lambda w: np.concatenate([w[:-1], w[:1]]))


@damage(HOLDS)
def noise_in_embeddings(model: onnx.ModelProto) -> None:
    change(embedding(model), lambda w: noisy(w, 0.01))


@damage("layer 0")
def rolled_embeddings(model: onnx.ModelProto) -> None:
    change(embedding(model), lambda w: np.roll(w, 1, axis=0))


@damage(HOLDS)
def other_angles(model: onnx.ModelProto) -> None:
    """Those of positions that the text does not reach, where there is a table."""
    tensor = next(t for t in model.graph.initializer if "inv_freq" in t.name or "cos_c" in t.name)
    change(
        tensor, lambda w: np.where(np.arange(len(w)).reshape(-1, *[1] * (w.ndim - 1)) > 20, -w, w)
    )
