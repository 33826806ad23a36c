"""Check the interface and the operators of a paged model before it is written."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.conversion.ports import InterfaceSnapshot
from tq_onnx.graph.sizerules import sizes
from tq_onnx.ops.domain import DOMAIN, PAGED_ATTENTION, PAGED_ENCODE
from tq_onnx.ops.operators import PagedEncode
from tq_onnx.plan import PACKING, Plan
from tq_onnx.targets.paged.operators import BLOCKS
from tq_onnx.targets.paged.packed import REQUESTS


def violations(original: InterfaceSnapshot, model: ir.Model, plan: Plan) -> Iterator[str]:
    """Yield what is wrong, a clause each."""
    caches = {cache.past for cache in plan.caches}
    kept = {plan.interface.tokens, *caches}
    wanted = {*(port.name for port in original.inputs if port.name in kept), *PACKING}
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
    packing = [found[name] for name in PACKING]
    yield from layer_violations(model, plan)
    for layer in converted_layers(model, plan, pages=True):
        yield from (f"layer {layer.plan.layer}: {text}" for text in _pages(layer, plan, packing))
    for name in (PAGED_ENCODE, PAGED_ATTENTION):
        if (DOMAIN, name, "") not in model.functions:
            yield f"the body of {name} is missing"


def _pages(layer: ConvertedLayer, plan: Plan, packing: list[ir.Value]) -> Iterator[str]:
    for encoder in layer.encoders:
        cache = encoder.cache
        shape = (BLOCKS, plan.block_size, layer.plan.kv_num_heads, cache.row_bytes)
        for value, name in ((encoder.past, cache.past), (encoder.output, cache.present)):
            if value.name != name or sizes(value) != shape:
                yield f"{name} is not pages of the shape {shape}"
            elif value.dtype is not ir.DataType.UINT8:
                yield f"{name} is not uint8"
    slots = (PagedEncode.cumulative_sequence_length, PagedEncode.past_seqlens)
    for operator in layer.operators:
        if [slot.of(operator.node) for slot in (*slots, PagedEncode.block_table)] != packing:
            yield f"{operator.name} does not read the packed requests"
