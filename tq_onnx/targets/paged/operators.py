"""Put the paged operators in the places of those on the caches of sequences.

Inputs and attributes of the same names are the same; the packed inputs take the place of lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from tq_onnx.conversion.layers import ConvertedLayer, EncodeNode
from tq_onnx.conversion.ports import BLOCKS, TOKENS
from tq_onnx.graph.builder import Builder, Dim
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operator import Input, Operator
from tq_onnx.ops.operators import BY_NAME, PagedAttention, PagedEncode
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.packed import Packed


def page(build: Builder, layer: ConvertedLayer, packed: Packed, plan: Plan) -> None:
    """Replace the operators of a layer.

    Args:
        layer: the operators that are there; its caches get another shape.
    """
    row = plan.layers[0].key.row_bytes
    shape: list[Dim] = [BLOCKS, plan.block_size, layer.plan.kv_num_heads, row]
    for encoder in layer.encoders:
        _say_stride(_encode(build, encoder, packed, shape), layer, plan)
    for attention in layer.attentions:
        told = {
            PagedAttention.cumulative_sequence_length: packed.bounds,
            PagedAttention.past_seqlens: packed.past,
            PagedAttention.block_table: packed.table,
        }
        output = attention.output
        sizes: list[Dim] = [1, layer.plan.num_heads, TOKENS, layer.plan.head_size]
        made = _sibling(build, attention.node, PagedAttention, told, sizes)
        _say_stride(made, layer, plan)
        output.replace_all_uses_with(made)


def _say_stride(output: ir.Value, layer: ConvertedLayer, plan: Plan) -> None:
    """Say how far rows are apart, in a model with exact tokens."""
    node = output.producer()
    assert node is not None  # it was just made
    if plan.has_window:
        pages = plan.page_window if plan.window_of(layer.plan).entries else None
        name, stride = PagedEncode.row_stride.name, 0 if pages is None else pages.row_stride
        node.attributes[name] = ir.AttrInt64(name, stride)


def _encode(build: Builder, encoder: EncodeNode, packed: Packed, shape: list[Dim]) -> ir.Value:
    encoder.past.shape = ir.Shape(shape)
    told = {
        PagedEncode.cumulative_sequence_length: packed.bounds,
        PagedEncode.past_seqlens: packed.past,
        PagedEncode.block_table: packed.table,
    }
    present = encoder.output
    made = _sibling(build, encoder.node, PagedEncode, told, shape)
    present.name, made.name = f"{present.name}/of_sequences", present.name
    present.replace_all_uses_with(made, replace_graph_outputs=True)
    return made


def _sibling(
    build: Builder,
    node: ir.Node,
    paged: type[Operator],
    told: Mapping[Input, ir.Value],
    shape: list[Dim],
) -> ir.Value:
    """Return the result of the paged operator that stands for a node."""
    its = {each.name: each for each in BY_NAME[node.op_type].inputs}
    values = {
        each: told[each] if each in told else its[each.name].of(node) for each in paged.inputs
    }
    declared = {each.name for each in paged.attributes}
    with build.before(node, f"{node.name}".rpartition("/")[0]):
        made = build.op(
            paged.name,
            paged.arguments(values),
            paged.name,
            dtype=node.outputs[0].dtype,
            shape=shape,
            domain=DOMAIN,
        )
    maker = made.producer()
    assert maker is not None  # it was just made
    for name, attribute in node.attributes.items():
        if name in declared:
            maker.attributes[name] = attribute
    return made
