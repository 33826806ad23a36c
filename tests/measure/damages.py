"""Damages to converted models, each of which ``verify`` must find.

A damage changes a model. It raises ``NothingToDamageError`` where the model has no such part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import METADATA_DIGEST, METADATA_PLAN, Plan

_WINDOW = 6
"""Tokens that Gemma's even layers see, in the fixtures."""

Damage = Callable[[onnx.ModelProto], None]


class NothingToDamageError(Exception):
    """The model has no part that could be damaged so."""


def encoders(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Keys and values of the layers alternate."""
    return [node for node in model.graph.node if node.op_type == Encode.name]


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == Attention.name]


def initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def change(tensor: TensorProto, by: Callable[[np.ndarray], np.ndarray]) -> None:
    array = numpy_helper.to_array(tensor)
    made = np.ascontiguousarray(by(array.copy())).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(entry for entry in node.attribute if entry.name == name)


def plan_of(model: onnx.ModelProto) -> Plan:
    (entry,) = (entry for entry in model.metadata_props if entry.key == METADATA_PLAN)
    return Plan.from_json(entry.value)


def set_metadata(model: onnx.ModelProto, key: str, value: str) -> None:
    (entry,) = (entry for entry in model.metadata_props if entry.key == key)
    entry.value = value


def constant(model: onnx.ModelProto, name: str, array: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def node_of(op: str, inputs: list[str], output: str, axis: int | None = None) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type=op, input=inputs, output=[output], name=f"{output}.{op}")
    if axis is not None:
        node.attribute.add(name="axis", type=onnx.AttributeProto.INT, i=axis)
    return node


def before(
    model: onnx.ModelProto,
    reader: onnx.NodeProto,
    slot: int,
    op: str,
    *operands: str,
    axis: int | None = None,
) -> None:
    """Put a node between an input of a node and what it read."""
    made = node_of(op, [reader.input[slot], *operands], f"damage.{reader.name}.{slot}", axis)
    reader.input[slot] = made.output[0]
    model.graph.node.insert(list(model.graph.node).index(reader), made)


def behind_logits(model: onnx.ModelProto, op: str, *operands: str, axis: int | None = None) -> None:
    logits = plan_of(model).interface.logits
    for node in model.graph.node:
        node.output[:] = ["damage.logits" if name == logits else name for name in node.output]
        node.input[:] = ["damage.logits" if name == logits else name for name in node.input]
    model.graph.node.append(node_of(op, ["damage.logits", *operands], logits, axis))


def vocabulary(model: onnx.ModelProto) -> int:
    logits = plan_of(model).interface.logits
    (value,) = (value for value in model.graph.output if value.name == logits)
    return value.type.tensor_type.shape.dim[2].dim_value


def gathered(count: int, by: int = 1) -> np.ndarray:
    return np.roll(np.arange(count, dtype=np.int64), by)


def matrices(model: onnx.ModelProto) -> list[TensorProto]:
    """Weights of the projections, in the order of the graph."""
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    return [
        known[node.input[1]]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in known
    ]


def norm(model: onnx.ModelProto, role: str) -> TensorProto:
    """The norm weight of queries or keys in the last layer."""
    last = len(attentions(model)) - 1
    for tensor in model.graph.initializer:
        name = tensor.name
        if name == f"tq.{role}_norm.{last}" or (f".{last}." in name and f"{role}_norm" in name):
            return tensor
    raise NothingToDamageError


# the findings


def roll_vocabulary(model: onnx.ModelProto) -> None:
    order = constant(model, "damage.order", gathered(vocabulary(model)))
    behind_logits(model, "Gather", order, axis=2)


def swap_keys_and_values(model: onnx.ModelProto) -> None:
    key, value = encoders(model)[-2:]
    if list(model.graph.node).index(key) > list(model.graph.node).index(value):
        key, value = value, key
    vectors = Encode.vectors.slot
    key.input[vectors], value.input[vectors] = value.input[vectors], key.input[vectors]
    sort(model)


def sort(model: onnx.ModelProto) -> None:
    """Put the nodes in an order in which what is read was made before."""
    pending, nodes = list(model.graph.node), []
    made = {"", *(value.name for value in model.graph.input)}
    made |= {tensor.name for tensor in model.graph.initializer}
    outer = {name for node in pending for name in node.output}
    while pending:
        ready = [
            node
            for node in pending
            if all(name in made for name in node.input) and inner(node) & outer <= made
        ]
        assert ready
        for node in ready:
            made.update(node.output)
        nodes += ready
        pending = [node for node in pending if not any(node is one for one in ready)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def inner(node: onnx.NodeProto) -> set[str]:
    return {
        name
        for entry in node.attribute
        if entry.HasField("g")
        for one in entry.g.node
        for name in (*one.input, *inner(one))
    }


def rotate_query_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].num_heads))
    before(model, attentions(model)[-1], Attention.query.slot, "Gather", heads, axis=1)


def swap_kv_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].kv_num_heads))
    for encoder in encoders(model)[-2:]:
        before(model, encoder, Encode.vectors.slot, "Gather", heads, axis=1)


def louder_logits(model: onnx.ModelProto) -> None:
    dtype = ir.DataType[plan_of(model).layers[-1].dtype].numpy()
    behind_logits(model, "Mul", constant(model, "damage.factor", np.array(1.5, dtype)))


def half_a_weight_zero(model: onnx.ModelProto) -> None:
    change(matrices(model)[-2], lambda w: np.where(np.arange(len(w))[:, None] % 2, w, 0))


def see_the_future(model: onnx.ModelProto) -> None:
    node, slot = attentions(model)[-1], Attention.attention_bias.slot
    attribute(node, "causal").i = 0
    if slot < len(node.input) and node.input[slot]:
        node.input[slot] = no_bias(model)


def no_bias(model: onnx.ModelProto) -> str:
    dtype = ir.DataType[plan_of(model).layers[-1].dtype].numpy()
    return constant(model, "damage.bias", np.zeros((1, 1, 1, 1), dtype))


def drop_bias(model: onnx.ModelProto) -> None:
    node, slot = attentions(model)[-1], Attention.attention_bias.slot
    if slot >= len(node.input) or not node.input[slot] or node.input[slot].startswith("tq."):
        raise NothingToDamageError
    node.input[slot] = no_bias(model)


def louder_query_norm(model: onnx.ModelProto) -> None:
    change(norm(model, "q"), lambda w: w * 1.4)


def half_a_key_norm(model: onnx.ModelProto) -> None:
    change(norm(model, "k"), lambda w: np.where(np.arange(len(w)) % 2, w, 3 * w))


def a_larger_weight(model: onnx.ModelProto) -> None:
    change(matrices(model)[-1], lambda w: w * 1.2)


def a_noisy_weight(model: onnx.ModelProto) -> None:
    draws = np.random.default_rng(0)
    change(matrices(model)[2], lambda w: w + 0.3 * w.std() * draws.standard_normal(w.shape))


def no_norm_correction(model: onnx.ModelProto) -> None:
    attribute(encoders(model)[-2], "norm_correction").i = 0


def other_layout(model: onnx.ModelProto) -> None:
    plan = replace(plan_of(model), layout_digest="0" * len(plan_of(model).layout_digest))
    set_metadata(model, METADATA_PLAN, plan.to_json())
    set_metadata(model, METADATA_DIGEST, plan.layout_digest)


def other_digest(model: onnx.ModelProto) -> None:
    set_metadata(model, METADATA_DIGEST, "0" * 16)


# codecs and tables


def transpose_rotation(model: onnx.ModelProto) -> None:
    name = encoders(model)[-1].input[Encode.rotation.slot]
    change(initializer(model, name), lambda table: table.T)


def anothers_rotation(model: onnx.ModelProto) -> None:
    last, first = encoders(model)[-2:], encoders(model)[0].input[Encode.rotation.slot]
    for encoder in last:
        encoder.input[Encode.rotation.slot] = first
    for slot in (Attention.key_rotation.slot, Attention.value_rotation.slot):
        attentions(model)[-1].input[slot] = first


def anothers_rotation_where_it_is_read(model: onnx.ModelProto) -> None:
    slot = Attention.value_rotation.slot
    attentions(model)[-1].input[slot] = attentions(model)[0].input[slot]


def rotation_without_a_column(model: onnx.ModelProto) -> None:
    name = encoders(model)[-1].input[Encode.rotation.slot]
    change(initializer(model, name), lambda table: table * (np.arange(table.shape[1]) > 0))


def shift_boundaries(model: onnx.ModelProto) -> None:
    name = encoders(model)[-1].input[Encode.boundaries.slot]
    change(initializer(model, name), lambda table: table + 0.01)


def swap_centroids(model: onnx.ModelProto) -> None:
    name = encoders(model)[-1].input[Encode.centroids.slot]
    change(initializer(model, name), lambda table: table[[1, 0, *range(2, len(table))]])


def change_a_body(model: onnx.ModelProto) -> None:
    other = {"Sub": "Add", "Add": "Sub", "Mul": "Div", "Div": "Mul"}
    node = next(node for body in model.functions for node in body.node if node.op_type in other)
    node.op_type = other[node.op_type]


# attention


def larger_scale(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "scale").f *= 1.1


def larger_scale_in_the_plan_too(model: onnx.ModelProto) -> None:
    larger_scale(model)
    plan = plan_of(model)
    lying = replace(plan.layers[-1], scale=plan.layers[-1].scale * 1.1)
    set_metadata(model, METADATA_PLAN, replace(plan, layers=(*plan.layers[:-1], lying)).to_json())


def a_window(model: onnx.ModelProto) -> None:
    """One that no text of the test is long enough to show."""
    plan = plan_of(model)
    attribute(attentions(model)[-1], "sliding_window").i = 4095
    lying = replace(plan.layers[-1], sliding_window=4095)
    set_metadata(model, METADATA_PLAN, replace(plan, layers=(*plan.layers[:-1], lying)).to_json())


def a_softcap(model: onnx.ModelProto) -> None:
    attribute(attentions(model)[-1], "softcap").f = 30.0


def rotate_result_heads(model: onnx.ModelProto) -> None:
    heads = constant(model, "damage.heads", gathered(plan_of(model).layers[-1].num_heads))
    result = attentions(model)[-1].output[0]
    reader, slot = next(
        (node, slot)
        for node in model.graph.node
        for slot, name in enumerate(node.input)
        if name == result
    )
    before(model, reader, slot, "Gather", heads, axis=1)


def past_length_of_zero(model: onnx.ModelProto) -> None:
    zero = constant(model, "damage.zero", np.zeros(1, np.int64))
    for node in encoders(model)[-2:]:
        node.input[Encode.past_length.slot] = zero
    attentions(model)[-1].input[Attention.past_length.slot] = zero


def past_length_of_one_less(model: onnx.ModelProto) -> None:
    one = constant(model, "damage.one", np.ones(1, np.int64))
    before(model, attentions(model)[-1], Attention.past_length.slot, "Sub", one)


def double_the_values(model: onnx.ModelProto) -> None:
    encoder = encoders(model)[-1]
    before(model, encoder, Encode.vectors.slot, "Add", encoder.input[Encode.vectors.slot])


def mirror_the_keys(model: onnx.ModelProto) -> None:
    """The wrong half in a rotary embedding has the other sign."""
    before(model, encoders(model)[-2], Encode.vectors.slot, "Neg")


# caches


def cross_caches(model: onnx.ModelProto) -> None:
    first, last = encoders(model)[0], encoders(model)[-2]
    past = Encode.past.slot
    first.input[past], last.input[past] = last.input[past], first.input[past]


def cross_results(model: onnx.ModelProto) -> None:
    """Each layer's keys leave by the other's name."""
    first, last = encoders(model)[0].output[0], encoders(model)[-2].output[0]
    names = {first: last, last: first}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


# the rest of the graph


def shift_positions(model: onnx.ModelProto) -> None:
    """Rotary embeddings make no difference of it in any logit, only in the keys."""
    name = plan_of(model).interface.position_ids
    if name is None:
        raise NothingToDamageError
    one = constant(model, "damage.one", np.ones(1, np.int64))
    model.graph.node.insert(0, node_of("Add", [name, one], "damage.ids"))
    for node in list(model.graph.node)[1:]:
        node.input[:] = ["damage.ids" if read == name else read for read in node.input]


def an_unused_embedding(model: onnx.ModelProto) -> None:
    """One row of a token that the text has not."""
    tensor = next(t for t in model.graph.initializer if "embed" in t.name and len(t.dims) == 2)
    change(tensor, lambda w: np.concatenate([w[:-1], w[:1]]))


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


def no_last_norm(model: onnx.ModelProto) -> None:
    tensor = next(
        t for t in reversed(model.graph.initializer) if "norm" in t.name and t.name[:3] != "tq."
    )
    change(tensor, np.ones_like)


def a_weight_that_is_no_number(model: onnx.ModelProto) -> None:
    change(matrices(model)[-2], lambda w: np.where(np.arange(w.size).reshape(w.shape), w, np.nan))


def reverse_a_weight(model: onnx.ModelProto) -> None:
    change(matrices(model)[0], lambda w: w[::-1])


def one_bit(model: onnx.ModelProto) -> None:
    """The smallest damage that there is."""

    def flip(weight: np.ndarray) -> np.ndarray:
        weight.reshape(-1).view(np.uint8)[0] ^= 1
        return weight

    change(matrices(model)[1], flip)


def add_to_logits(model: onnx.ModelProto) -> None:
    draws = np.random.default_rng(0).standard_normal(vocabulary(model)).astype(np.float32)
    behind_logits(model, "Add", constant(model, "damage.noise", draws * np.float32(0.01)))


# what a calibration adds


def offset_of(model: onnx.ModelProto) -> TensorProto:
    return initializer(model, encoders(model)[-2].input[Encode.offset.slot])


def shift_offsets(model: onnx.ModelProto) -> None:
    """Taken from the keys and given back, so that nothing but their codes changes."""
    change(offset_of(model), lambda table: table + 0.1)


def offsets_of_another_token(model: onnx.ModelProto) -> None:
    change(offset_of(model), lambda table: table[::-1])


def larger_query_scale(model: onnx.ModelProto) -> None:
    last = len(attentions(model)) - 1
    change(initializer(model, f"tq.query_scale.{last}"), lambda table: table * 1.1)


def offset_where_it_is_read(model: onnx.ModelProto) -> None:
    slot = Attention.key_offset.slot
    attentions(model)[-1].input[slot] = attentions(model)[0].input[slot]


def a_shorter_window(model: onnx.ModelProto) -> None:
    """Gemma's window is in the mask that the graph makes."""
    tensor = next(
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.INT64
        and abs(numpy_helper.to_array(tensor)).tolist() in (_WINDOW, [_WINDOW])
    )
    change(tensor, lambda array: array - np.sign(array))


REFUSED: frozenset[Damage] = frozenset((other_layout, other_digest, past_length_of_one_less))
"""Damages that onnxruntime or the library refuses to run, with an error of one sentence."""

OF_GRAPHS: tuple[Damage, ...] = (
    *(roll_vocabulary, swap_keys_and_values, rotate_query_heads, swap_kv_heads),
    *(half_a_weight_zero, see_the_future, drop_bias, louder_query_norm, half_a_key_norm),
    *(rotate_result_heads, past_length_of_zero, past_length_of_one_less, mirror_the_keys),
    *(cross_caches, cross_results, shift_positions, another_epsilon, no_last_norm),
)
"""Of what exporters write differently."""

OF_ALL: tuple[Damage, ...] = (
    *(louder_logits, add_to_logits, a_larger_weight, a_noisy_weight, a_weight_that_is_no_number),
    *(reverse_a_weight, one_bit, an_unused_embedding, double_the_values),
    *(no_norm_correction, other_layout, other_digest, transpose_rotation, anothers_rotation),
    *(anothers_rotation_where_it_is_read, rotation_without_a_column, shift_boundaries),
    *(swap_centroids, change_a_body, larger_scale, larger_scale_in_the_plan_too, a_window),
    *(a_softcap,),
)
"""Of what is the same whatever the exporter."""

OF_CALIBRATION: tuple[Damage, ...] = (
    *(shift_offsets, offsets_of_another_token, larger_query_scale, offset_where_it_is_read),
    *(roll_vocabulary, swap_keys_and_values, rotate_query_heads, swap_kv_heads, louder_logits),
    *(a_larger_weight, see_the_future, mirror_the_keys, cross_caches, one_bit),
)
"""Of a model with scales of its own, whose graph is not that of its original."""

PLACES: dict[Damage, str] = {
    swap_keys_and_values: "layer 1, keys",
    swap_kv_heads: "layer 1, keys",
    rotate_query_heads: "layer 1, queries",
    half_a_key_norm: "layer 1, results",
    a_larger_weight: "logits",
    cross_caches: "layer 0: the encoder of keys has the cache",
    no_norm_correction: "layer 1: the encoder of keys has norm_correction 0, not 1",
    a_window: "layer 1: sliding_window",
}
"""What the details of the checks name."""
