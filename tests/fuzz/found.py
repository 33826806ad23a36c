"""What fuzzing has found, small and by name: models that once broke a promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

Edit = Callable[[onnx.ModelProto], None]


def _node(proto: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if output in node.output)


def no_operands(output: str) -> Edit:
    return lambda proto: _node(proto, output).ClearField("input")


def graph_for_axis(output: str) -> Edit:
    """An attribute that says that it holds a graph."""

    def edit(proto: onnx.ModelProto) -> None:
        attributes = _node(proto, output).attribute
        axis = next(attribute for attribute in attributes if attribute.name == "axis")
        axis.type = onnx.AttributeProto.GRAPH

    return edit


def operand(output: str, at: int, name: str) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        _node(proto, output).input[at] = name

    return edit


def output(name: str, dtype: int, rank: int) -> Edit:
    """One output more, of sizes that are not told."""

    def edit(proto: onnx.ModelProto) -> None:
        told = onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension() for _ in range(rank)])
        value = proto.graph.output.add(name=name)
        value.type.tensor_type.elem_type = dtype
        value.type.tensor_type.shape.CopyFrom(told)

    return edit


def order(output: str, *perm: int) -> Edit:
    """Another order of the axes of a Transpose, which may be none."""

    def edit(proto: onnx.ModelProto) -> None:
        (attribute,) = _node(proto, output).attribute
        attribute.ints[:] = perm

    return edit


def cast_to_nothing(output: str) -> Edit:
    """A Cast whose result has no declared type."""

    def edit(proto: onnx.ModelProto) -> None:
        _node(proto, output).attribute[0].i = 1 << 40
        del proto.graph.value_info[:]

    return edit


def no_element_type(value: str) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        values = (*proto.graph.input, *proto.graph.value_info)
        declared = next(each for each in values if each.name == value)
        declared.type.tensor_type.elem_type = onnx.TensorProto.UNDEFINED

    return edit


def numbers_in_a_field_of(field: str, name: str) -> Edit:
    """The numbers of a weight stand where those of another element type do."""

    def edit(proto: onnx.ModelProto) -> None:
        tensor = next(each for each in proto.graph.initializer if each.name == name)
        numbers = numpy_helper.to_array(tensor).ravel()
        tensor.ClearField("raw_data")
        getattr(tensor, field).extend(numbers.astype(int).tolist())

    return edit


def first_size(value: str, size: int) -> Edit:
    """An input whose first axis has that size."""

    def edit(proto: onnx.ModelProto) -> None:
        declared = next(each for each in proto.graph.input if each.name == value)
        declared.type.tensor_type.shape.dim[0].dim_value = size

    return edit


def size_of_output(value: str, axis: int, size: int) -> Edit:
    """An output whose axis has that size."""

    def edit(proto: onnx.ModelProto) -> None:
        declared = next(each for each in proto.graph.output if each.name == value)
        declared.type.tensor_type.shape.dim[axis].dim_value = size

    return edit


def number_of_node(output: str, value: int) -> Edit:
    """A Constant of one integer is another."""

    def edit(proto: onnx.ModelProto) -> None:
        (attribute,) = _node(proto, output).attribute
        attribute.t.CopyFrom(numpy_helper.from_array(np.array([value], np.int64)))

    return edit


def number(name: str, value: int) -> Edit:
    """A constant of one integer is another."""

    def edit(proto: onnx.ModelProto) -> None:
        tensor = next(each for each in proto.graph.initializer if each.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.array(value, np.int64), name))

    return edit


def calls_itself(output: str) -> Edit:
    """A function of the operators' own domain, in place of a constant."""

    def edit(proto: onnx.ModelProto) -> None:
        call = onnx.NodeProto(op_type="made", domain="tq_onnx", output=[output])
        function = proto.functions.add(name="made", domain="tq_onnx", output=[output])
        function.node.append(call)
        function.opset_import.extend(proto.opset_import)
        _node(proto, output).CopyFrom(call)
        proto.opset_import.add(domain="tq_onnx", version=1)

    return edit


MODELS: Final[dict[str, tuple[str, Edit]]] = {
    "a product of nothing": ("hf-static-decode", no_operands("mul_12")),
    "an axis that is a graph": ("hf-decode", graph_for_axis("cat_6")),
    "an axis of a norm that is a graph": (
        "mobius-default",
        graph_for_axis("v_model.layers.1.self_attn.q_norm.RMSNormalization_50"),
    ),
    "ids as weights": (
        "genai-dml-fp16",
        operand("/model/layers.1/attn/v_proj/MatMul/output_0", 1, "input_ids"),
    ),
    "a sum without an addend": (
        "genai-dml-fp16",
        operand("/model/layers.1/post_attention_layernorm/output_0", 1, ""),
    ),
    "an order of axes that is none": ("dynamo-op23-eager", order("transpose_5", 0, 2, 1, 7)),
    "a cast to no element type": (
        "optimum",
        cast_to_nothing("/model/layers.0/input_layernorm/Cast_1_output_0"),
    ),
    "a function that calls itself": (
        "legacy-op14-eager",
        calls_itself("/decoder/model/layers.1/post_attention_layernorm/Constant_2_output_0"),
    ),
    "positions without an element type": ("hf-ortcuda-decode", no_element_type("position_ids")),
    "floats in the field of integers": (
        "dynamo-op24-sdpa",
        numbers_in_a_field_of("int64_data", "val_79"),
    ),
    "a batch that no memory holds": ("genai-cpu-fp16", first_size("input_ids", 1 << 31)),
    "a range of 2^63 numbers": ("hf-ortcuda-decode", number("val_4", -(1 << 63))),
    "sizes that multiply to what no memory holds": (
        "genai-cpu-fp16",
        number_of_node("/model/constants/INT64/[1]", 1 << 40),
    ),
    "a cache that has no room for a window": (
        "legacy-one-token",
        size_of_output("present.1.key", 2, 1 << 40),
    ),
    "a dimension for each token": (
        "dynamo-op18-sdpa-hd128-fp16",
        operand("add_988", 0, "past_key_values.0.value"),
    ),
    "a value as an output with a type and sizes that are not its own": (
        "dynamo-op23-eager",
        output("view_1", onnx.TensorProto.INT64, 4),
    ),
    "keys as new values": (
        "dynamo-qwen3-moe",
        operand("present.0.value", 1, "past_key_values.0.key"),
    ),
}
"""Export and edit."""


def weight(name: str, number: float) -> Edit:
    """All numbers of a weight are the same."""

    def edit(proto: onnx.ModelProto) -> None:
        tensor = next(each for each in proto.graph.initializer if each.name == name)
        array = np.full_like(numpy_helper.to_array(tensor), number)
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return edit


def other_axes(proto: onnx.ModelProto) -> None:
    """Logits with the tokens in front."""
    node = _node(proto, "logits")
    node.output[0] = "usual_logits"
    perm = onnx.AttributeProto(name="perm", ints=[1, 0, 2], type=onnx.AttributeProto.INTS)
    turned = proto.graph.node.add(op_type="Transpose", input=["usual_logits"], output=["logits"])
    turned.attribute.append(perm)


V_PROJ: Final = "val_106"
VERIFIED: Final[dict[str, tuple[str, Edit, int]]] = {
    "values that are zero": ("dynamo-op23-sdpa", weight(V_PROJ, 0), 0),
    "values that are NaN": ("dynamo-op23-sdpa", weight(V_PROJ, float("nan")), 3),
    "logits of other axes": ("dynamo-op23-sdpa", other_axes, 3),
}
"""Export, edit and the exit code of ``verify`` for its conversion."""
