"""The raw form of a converted model: the same graph, its codecs and offsets taken out, in memory.

Its caches hold the numbers that went in, so that it computes what its original computes, to float
noise. Whatever is not quantisation shows as a difference: a wrong weight, position, mask, scale or
cache. Weights in external data stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import RAW
from tq_onnx.conversion import bake
from tq_onnx.conversion.layers import SHARED, ConvertedLayer, EncodeNode, converted_layers
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.copying import copy_graph
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import LayerPlan, Plan

NO_TABLE: Final = "tq.none"
_SIZES: Final = 3
"""Heads, slots and bytes of a cache."""
_ACCURACY: Final = "accuracy_level"


def raw_form(loaded: LoadedModel, plan: Plan) -> LoadedModel:
    """Return a converted model whose caches hold what goes into them.

    Args:
        loaded: the converted model; it is not changed, and shares its weights with the result.
        plan: its plan.

    Raises:
        UnsupportedModelError: the model lacks nodes that its plan promises.
    """
    model = copy_graph(loaded.model)
    build = Builder(model.graph)
    none = _constant(build, model.graph, NO_TABLE, np.zeros(1, np.float32))
    tables: set[ir.Value] = set()
    layers = []
    for layer in converted_layers(model, plan):
        raw = raw_layer(layer.plan)
        for encoder in layer.encoders:
            tables.update(_unquantise(encoder, layer, raw, none))
            _widen_empty(build, model.graph, encoder, raw)
        if any(vectors.dtype not in (None, ir.DataType[raw.dtype]) for vectors in _vectors(layer)):
            _cast(build, layer)
        layers.append(raw)
    for table in tables:
        if not table.uses():
            model.graph.initializers.pop(table.name or "", None)
    raw_plan = replace(plan, layers=tuple(layers), gains=0)
    for name in (Encode.name, Attention.name):
        model.functions.pop((DOMAIN, name, ""), None)
    bake.bake_functions(model, raw_plan)
    bake.bake_metadata(model, raw_plan)
    return replace(loaded, model=model)


def multiply_floats(model: ir.Model) -> ir.Model:
    """Return the model, or a clone of it whose int4 weights are multiplied as floats.

    As exported, their operands may be rounded to int8 first, and float noise that flips one of
    those is no float noise any more.
    """

    def rounded(graph: ir.Graph) -> list[ir.Node]:
        return [
            node
            for node in graph
            if node.op_type == "MatMulNBits" and attribute_int(node, _ACCURACY, 0)
        ]

    if not rounded(model.graph):
        return model
    made = copy_graph(model)
    for node in rounded(made.graph):
        node.attributes[_ACCURACY] = ir.AttrInt64(_ACCURACY, 0)
    return made


def has_codes(model: ir.Model) -> bool:
    """Tell whether ONNX Runtime may multiply codes in place of the floats of the graph."""
    return any(node.op_type == "DequantizeLinear" for node in model.graph)


def raw_layer(layer: LayerPlan) -> LayerPlan:
    """Return the plan of a layer whose caches hold the numbers that go into them."""
    codec = Codec(RAW, ELEMENT_BITS[ELEMENTS[layer.dtype]])
    width = row_layout(codec, layer.head_size).row_bytes
    raw = layer.with_caches(codec=codec, row_bytes=width, feedback=False)
    return replace(raw, centered=False)


def _unquantise(
    encoder: EncodeNode, layer: ConvertedLayer, raw: LayerPlan, none: ir.Value
) -> Iterable[ir.Value]:
    """Make a cache one of raw rows, where it is made and where it is read; return old tables."""
    node, attentions = encoder.node, [one.node for one in layer.attentions]
    old = [encoder.rotation, encoder.centroids, encoder.boundaries, encoder.offset]
    old += [encoder.gains, encoder.feedback]
    node.attributes.pop(Encode.codec_index.name, None)
    _set(node, {"codec": RAW, "bits": raw.key.codec.bits, "norm_correction": 0})
    encoder.rotation = encoder.centroids = encoder.boundaries = none
    encoder.offset = encoder.gains = encoder.feedback = None
    read = SHARED[encoder.role]
    for attention in attentions:
        old += [
            read[slot].of(attention) for slot in (Encode.rotation, Encode.centroids, Encode.offset)
        ]
        for slot in (Encode.rotation, Encode.centroids):
            read[slot].replace(attention, none)
        read[Encode.offset].replace(attention, None)
        attention.attributes.pop(f"{encoder.role}_codec_index", None)
        _set(attention, {f"{encoder.role}_codec": RAW, f"{encoder.role}_bits": raw.key.codec.bits})
    for operator in (node, *attentions):
        # Raw rows are exact as they are: what is in front of them stays, without entries.
        for attribute in (Encode.recent, Encode.sinks):
            if attribute.name in operator.attributes:
                _set(operator, {attribute.name: 0})
    readers = [use.node for use in encoder.output.uses()]
    shortened = [reader.outputs[0] for reader in readers if reader.op_type == "Slice"]
    for value in (encoder.past, encoder.output, *shortened):
        _widen(value, raw.key.row_bytes)
    return [value for value in old if value is not None]


def _set(node: ir.Node, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        text = isinstance(value, str)
        node.attributes[name] = ir.AttrString(name, value) if text else ir.AttrInt64(name, value)


def _widen(value: ir.Value, width: int) -> None:
    if value.shape is not None and len(value.shape) == 4:
        value.shape = ir.Shape([*value.shape[:3], width])


def _widen_empty(build: Builder, graph: ir.Graph, encoder: EncodeNode, raw: LayerPlan) -> None:
    """Widen the rows of a cache that the graph makes itself, without any token in it."""
    maker = encoder.past.producer()
    shape = None if maker is None or len(maker.inputs) < 2 else maker.inputs[1]
    parts = None if shape is None else shape.producer()
    for index, part in enumerate(() if parts is None else parts.inputs):
        sizes = integers(part)
        if (
            parts is None
            or sizes is None
            or len(sizes) != _SIZES
            or sizes[-1] != encoder.cache.row_bytes
        ):
            continue
        wider = (*sizes[:-1], raw.key.row_bytes)
        name = "tq.int64." + "_".join(str(size) for size in wider)
        parts.replace_input_with(index, _constant(build, graph, name, np.array(wider, np.int64)))


def _constant(build: Builder, graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    found = graph.initializers.get(name)
    return build.constant(name, array) if found is None else found


def _vectors(layer: ConvertedLayer) -> list[ir.Value]:
    return [encoder.vectors for encoder in layer.encoders]


def _cast(build: Builder, layer: ConvertedLayer) -> None:
    """Give the encoders vectors of the query's type: raw rows do not tell theirs."""
    plan = layer.plan
    dtype = ir.DataType[plan.dtype]
    for encoder in layer.encoders:
        if encoder.vectors.dtype in (None, dtype):
            continue
        with build.before(encoder.node, f"layers.{plan.layer}.attention"):
            encoder.vectors = build.op(
                "Cast",
                [encoder.vectors],
                f"cast_{encoder.role}",
                dtype=dtype,
                shape=[None, plan.kv_num_heads, None, plan.head_size],
                to=int(dtype),
            )
