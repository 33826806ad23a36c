"""The rest of the graph: positions, residuals, activations, logits."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tests.verification.damages.editing import (
    NothingToDamageError,
    attribute,
    before,
    behind_logits,
    change,
    constant,
    damage,
    element,
    gathered,
    integer,
    node_of,
    number,
    plan_of,
    reader_of,
    through_half,
    vocabulary,
)

_WINDOW = 6
"""Tokens that Gemma's even layers see, in the fixtures."""


def positions(model: onnx.ModelProto, op: str, value: int) -> None:
    """Change them where rotary embeddings take them."""
    name, operand = plan_of(model).interface.position_ids, integer(model, value)
    rotary = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    if name is None:
        for node in rotary:
            before(model, node, 1, op, operand)
        if not rotary:
            raise NothingToDamageError
        return
    model.graph.node.insert(0, node_of(op, [name, operand], "damage.ids"))
    for node in list(model.graph.node)[1:]:
        node.input[:] = ["damage.ids" if read == name else read for read in node.input]


@damage("layer 0")
def shift_positions(model: onnx.ModelProto) -> None:
    """Rotary embeddings make no difference of it in any logit, only in the keys."""
    positions(model, "Add", 1)


@damage("damage.")
def positions_with_an_end(model: onnx.ModelProto) -> None:
    """One that the text does not reach."""
    positions(model, "Min", 60)


@damage("layer 0")
def tokens_of_one_less(model: onnx.ModelProto) -> None:
    node, _ = reader_of(model, embeddings(model))
    before(model, node, 1, "Sub", integer(model, 1))
    before(model, node, 1, "Max", integer(model, 0))


def embeddings(model: onnx.ModelProto) -> str:
    return next(t.name for t in model.graph.initializer if "embed" in t.name and len(t.dims) == 2)


@damage("reads damage.")
def tokens_with_an_end(model: onnx.ModelProto) -> None:
    """All tokens of the text are below it."""
    node, _ = reader_of(model, embeddings(model))
    before(model, node, 1, "Min", integer(model, 60))


def last(model: onnx.ModelProto, *ops: str) -> onnx.NodeProto:
    return next(node for node in reversed(model.graph.node) if node.op_type in ops)


@damage("logits")
def no_last_residual(model: onnx.ModelProto) -> None:
    """What the layers before the last projection gave."""
    names = ("SkipSimplifiedLayerNormalization", "Add")
    adds = [
        node
        for node in model.graph.node
        if node.op_type in names and any("linear" in i or "down" in i for i in node.input)
    ]
    before(model, adds[-1], 0, "Sub", adds[-1].input[0])


@damage("logits")
def another_activation(model: onnx.ModelProto) -> None:
    last(model, "Sigmoid").op_type = "Tanh"


@damage("logits")
def subtract_in_the_place_of_multiply(model: onnx.ModelProto) -> None:
    last(model, "Mul").op_type = "Sub"


@damage("reads damage.")
def hidden_states_in_half_precision(model: onnx.ModelProto) -> None:
    through_half(model, last(model, "Sigmoid"), 0)


@damage("logits")
def roll_vocabulary(model: onnx.ModelProto) -> None:
    order = constant(model, "damage.order", gathered(vocabulary(model)))
    behind_logits(model, "Gather", order, axis=2)


@damage("logits")
def swap_two_tokens(model: onnx.ModelProto) -> None:
    order = np.arange(vocabulary(model))
    order[[-1, -2]] = order[[-2, -1]]
    behind_logits(model, "Gather", constant(model, "damage.order", order), axis=2)


@damage("logits")
def louder_logits(model: onnx.ModelProto) -> None:
    behind_logits(model, "Mul", number(model, 1.5))


@damage("logits")
def shifted_logits(model: onnx.ModelProto) -> None:
    """No probability changes."""
    behind_logits(model, "Add", number(model, 1.0))


@damage("logits")
def add_to_logits(model: onnx.ModelProto) -> None:
    draws = np.random.default_rng(0).standard_normal(vocabulary(model)) * 0.01
    behind_logits(model, "Add", constant(model, "damage.noise", draws.astype(element(model))))


@damage("logits")
def logits_in_half_precision(model: onnx.ModelProto) -> None:
    behind_logits(model, "Cast", to=TensorProto.FLOAT16)
    behind_logits(model, "Cast", to=TensorProto.FLOAT)


@damage("is Min, not MatMul")
def capped_logits(model: onnx.ModelProto) -> None:
    behind_logits(model, "Min", number(model, 1e4))


@damage("logits")
def a_token_that_never_comes(model: onnx.ModelProto) -> None:
    row = np.zeros(vocabulary(model), element(model))
    row[-1] = -np.inf
    behind_logits(model, "Add", constant(model, "damage.row", row))


@damage("logits")
def logits_of_the_last_token_only(model: onnx.ModelProto) -> None:
    operands = [constant(model, f"damage.{at}", np.array([at], np.int64)) for at in (-1, 1 << 40)]
    behind_logits(model, "Slice", *operands, constant(model, "damage.axis", np.array([1])))


@damage("logits")
def logits_of_the_token_before(model: onnx.ModelProto) -> None:
    """The first of all calls: what was asked for in its place."""
    one, end = (constant(model, f"damage.{at}", np.array([at], np.int64)) for at in (0, 1))
    axis = constant(model, "damage.axis", np.array([1]))
    behind_logits(model, "Slice", one, end, axis)


def a_shorter_window(model: onnx.ModelProto) -> None:
    """Gemma's window is in the mask that the graph makes."""
    tensor = next(
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.INT64
        and abs(numpy_helper.to_array(tensor)).tolist() in (_WINDOW, [_WINDOW])
    )
    change(tensor, lambda array: array - np.sign(array))


@damage("other attributes")
def another_permutation(model: onnx.ModelProto) -> None:
    """In front of the result of attention."""
    transposes = [node for node in model.graph.node if node.op_type == "Transpose"]
    attribute(transposes[-1], "perm").ints[:] = [0, 2, 3, 1]
