"""Edits of a model's graph that leave a file of protobuf: each breaks one thing, or changes it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import onnx

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))

Edit = Callable[[onnx.ModelProto, random.Random], Any]


def a_node(proto: onnx.ModelProto, draw: random.Random) -> onnx.NodeProto:
    return draw.choice(proto.graph.node)


def a_value(proto: onnx.ModelProto, draw: random.Random) -> onnx.ValueInfoProto:
    graph = proto.graph
    kinds = [values for values in (graph.input, graph.output, graph.value_info) if values]
    return draw.choice(draw.choice(kinds))


def _drop(values: Any, draw: random.Random) -> None:
    if values:
        del values[draw.randrange(len(values))]


def drop_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = a_node(proto, draw)
    if node.input:
        del node.input[draw.choice((-1, 0, draw.randrange(len(node.input)))) :]


def blank_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = a_node(proto, draw)
    if node.input:
        node.input[draw.randrange(len(node.input))] = ""


def other_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node, other = a_node(proto, draw), a_node(proto, draw)
    names = [*other.output, *other.input, *(v.name for v in proto.graph.input), "nowhere"]
    if node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice(names)


def more_inputs(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = a_node(proto, draw)
    node.input.extend(draw.choices([*node.input, ""], k=draw.randrange(1, 4)))


def drop_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = a_node(proto, draw)
    if node.output:
        del node.output[draw.choice((-1, 0)) :]


def rename_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = a_node(proto, draw)
    if node.output:
        names = ["", "x", node.input[0] if node.input else "y", a_node(proto, draw).output[:1]]
        name = draw.choice(names)
        node.output[draw.randrange(len(node.output))] = name if isinstance(name, str) else "z"


def drop_node(proto: onnx.ModelProto, draw: random.Random) -> None:
    _drop(proto.graph.node, draw)


def move_node(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(a_node(proto, draw))
    if draw.random() < 0.5:
        proto.graph.node.remove(node)
    proto.graph.node.insert(draw.randrange(len(proto.graph.node)), node)


def other_operator(proto: onnx.ModelProto, draw: random.Random) -> None:
    node, other = a_node(proto, draw), a_node(proto, draw)
    node.op_type = draw.choice((other.op_type, "Identity", "Softmax", "Nonsense", ""))
    if draw.random() < 0.3:
        node.domain = draw.choice(("", "ai.onnx", "com.microsoft", "tq", "tq_onnx", other.domain))


def drop_attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [node for node in proto.graph.node if node.attribute]
    _drop(draw.choice(nodes).attribute, draw)


def change_attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [node for node in proto.graph.node if node.attribute]
    attribute = draw.choice(draw.choice(nodes).attribute)
    kind = draw.randrange(5)
    if kind == 0:
        attribute.i = draw.choice(NUMBERS)
    elif kind == 1:
        attribute.type = draw.randrange(15)
    elif kind == 2:
        attribute.f = draw.choice((0.0, float("nan"), float("inf"), -1.0, 1e30))
    elif kind == 3 and attribute.ints:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(NUMBERS)
    elif kind == 3:
        attribute.ints.extend(draw.choices(NUMBERS, k=3))
    else:
        attribute.s = b"\xff\xfe\x1b[31m"
        attribute.type = onnx.AttributeProto.STRING
    if kind == 0 and draw.random() < 0.5:
        attribute.type = onnx.AttributeProto.INT


def change_dimension(proto: onnx.ModelProto, draw: random.Random) -> None:
    shape = a_value(proto, draw).type.tensor_type.shape
    kind = draw.randrange(4)
    if kind == 0 or not shape.dim:
        shape.dim.add(dim_value=draw.choice(NUMBERS))
    elif kind == 1:
        _drop(shape.dim, draw)
    elif kind == 2:
        draw.choice(shape.dim).dim_value = draw.choice(NUMBERS)
    else:
        draw.choice(shape.dim).dim_param = draw.choice(("batch", "", "\x1b]0;x\x07", "s" * 300))


def drop_type(proto: onnx.ModelProto, draw: random.Random) -> None:
    value = a_value(proto, draw)
    draw.choice(
        (
            lambda: value.ClearField("type"),
            lambda: value.type.tensor_type.ClearField("shape"),
            lambda: value.type.tensor_type.ClearField("elem_type"),
            value.type.sequence_type.elem_type.tensor_type.shape.dim.add,
        )
    )()


def other_type(proto: onnx.ModelProto, draw: random.Random) -> None:
    number = draw.choice((*range(24), 99, -1, 1 << 30))
    a_value(proto, draw).type.tensor_type.elem_type = number


def rename_value(proto: onnx.ModelProto, draw: random.Random) -> None:
    value, other = a_value(proto, draw), a_value(proto, draw)
    value.name = draw.choice((other.name, "", "\x1b[31mred", "new"))


def drop_value(proto: onnx.ModelProto, draw: random.Random) -> None:
    graph = proto.graph
    _drop(draw.choice((graph.input, graph.output, graph.value_info)), draw)


def change_tensor(proto: onnx.ModelProto, draw: random.Random) -> None:
    if not proto.graph.initializer:
        return
    tensor = draw.choice(proto.graph.initializer)
    kind = draw.randrange(5)
    if kind == 0:
        _drop(proto.graph.initializer, draw)
    elif kind == 1:
        tensor.dims.append(1)
    elif kind == 2:
        tensor.name = draw.choice(("", "other", proto.graph.input[0].name))
    elif kind == 3 and len(tensor.dims):
        tensor.dims[:] = [*tensor.dims[1:], tensor.dims[0]]
    else:
        tensor.data_type = draw.choice((1, 6, 7, 10, 12, 13, 16))


def change_constant(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Change a number in a short list of integers: sizes, axes, limits."""
    lists = [t for t in proto.graph.initializer if t.data_type == 7 and 8 <= len(t.raw_data) <= 64]
    lists += [
        a.t
        for node in proto.graph.node
        if node.op_type == "Constant"
        for a in node.attribute
        if a.t.data_type == 7 and 8 <= len(a.t.raw_data) <= 64
    ]
    if lists:
        tensor = draw.choice(lists)
        at = 8 * draw.randrange(len(tensor.raw_data) // 8)
        number = draw.choice(NUMBERS).to_bytes(8, "little", signed=True)
        tensor.raw_data = tensor.raw_data[:at] + number + tensor.raw_data[at + 8 :]


def change_opset(proto: onnx.ModelProto, draw: random.Random) -> None:
    if not proto.opset_import:
        return
    entry = draw.choice(proto.opset_import)
    kind = draw.randrange(4)
    if kind == 0:
        _drop(proto.opset_import, draw)
    elif kind == 1:
        proto.ir_version = draw.choice(NUMBERS)
    elif kind == 2:
        entry.domain = draw.choice(("", "x", "com.microsoft", "ai.onnx"))
    else:
        entry.version = draw.choice((*NUMBERS, 13, 14, 15, 23, 24, 25, 99))


def change_metadata(proto: onnx.ModelProto, draw: random.Random) -> None:
    key = draw.choice(("tq_onnx.plan", "tq_onnx.layout_digest", "\x1b[1m", "tq_onnx.version"))
    proto.metadata_props.add(key=key, value=draw.choice(("", "{}", "\x1b[2J", "[1]", "null")))


def swap_inputs(proto: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [node for node in proto.graph.node if len(node.input) > 1]
    if nodes:
        node = draw.choice(nodes)
        node.input[:] = draw.sample(list(node.input), len(node.input))


def other_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Make an inner value an output, or let an output be another value."""
    names = [name for name in a_node(proto, draw).output if name]
    if names and draw.random() < 0.5:
        proto.graph.output.add().CopyFrom(a_value(proto, draw))
        proto.graph.output[-1].name = draw.choice(names)
    elif names and proto.graph.output:
        draw.choice(proto.graph.output).name = draw.choice(names)


def twice(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Repeat a weight, an input, an output, a node or an opset."""
    graph = proto.graph
    values = draw.choice(
        (graph.initializer, graph.input, graph.output, graph.node, graph.value_info)
    )
    if values:
        values.add().CopyFrom(draw.choice(values))


def weight_as_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Let the caller give a weight, or nobody."""
    if proto.graph.initializer:
        tensor = draw.choice(proto.graph.initializer)
        kind = proto.graph.input.add(name=tensor.name).type.tensor_type
        kind.elem_type = tensor.data_type
        for size in tensor.dims:
            kind.shape.dim.add(dim_value=size)
        if draw.random() < 0.5:
            proto.graph.initializer.remove(tensor)


def sparse_weight(proto: onnx.ModelProto, draw: random.Random) -> None:
    sparse = proto.graph.sparse_initializer.add()
    if proto.graph.initializer and draw.random() < 0.7:
        sparse.values.CopyFrom(draw.choice(proto.graph.initializer))
    sparse.dims.extend(draw.choices(NUMBERS, k=2))


def outside(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Let a weight be in a file that is not there."""
    if proto.graph.initializer:
        tensor = draw.choice(proto.graph.initializer)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key in draw.sample(("location", "offset", "length", "checksum"), 3):
            tensor.external_data.add(
                key=key, value=draw.choice(("model.onnx", "0", "-1", "..", "", "nowhere"))
            )


def other_field(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Hold the numbers of a weight in a field of another type."""
    if proto.graph.initializer:
        tensor = draw.choice(proto.graph.initializer)
        if draw.random() < 0.5:
            tensor.ClearField("raw_data")
        name = draw.choice(("float_data", "int32_data", "int64_data", "string_data"))
        number: object = b"x" if name == "string_data" else 1
        getattr(tensor, name).extend([number] * draw.choice((1, 64, 4096)))


def into_a_branch(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Move a node into the branches of an If."""
    node = onnx.NodeProto()
    node.CopyFrom(a_node(proto, draw))
    at = list(proto.graph.node).index(node)
    del proto.graph.node[at]
    branching = onnx.NodeProto(op_type="If", input=[draw.choice(proto.graph.input).name])
    branching.output.extend(node.output)
    for name in ("then_branch", "else_branch")[: draw.choice((2, 2, 1))]:
        branch = branching.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g
        branch.node.add().CopyFrom(node)
        branch.output.extend(onnx.ValueInfoProto(name=each) for each in node.output)
    proto.graph.node.insert(at, branching)


def into_a_function(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Make a function of the model out of a node; it may call itself."""
    node = a_node(proto, draw)
    function = proto.functions.add(name="made", domain=draw.choice(("made", "", "tq_onnx")))
    function.node.add().CopyFrom(node)
    function.input.extend(dict.fromkeys(name for name in node.input if name))
    function.output.extend(name for name in node.output if name)
    function.opset_import.extend(proto.opset_import)
    if draw.random() < 0.2:
        function.node[0].op_type, function.node[0].domain = "made", function.domain
    if draw.random() < 0.7:
        proto.opset_import.add(domain=function.domain, version=1)
    inputs, outputs = list(function.input), list(function.output)
    node.CopyFrom(
        onnx.NodeProto(
            op_type="made", domain=function.domain, input=inputs, output=outputs, name=node.name
        )
    )


def drop_function(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Damage a function of the model, where it has any."""
    if proto.functions:
        function = draw.choice(proto.functions)
        _drop(draw.choice((proto.functions, function.node, function.input, function.output)), draw)


def change_plan(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Change the metadata of a conversion: a word, a number, or where it ends."""
    found = [entry for entry in proto.metadata_props if entry.key.startswith("tq_onnx")]
    if found:
        entry = draw.choice(found)
        text, at = entry.value, draw.randrange(len(entry.value) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            entry.value = text[:at]
        elif kind == 1:
            entry.value = text[:at] + draw.choice('0-9"{}[],:.e') + text[at + 1 :]
        elif kind == 2:
            words = re.findall(r'"[^"]*"|[0-9.]+', text)
            if words:
                new = draw.choice(('""', "null", "-1", "1e999", "[]", "9" * 30, '"int4"', "true"))
                entry.value = text.replace(draw.choice(words), new, draw.choice((1, -1)))
        else:
            proto.metadata_props.remove(entry)


EDITS: Sequence[Edit] = (
    *(drop_input, drop_input, blank_input, other_input, other_input, more_inputs, swap_inputs),
    *(drop_output, rename_output, other_output, drop_node, move_node, other_operator, twice),
    *(drop_attribute, change_attribute, change_attribute, change_opset, change_metadata),
    *(change_dimension, change_dimension, drop_type, drop_type, other_type, rename_value),
    *(drop_value, change_tensor, change_constant, change_constant, weight_as_input, outside),
    *(sparse_weight, other_field, into_a_branch, into_a_function, drop_function, change_plan),
)
