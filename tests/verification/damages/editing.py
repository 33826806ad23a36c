"""Tools that damage converted models, and the list of damages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import METADATA_PLAN, Plan

_NUMBERS = count()
"""Nodes have different names."""

Change = Callable[[onnx.ModelProto], None]


class NothingToDamageError(Exception):
    """The model has no part that could be damaged so."""


@dataclass(frozen=True)
class Damage:
    """``place`` is part of what a failed check, or an error, says of it."""

    change: Change
    place: str

    @property
    def name(self) -> str:
        return self.change.__name__


DAMAGES: list[Damage] = []
"""Of any conversion."""
OF_CALIBRATION: list[Damage] = []
"""Of scales and offsets."""


def damage(place: str = "", into: list[Damage] = DAMAGES) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        into.append(Damage(change, place))
        return change

    return register


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


def set_plan(model: onnx.ModelProto, **fields: Any) -> None:
    set_metadata(model, METADATA_PLAN, replace(plan_of(model), **fields).to_json())


def set_last_layer(model: onnx.ModelProto, **fields: Any) -> None:
    layers = plan_of(model).layers
    set_plan(model, layers=(*layers[:-1], replace(layers[-1], **fields)))


def element(model: onnx.ModelProto) -> np.dtype:
    return ir.DataType[plan_of(model).layers[-1].dtype].numpy()


def number(model: onnx.ModelProto, value: float) -> str:
    return constant(model, f"damage.{value}", np.array(value, element(model)))


def integer(model: onnx.ModelProto, value: int) -> str:
    return constant(model, f"damage.{value}", np.array([value], np.int64))


def through_half(model: onnx.ModelProto, reader: onnx.NodeProto, slot: int) -> None:
    before(model, reader, slot, "Cast", to=TensorProto.FLOAT16)
    before(model, reader, slot, "Cast", to=TensorProto.FLOAT)


def reader_of(model: onnx.ModelProto, name: str) -> tuple[onnx.NodeProto, int]:
    return next(
        (node, slot)
        for node in model.graph.node
        for slot, read in enumerate(node.input)
        if read == name
    )


def node_of(op: str, inputs: list[str], output: str, **attributes: int) -> onnx.NodeProto:
    name = f"damage.{next(_NUMBERS)}.{op}"
    node = onnx.NodeProto(op_type=op, input=inputs, output=[output], name=name)
    for name, value in attributes.items():
        node.attribute.add(name=name, type=onnx.AttributeProto.INT, i=value)
    return node


def before(
    model: onnx.ModelProto,
    reader: onnx.NodeProto,
    slot: int,
    op: str,
    *operands: str,
    **attributes: int,
) -> None:
    """Put a node between an input of a node and what it read."""
    name = f"damage.{reader.name}.{slot}.{len(model.graph.node)}"
    made = node_of(op, [reader.input[slot], *operands], name, **attributes)
    reader.input[slot] = made.output[0]
    model.graph.node.insert(list(model.graph.node).index(reader), made)


def behind_logits(model: onnx.ModelProto, op: str, *operands: str, **attributes: int) -> None:
    logits = plan_of(model).interface.logits
    before_it = f"damage.logits.{len(model.graph.node)}"
    for node in model.graph.node:
        node.output[:] = [before_it if name == logits else name for name in node.output]
        node.input[:] = [before_it if name == logits else name for name in node.input]
    model.graph.node.append(node_of(op, [before_it, *operands], logits, **attributes))


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
        if f".{last}." in tensor.name and f"{role}_norm" in tensor.name:
            return tensor
    raise NothingToDamageError


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
