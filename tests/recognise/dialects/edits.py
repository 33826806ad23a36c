"""Changes of all attention operators of a model, in place."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

Change = Callable[[ir.Model], None]


def attentions(model: ir.Model) -> list[ir.Node]:
    kinds = ("Attention", "GroupQueryAttention")
    return [node for node in model.graph if node.op_type in kinds]


def with_attribute(name: str, value: int | float | str) -> Change:
    def change(model: ir.Model) -> None:
        for node in attentions(model):
            node.attributes[name] = ir.convenience.convert_attribute(name, value)

    return change


def without_attribute(name: str) -> Change:
    def change(model: ir.Model) -> None:
        for node in attentions(model):
            del node.attributes[name]

    return change


def with_input(
    slot: int, dtype: ir.DataType, shape: list[int | str], name: str = "extra"
) -> Change:
    """Connects a slot of every attention to a new graph input."""

    def change(model: ir.Model) -> None:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        model.graph.inputs.append(value)
        for node in attentions(model):
            node.resize_inputs(max(len(node.inputs), slot + 1))
            node.replace_input_with(slot, value)

    return change


def without_input(*slots: int) -> Change:
    def change(model: ir.Model) -> None:
        for node in attentions(model):
            for slot in slots:
                node.replace_input_with(slot, None)

    return change


def both(*changes: Change) -> Change:
    def change(model: ir.Model) -> None:
        for each in changes:
            each(model)

    return change
