"""The raw form of a converted model: its codecs, scales and offsets taken out, in memory.

Its caches hold the numbers that went in, so that it computes what its original computes, to float
noise. Whatever is not quantisation shows as a difference: a wrong weight, position, mask, scale or
cache. Weights in external data stay where they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import RAW
from tq_onnx.conversion import bake
from tq_onnx.conversion.layers import ConvertedLayer, EncodeNode, converted_layers
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.copying import copy_graph
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import BY_NAME, Attention, Encode
from tq_onnx.plan import LayerPlan, Plan

NO_TABLE: Final = "tq.none"
_TABLES: Final = ("rotation", "centroids", "boundaries")
_OF_CODES: Final = ("norm_correction", "recent", "sinks", "row_stride")
_SIZES: Final = 3
"""Heads, slots and bytes of a cache."""
_ACCURACY: Final = "accuracy_level"


def raw_form(loaded: LoadedModel, plan: Plan) -> LoadedModel:
    """Return a converted model whose caches hold what goes into them.

    Args:
        loaded: the converted model; it is not changed, and shares its weights with the result.
    """
    model = copy_graph(loaded.model)
    build = Builder(model.graph)
    none = _constant(build, model.graph, NO_TABLE, np.zeros(1, np.float32))
    tables: set[ir.Value] = set()
    layers = []
    for layer in converted_layers(model, plan):
        raw = _raw_layer(layer.plan, is_turned=plan.rotary)
        if layer.plan.equalised:
            _take_scales(model.graph, layer)
        for operator in layer.operators:
            tables.update(_take_codecs(operator.node, raw.key.codec, none))
        for encoder in layer.encoders:
            _widen_rows(encoder, raw)
            _widen_empty(build, model.graph, encoder, raw)
        for attention in layer.attentions if plan.rotary else ():
            padding = attention.left_padding  # for offsets that turn, and not over pages
            if padding is not None:
                attention.left_padding = None
                _remove_unread(model.graph, padding)
        if any(vectors.dtype not in (None, ir.DataType[raw.dtype]) for vectors in _vectors(layer)):
            _cast(build, layer)
        layers.append(raw)
    for table in tables:
        if not table.uses():
            model.graph.initializers.pop(table.name or "", None)
    raw_plan = replace(plan, layers=tuple(layers), gains=0, planes=False)
    for kind in (Encode, Attention):
        model.functions.pop((DOMAIN, kind.name, ""), None)
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
    clone = copy_graph(model)
    for node in rounded(clone.graph):
        node.attributes[_ACCURACY] = ir.AttrInt64(_ACCURACY, 0)
    return clone


def has_codes(model: ir.Model) -> bool:
    """Tell whether ONNX Runtime may multiply codes in place of the floats of the graph."""
    return any(node.op_type == "DequantizeLinear" for node in model.graph)


def _raw_layer(layer: LayerPlan, *, is_turned: bool) -> LayerPlan:
    """Return the plan of a layer whose caches hold the numbers that go into them."""
    codec = Codec(RAW, ELEMENT_BITS[ELEMENTS[layer.dtype]])
    width = row_layout(codec, layer.head_size).row_bytes
    raw = layer.with_caches(codec=codec, row_bytes=width, feedback=False, rotary=False)
    return replace(
        raw, centered=False, equalised=False, has_padding=layer.has_padding and not is_turned
    )


def _take_scales(graph: ir.Graph, layer: ConvertedLayer) -> None:
    """Take scales out of queries and keys."""
    for scaling in filter(None, layer.scalings):
        table = scaling.node.inputs[1]
        scaling.node.outputs[0].replace_all_uses_with(scaling.plain)
        graph.remove(scaling.node, safe=True)
        if table is not None and not table.uses():
            graph.initializers.pop(table.name or "", None)


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Remove the nodes that make a value which nothing reads any more; others stay, dead or not."""
    node = value.producer()
    if node is None or any(output.uses() for output in node.outputs):
        return
    operands = [operand for operand in node.inputs if operand is not None]
    graph.remove(node, safe=True)
    for operand in operands:
        _remove_unread(graph, operand)


def _take_codecs(node: ir.Node, codec: Codec, none: ir.Value) -> list[ir.Value]:
    """Make an operator one of raw rows, contiguous or in pages; return the tables that it had.

    Args:
        node: the operator, which is changed.
    """
    operator = BY_NAME[node.op_type]
    old = []
    for slot in operator.inputs:
        is_table = slot.name.endswith(_TABLES)
        if is_table or any(feature.of_codes for feature in slot.when):
            old.append(slot.of(node))
            slot.replace(node, none if is_table else None)
    for attribute in operator.attributes:
        name = attribute.name
        if any(feature.of_codes for feature in attribute.when):
            node.attributes.pop(name, None)
        elif name.endswith("codec"):
            node.attributes[name] = ir.AttrString(name, codec.kind)
        elif name.endswith("bits"):
            node.attributes[name] = ir.AttrInt64(name, codec.bits)
        # Raw rows are exact as they are: what is in front of them stays, without entries.
        elif name in _OF_CODES and name in node.attributes:
            node.attributes[name] = ir.AttrInt64(name, 0)
    return [value for value in old if value is not None]


def _widen_rows(encoder: EncodeNode, raw: LayerPlan) -> None:
    """Widen the rows of a cache."""
    readers = [use.node for use in encoder.output.uses()]
    shortened = [reader.outputs[0] for reader in readers if reader.op_type == "Slice"]
    for value in (encoder.past, encoder.output, *shortened):
        if value.shape is not None and len(value.shape) == 4:
            value.shape = ir.Shape([*value.shape[:3], raw.key.row_bytes])


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
    initializer = graph.initializers.get(name)
    return build.constant(name, array) if initializer is None else initializer


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
