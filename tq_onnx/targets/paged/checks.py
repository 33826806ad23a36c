"""Check the interface and the operators of a paged model before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from tq_onnx.conversion.ports import InterfaceSnapshot
from tq_onnx.graph.sizerules import sizes
from tq_onnx.ops.domain import DOMAIN, PAGED_ATTENTION, PAGED_ENCODE
from tq_onnx.ops.operators import PagedAttention, PagedEncode
from tq_onnx.plan import BLOCK_TABLE, CUMULATIVE_LENGTHS, PAST_LENGTHS, LayerPlan, Plan
from tq_onnx.targets.paged.operators import BLOCKS
from tq_onnx.targets.paged.packed import REQUESTS

_PACKING = (CUMULATIVE_LENGTHS, PAST_LENGTHS, BLOCK_TABLE)


def violations(original: InterfaceSnapshot, model: ir.Model, plan: Plan) -> Iterator[str]:
    """Yield what is wrong, a clause each."""
    caches = {cache.past for cache in plan.caches}
    kept = {plan.interface.tokens, *caches}
    wanted = {*(port.name for port in original.inputs if port.name in kept), *_PACKING}
    found = {value.name or "": value for value in model.graph.inputs}
    if wanted != set(found):
        yield f"the inputs are {sorted(found)}, not {sorted(wanted)}"
        return
    if [port.name for port in original.outputs] != [value.name for value in model.graph.outputs]:
        yield "the outputs are not the same in the same order"
        return
    outputs = {value.name: value for value in model.graph.outputs}
    logits = sizes(outputs[plan.interface.logits]) or ()
    if len(logits) != 2 or logits[0] != REQUESTS:
        yield f"the logits are {logits}, not one row for each request"
    packing = [found[name] for name in _PACKING]
    for layer in plan.layers:
        yield from (
            f"layer {layer.layer}: {text}" for text in _layer(layer, plan, outputs, packing)
        )
    for name in (PAGED_ENCODE, PAGED_ATTENTION):
        if (DOMAIN, name, "") not in model.functions:
            yield f"the body of {name} is missing"
    nodes = list(model.graph.all_nodes())
    count = len(PagedEncode.nodes(nodes)), len(PagedAttention.nodes(nodes))
    if count != (2 * len(plan.layers), sum(layer.readers for layer in plan.layers)):
        yield f"{count[0]} encoders and {count[1]} attentions for {len(plan.layers)} layers"


def _layer(layer: LayerPlan, plan: Plan, outputs: Any, packing: list[ir.Value]) -> Iterator[str]:
    encoders = []
    for pair in layer.caches:
        present = outputs[pair.present]
        node = present.producer()
        if node is None or not PagedEncode.is_node(node):
            yield f"{pair.present} is not made by {PagedEncode.name}"
            return
        encoders.append(node)
        past = PagedEncode.past.of(node)
        shape = (BLOCKS, plan.block_size, layer.kv_num_heads, pair.row_bytes)
        for value, name in ((past, pair.past), (present, pair.present)):
            if value is None or value.name != name or sizes(value) != shape:
                yield f"{name} is not pages of the shape {shape}"
            elif value.dtype is not ir.DataType.UINT8:
                yield f"{name} is not uint8"
        if (node.attributes.get_string("codec"), node.attributes.get_int("bits")) != (
            pair.codec.kind,
            pair.codec.bits,
        ):
            yield f"{pair.present} is not of {pair.codec}"
    key, value = (node.outputs[0] for node in encoders)
    readers = [use.node for use in key.uses() if PagedAttention.is_node(use.node)]
    if len(readers) != layer.readers:
        yield f"{len(readers)} attentions read the caches"
    for node in readers:
        if PagedAttention.value_cache.of(node) is not value:
            yield "attention does not read the values"
        if node.attributes.get_int("sliding_window") != layer.sliding_window:
            yield "the sliding window is not as planned"
    for node in (*encoders, *readers):
        operator = PagedEncode if PagedEncode.is_node(node) else PagedAttention
        slots = (operator.cumulative_sequence_length, operator.past_seqlens, operator.block_table)
        if [slot.of(node) for slot in slots] != packing:
            yield f"{node.name} does not read the packed requests"
