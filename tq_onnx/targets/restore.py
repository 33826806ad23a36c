"""Restore the TurboQuant operators of a lowered model, for ``verify`` and ``inspect``.

The lowering replaces the operators by standard ones. It writes into the metadata, for each layer,
the names of the values that the operators were connected to (``remember``). ``restore`` puts the
operators back between these values, so that they can be compared and measured while the rest of the
graph is that of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tq_onnx.conversion.bake import bake_functions, bake_metadata
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.nodes import OperatorNodes
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.copying import copy_graph
from tq_onnx.plan import CPU, LayerPlan, Plan, Role

METADATA_LAYERS: Final = "tq_onnx.web.layers"

_AGAIN: Final = "convert the original again"


@dataclass(frozen=True, eq=False)
class EncoderEnds:
    """The values that an encoder was connected to."""

    vectors: ir.Value
    past: ir.Value
    past_length: ir.Value
    present: ir.Value


@dataclass(frozen=True, eq=False)
class AttentionEnds:
    """The values that an attention was connected to, its caches apart."""

    query: ir.Value
    past_length: ir.Value
    bias: ir.Value | None
    sink: ir.Value | None
    output: ir.Value


@dataclass(frozen=True, eq=False)
class Remembered:
    """The values that the operators of a layer were connected to."""

    key: EncoderEnds
    value: EncoderEnds
    attentions: tuple[AttentionEnds, ...]


def take_place(old: ir.Value, new: ir.Value) -> ir.Value:
    """Give a value the uses and the name of another; return it."""
    new.name, old.name = old.name, None
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    return new


def remember(model: ir.Model, layers: Sequence[Remembered]) -> None:
    """Write the names of the values into the metadata."""
    entries = [
        {
            "key": _names(layer.key),
            "value": _names(layer.value),
            "attentions": [_names(each) for each in layer.attentions],
        }
        for layer in layers
    ]
    model.metadata_props[METADATA_LAYERS] = json.dumps(entries, separators=(",", ":"))


def _names(ends: EncoderEnds | AttentionEnds) -> dict[str, str | None]:
    return {key: None if value is None else value.name for key, value in vars(ends).items()}


def restore(model: ir.Model, plan: Plan) -> ir.Model:
    """Return a model with operators in the places of what the lowering made of them.

    Args:
        model: a lowered model; it is not changed, and shares its weights with the result.
    """
    plain, model = replace(plan, target=CPU), copy_graph(model)
    values = {
        value.name: value
        for values in (
            model.graph.inputs,
            model.graph.initializers.values(),
            *(node.outputs for node in model.graph),
        )
        for value in values
    }
    try:
        entries = json.loads(model.metadata_props.pop(METADATA_LAYERS))
        layers = [_layer(entry, values) for entry in entries]
        build = Builder(model.graph)
        for layer, ends in zip(plain.layers, layers, strict=True):
            _restore(OperatorNodes(build, plain, layer), ends)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            "the places of its operators are not as the conversion wrote them", fix=_AGAIN
        ) from error
    RemoveUnusedNodesPass()(model)
    bake_functions(model, plain)
    bake_metadata(model, plain)
    for violation in layer_violations(model, plain):
        raise UnsupportedModelError(violation, fix=_AGAIN)
    return model


def _layer(entry: Mapping[str, Any], values: Mapping[str | None, ir.Value]) -> Remembered:
    def found(names: Mapping[str, str | None]) -> dict[str, Any]:
        return {key: None if name is None else values[name] for key, name in names.items()}

    return Remembered(
        EncoderEnds(**found(entry["key"])),
        EncoderEnds(**found(entry["value"])),
        tuple(AttentionEnds(**found(names)) for names in entry["attentions"]),
    )


def _restore(operators: OperatorNodes, ends: Remembered) -> None:
    key = _encoder(operators, "key", ends.key)
    value = _encoder(operators, "value", ends.value)
    for each in ends.attentions:
        with operators.build.before(_producer(each.output), _scope(operators.layer)):
            output = operators.attend(
                each.query,
                (key, value),
                each.past_length,
                bias=each.bias,
                sink=each.sink,
                new=(ends.key.vectors, ends.value.vectors),
            )
            take_place(each.output, output)


def _encoder(operators: OperatorNodes, role: Role, ends: EncoderEnds) -> ir.Value:
    with operators.build.before(_producer(ends.present), _scope(operators.layer)):
        rows = operators.encode(ends.vectors, ends.past, ends.past_length, role, None)
    return take_place(ends.present, rows)


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    if node is None:
        raise KeyError(value.name)
    return node


def _scope(layer: LayerPlan) -> str:
    return f"layers.{layer.layer}.attention"
