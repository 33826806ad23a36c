"""The plan, the metadata, function bodies, the interface."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import onnx

from tests.verification.damages.editing import (
    NothingToDamageError,
    damage,
    plan_of,
    set_last_layer,
    set_metadata,
    set_plan,
)
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import Attention
from tq_onnx.plan import (
    METADATA_DIGEST,
    METADATA_PLAN,
    METADATA_PRESET,
    METADATA_VERSION,
    PLAN_VERSION,
)


@damage("layout")
def other_layout(model: onnx.ModelProto) -> None:
    digest = "0" * len(plan_of(model).layout_digest)
    set_plan(model, layout_digest=digest)
    set_metadata(model, METADATA_DIGEST, digest)


@damage("layout")
def other_digest(model: onnx.ModelProto) -> None:
    set_metadata(model, METADATA_DIGEST, "0" * 16)


@damage("preset")
def another_preset(model: onnx.ModelProto) -> None:
    set_metadata(model, METADATA_PRESET, "int3")


@damage("version")
def another_version(model: onnx.ModelProto) -> None:
    set_metadata(model, METADATA_VERSION, "9.9.9")


@damage("layer 0")
def another_seed(model: onnx.ModelProto) -> None:
    set_plan(model, seed=plan_of(model).seed + 1)


@damage("rotation")
def another_kind_of_rotation(model: onnx.ModelProto) -> None:
    other = {"qr": "hadamard", "hadamard": "qr"}
    set_plan(model, rotation=other[plan_of(model).rotation])


@damage("layer 1: rotation_seed")
def another_seed_of_a_layer(model: onnx.ModelProto) -> None:
    set_last_layer(model, rotation_seed=1)


@damage("norm_correction")
def a_plan_without_norm_correction(model: onnx.ModelProto) -> None:
    set_plan(model, norm_correction=False)


@damage("layout")
def another_number_of_bits_in_the_plan(model: onnx.ModelProto) -> None:
    last = plan_of(model).layers[-1]
    set_last_layer(model, key=replace(last.key, codec=Codec("lloyd_max", 3)))


@damage("fixed_capacity")
def another_growth_in_the_plan(model: onnx.ModelProto) -> None:
    set_plan(model, fixed_capacity=not plan_of(model).fixed_capacity)


@damage("inputs and outputs")
def no_padding_in_the_plan(model: onnx.ModelProto) -> None:
    interface = plan_of(model).interface
    set_plan(model, interface=replace(interface, padding=not interface.padding))


@damage("the caches")
def a_layer_less_in_the_plan(model: onnx.ModelProto) -> None:
    set_plan(model, layers=plan_of(model).layers[:-1])


@damage("layer")
def swapped_layers_in_the_plan(model: onnx.ModelProto) -> None:
    first, last = plan_of(model).layers
    swapped = replace(first, key=last.key, value=last.value)
    set_plan(model, layers=(swapped, replace(last, key=first.key, value=first.value)))


@damage("rows of")
def another_row_in_the_plan(model: onnx.ModelProto) -> None:
    last = plan_of(model).layers[-1]
    set_last_layer(model, key=replace(last.key, row_bytes=last.key.row_bytes + 1))


@damage("metadata")
def a_plan_of_other_types(model: onnx.ModelProto) -> None:
    set_last_layer(model, num_heads=None)


@damage("metadata")
def a_plan_that_is_none(model: onnx.ModelProto) -> None:
    set_metadata(model, METADATA_PLAN, json.dumps({"version": PLAN_VERSION}))


OTHER = {"Sub": "Add", "Add": "Sub", "Mul": "Div", "Div": "Mul"}


def change_first(bodies: Iterable[onnx.FunctionProto]) -> None:
    own = (body for body in bodies if body.domain == DOMAIN)
    node = next(node for body in own for node in body.node if node.op_type in OTHER)
    node.op_type = OTHER[node.op_type]


@damage("the function body of")
def change_a_body(model: onnx.ModelProto) -> None:
    change_first(model.functions)


@damage("the function body of")
def change_another_body(model: onnx.ModelProto) -> None:
    change_first(reversed(model.functions))


@damage(Attention.name)
def no_body(model: onnx.ModelProto) -> None:
    model.functions.remove(next(body for body in model.functions if body.name == Attention.name))


@damage("order")
def another_order_of_outputs(model: onnx.ModelProto) -> None:
    outputs = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend([outputs[0], *reversed(outputs[1:])])


@damage("names")
def another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.ValueInfoProto(name="damage", type=model.graph.input[0].type))


@damage("function")
def anothers_function(model: onnx.ModelProto) -> None:
    """One that came with the original."""
    body = next((body for body in model.functions if body.domain != DOMAIN), None)
    if body is None:
        raise NothingToDamageError
    node = next(node for node in body.node if node.op_type in OTHER)
    node.op_type = OTHER[node.op_type]
