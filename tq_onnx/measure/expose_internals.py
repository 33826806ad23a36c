"""Make a probe of a converted model: inner values become graph outputs, in memory only.

Weights in external data stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, overload

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.kind import NORM_KEPT
from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.layers import ConvertedLayer, EncodeNode, converted_layers
from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.copying import copy_graph
from tq_onnx.measure.probe import EncodeNames, LayerNames, Probe
from tq_onnx.plan import Plan, plan_in
from tq_onnx.targets.paged.logits import keep_all
from tq_onnx.targets.registry import target_of_plan

_VIEWS: Final = frozenset({"Reshape", "Flatten", "Identity", "Squeeze", "Unsqueeze"})


def expose_internals(
    path: Path, *, loaded: LoadedModel | None = None, layers: Collection[int] | None = None
) -> Probe:
    """Make inputs and results of the TurboQuant nodes of a converted model its outputs, in memory.

    Args:
        loaded: the model, if it was read already, or was made in memory; it is not changed.
    """
    loaded = loaded or load_decoder(path)
    model = copy_graph(loaded.model)
    with located(path):
        plan = plan_in(model.metadata_props)
        if plan is None:
            raise UnsupportedModelError("this model was not converted by tq-onnx")
        target = target_of_plan(plan)
        names = tuple(
            _layer(layer)
            for layer in converted_layers(with_operators(loaded).model, plan)
            if layers is None or layer.plan.layer in layers
        )
    _make_outputs(model.graph, _watched(names, plan), views=target.exposes_views)
    if plan.block_size:
        keep_all(model, plan.interface.logits)
    return Probe(ir.to_proto(model).SerializeToString(), loaded.path.parent, names, plan)


def with_operators(loaded: LoadedModel) -> LoadedModel:
    """Return a converted model with TurboQuant operators; those of some targets are made again."""
    plan = plan_in(loaded.model.metadata_props)
    target = None if plan is None else target_of_plan(plan)
    if plan is None or target is None or target.restore is None:
        return loaded
    return replace(loaded, model=target.restore(loaded.model, plan))


def _layer(layer: ConvertedLayer) -> LayerNames:
    attention = layer.attention
    key, value = (_encoder(encoder, layer) for encoder in layer.encoders)
    return LayerNames(
        plan=layer.plan,
        key=key,
        value=value,
        node=attention.name,
        query=_name(attention.query),
        bias=_name(attention.bias),
        sink=_name(attention.sink),
        output=_name(attention.output),
    )


def _encoder(encoder: EncodeNode, layer: ConvertedLayer) -> EncodeNames:
    rotation = codebook = None
    if encoder.codec.is_rotated:
        rotation = _table(encoder, encoder.rotation)
        centroids = _table(encoder, encoder.centroids)
        codebook = Codebook(centroids, _table(encoder, encoder.boundaries), float("nan"))
    gains = encoder.gains if encoder.codec.searches else None
    table = encoder.feedback if encoder.codec.searches else None
    feedback = None if table is None else _table(encoder, table)
    turning = encoder.frequencies
    correction = encoder.node.attributes.get("norm_correction")
    return EncodeNames(
        node=encoder.name,
        codec=encoder.codec,
        norm_correction=NORM_KEPT if correction is None else correction.as_int(),
        vectors=_name(encoder.vectors),
        past_length=_name(encoder.past_length),
        present=_name(encoder.output),
        rotation=rotation,
        codebook=codebook,
        head_size=layer.plan.head_size,
        offset=None if encoder.offset is None else _table(encoder, encoder.offset),
        frequencies=None if turning is None else _table(encoder, turning),
        gains=None if gains is None else _table(encoder, gains),
        feedback=feedback if feedback is None or feedback.ndim > 1 else None,
    )


def _table(encoder: EncodeNode, value: ir.Value) -> npt.NDArray[np.float32]:
    if value.const_value is None:
        raise UnsupportedModelError(f"{value.name} is not baked into the model", where=encoder.name)
    return np.asarray(value.const_value.numpy(), np.float32)


@overload
def _name(value: ir.Value) -> str: ...


@overload
def _name(value: ir.Value | None) -> str | None: ...


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else str(value.name)


def _watched(layers: Collection[LayerNames], plan: Plan) -> dict[str, ir.TypeAndShape]:
    """Return the types of the values that are exposed, by name; the plan knows them."""
    types: dict[str, ir.TypeAndShape] = {}
    for layer in layers:
        for name in layer.watched():
            length = name == layer.key.past_length
            integers = ir.DataType.INT32 if plan.block_size else ir.DataType.INT64
            dtype = integers if length else ir.DataType[layer.plan.dtype]
            rank = 1 if length or name == layer.sink else 4
            types.setdefault(name, ir.TypeAndShape(ir.TensorType(dtype), ir.Shape([None] * rank)))
    return types


def _make_outputs(graph: ir.Graph, types: Mapping[str, ir.TypeAndShape], *, views: bool) -> None:
    """Make values graph outputs that are none yet.

    Args:
        graph: the graph, which is changed.
        types: types by name; a shape is used only where a value has none.
    """
    values = {
        value.name: value
        for node in graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    present = {value.name for value in graph.outputs}
    for name, kind in types.items():
        if name in present:
            continue
        value = values[name]
        value.type = kind.type
        if value.shape is None:
            value.shape = kind.shape
        maker = value.producer()
        if not views and maker is not None and maker.op_type in _VIEWS and _is_float(value):
            value = _negated_twice(graph, value)
        graph.outputs.append(value)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _negated_twice(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return the same numbers under the same name, computed and not copied.

    A view that is an output of the graph cannot share its input's memory. onnxruntime-cann 1.24.4
    then copies that without waiting for the stream on which it is computed.
    """
    name, value.name = value.name, f"{value.name}/view"
    for step in ("once", "twice"):
        node = ir.node("Neg", [value], name=f"{name}/{step}")
        (negated,) = node.outputs
        negated.type, negated.shape = value.type, value.shape
        negated.name = name if step == "twice" else f"{name}/{step}"
        graph.append(node)
        value = negated
    return value
