"""Edits after which a graph computes something else: another value, order or number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

Form = tuple[int, tuple[object, ...]]
"""Element type and dimensions, of numbers and names."""

SIBLINGS: Final = (
    ("Add", "Sub", "Mul", "Max", "Min"),
    ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"),
    ("And", "Or", "Xor"),
    ("Cos", "Sin", "Neg", "Sigmoid", "Tanh", "Identity", "Abs"),
    ("ReduceMean", "ReduceSum", "ReduceMax"),
    ("Equal", "LessOrEqual"),
)
"""Operators that take each other's place."""
SMALL: Final = (-2, -1, 0, 1, 2, 3, 4, 8, 16)
FACTORS: Final = (0.0, 0.5, 0.99, 1.01, 2.0, -1.0)

Edit = Callable[[onnx.ModelProto, random.Random], Any]


def forms(proto: onnx.ModelProto) -> dict[str, Form]:
    """Values whose element type and shape are declared or inferred."""
    graph = proto.graph
    found: dict[str, Form] = {
        tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            sizes = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
            found[value.name] = (kind.elem_type, sizes)
    return found


def another_value(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Let a node read a value of the same form, made before it."""
    found = forms(proto)
    at = draw.randrange(len(proto.graph.node))
    node = proto.graph.node[at]
    slots = [slot for slot, name in enumerate(node.input) if name in found]
    if not slots:
        return
    slot = draw.choice(slots)
    form = found[node.input[slot]]
    before = [name for each in proto.graph.node[:at] for name in each.output]
    before += [value.name for value in proto.graph.input]
    before += [tensor.name for tensor in proto.graph.initializer]
    alike = [name for name in before if found.get(name) == form and name != node.input[slot]]
    if alike:
        node.input[slot] = draw.choice(alike)


def skip(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Let readers of a node read what it reads."""
    found = forms(proto)
    node = draw.choice(proto.graph.node)
    alike = [
        name for name in node.input if node.output and found.get(name) == found.get(node.output[0])
    ]
    if alike and node.output[0] in found:
        _replace(proto, node.output[0], draw.choice(alike))


def sibling(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Compute with another operator of as many operands."""
    nodes = [
        (node, [other for group in SIBLINGS if node.op_type in group for other in group])
        for node in proto.graph.node
    ]
    node, others = draw.choice([(node, others) for node, others in nodes if others])
    node.op_type = draw.choice(others)


def swap(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Exchange two operands."""
    nodes = [node for node in proto.graph.node if len(node.input) > 1]
    node = draw.choice(nodes)
    one, other = draw.sample(range(len(node.input)), 2)
    node.input[one], node.input[other] = node.input[other], node.input[one]


def attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Change a number of an attribute a little, or exchange two."""
    found = [
        each
        for node in proto.graph.node
        for each in node.attribute
        if each.type
        in (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT)
    ]
    if not found:
        return
    chosen = draw.choice(found)
    if chosen.type == onnx.AttributeProto.FLOAT:
        chosen.f *= draw.choice(FACTORS)
    elif chosen.type == onnx.AttributeProto.INT:
        chosen.i = draw.choice((chosen.i + 1, chosen.i - 1, *SMALL))
    elif len(chosen.ints) > 1:
        one, other = draw.sample(range(len(chosen.ints)), 2)
        chosen.ints[one], chosen.ints[other] = chosen.ints[other], chosen.ints[one]


def number(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Change a number of a short constant."""
    tensors = [tensor for tensor in _tensors(proto) if 0 < np.prod(tensor.dims, initial=1) <= 16]
    if not tensors:
        return
    tensor = draw.choice(tensors)
    array = np.array(numpy_helper.to_array(tensor))
    at = draw.randrange(array.size)
    if array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            array.flat[at] *= draw.choice(FACTORS)
    elif array.dtype.kind == "b":
        array.flat[at] = not array.flat[at]
    elif array.dtype.kind in "iu":
        array.flat[at] = max(np.iinfo(array.dtype).min, int(draw.choice(SMALL)))
    changed = numpy_helper.from_array(array, tensor.name)
    tensor.CopyFrom(changed)


def insertion(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Compute something of a value before it is read, by some of its readers or all."""
    found = forms(proto)
    floats = [
        name
        for node in proto.graph.node
        for name in node.output
        if found.get(name, (0, ()))[0] in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
        and len(found[name][1]) >= 2
    ]
    if not floats:
        return
    name = draw.choice(floats)
    made, rank = f"{name}_made", len(found[name][1])
    kind = draw.randrange(4)
    node = onnx.NodeProto(op_type="Neg", input=[name], output=[made])
    if kind == 1:
        node.op_type = "Softmax"
        node.attribute.add(name="axis", i=draw.randrange(rank), type=onnx.AttributeProto.INT)
    elif kind == 2:  # of one size: an order that may change
        one, other = draw.sample(range(rank), 2)
        order = list(range(rank))
        order[one], order[other] = other, one
        node.op_type = "Transpose"
        node.attribute.add(name="perm", ints=order, type=onnx.AttributeProto.INTS)
    elif kind == 3:
        node.op_type = "CumSum"
        axis = numpy_helper.from_array(np.array(draw.randrange(rank)), f"{made}_axis")
        proto.graph.initializer.append(axis)
        node.input.append(axis.name)
    at = next(i for i, each in enumerate(proto.graph.node) if name in each.output)
    everywhere = draw.random() < 0.6
    for reader in proto.graph.node[at + 1 :]:
        for slot, read in enumerate(reader.input):
            if read == name and (everywhere or draw.random() < 0.5):
                reader.input[slot] = made
    proto.graph.node.insert(at + 1, node)


def _replace(proto: onnx.ModelProto, old: str, new: str) -> None:
    for node in proto.graph.node:
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield from (each.t for each in node.attribute if each.name == "value")


EDITS: Final[tuple[Edit, ...]] = (
    *(another_value, another_value, another_value, skip, skip, sibling, swap),
    *(attribute, number, number, insertion, insertion),
)
