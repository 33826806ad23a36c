"""Check the operators in a converted model; a part of ``tq_onnx.conversion.check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.conversion.bake import attention_attributes, encode_attributes
from tq_onnx.conversion.layers import (
    SHARED,
    AttentionNode,
    ConvertedLayer,
    EncodeNode,
    find_layer,
    shares_length,
)
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import static_dim
from tq_onnx.ops.features import Features, features_of
from tq_onnx.ops.operators import (
    BY_NAME,
    Attention,
    Encode,
    PagedAttention,
    PagedEncode,
)
from tq_onnx.plan import PACKING, LayerPlan, Plan

ORTHOGONALITY: Final = 1e-5
"""Largest entry of ``R^T R - I``."""

_ROUNDING: Final = 1e-6
"""Of attributes, which are float32 in a file."""

_COSINES_AND_SINES: Final = 2

_PACKING: Final = (
    PagedEncode.cumulative_sequence_length,
    PagedEncode.past_seqlens,
    PagedEncode.block_table,
)
"""The inputs of operators on pages that ``PACKING`` of the model goes to."""


def layer_violations(model: ir.Model, plan: Plan) -> Iterator[str]:
    """Return the violations in the operators of a converted model, a clause each."""
    nodes = list(model.graph.all_nodes())
    encode, attend = (PagedEncode, PagedAttention) if plan.block_size else (Encode, Attention)
    encoders, readers = encode.nodes(nodes), attend.nodes(nodes)
    count = len(plan.layers)
    attentions = sum(layer.readers for layer in plan.layers)
    if len(encoders) != 2 * count or len(readers) != attentions:
        yield f"{len(encoders)} encoders and {len(readers)} attentions for {count} layers"
        return
    outputs = {value.name: value for value in model.graph.outputs}
    rotations: set[ir.Value | None] = set()
    features = features_of(plan)
    for planned in plan.layers:
        label = f"layer {planned.layer}"
        try:
            layer = find_layer(outputs, planned)
        except NoMatch as miss:
            yield f"{label}: {miss.reason}"
            continue
        for text in _layer(layer, plan, features, rotations):
            yield f"{label}: {text}"


def _layer(
    layer: ConvertedLayer, plan: Plan, features: Features, rotations: set[ir.Value | None]
) -> Iterator[str]:
    """Yield what is wrong in a layer; rotations that were looked at are not looked at again."""
    for encoder in layer.encoders:
        yield from _encoder(encoder, layer, plan)
        yield from _optional_inputs(encoder.node, features)
        yield from _tables(encoder)
        yield from _offset(encoder, layer.plan)
        yield from _frequencies(encoder, layer.plan)
        yield from _search(encoder, layer.plan, plan)
    for operator in layer.operators if plan.block_size else ():
        packing = [slot.of(operator.node) for slot in _PACKING]
        if [value and value.name for value in packing] != list(PACKING):
            yield f"{operator.name} does not read the packed requests"
    for attention in layer.attentions:
        yield from _attention(attention, layer, plan)
        yield from _optional_inputs(attention.node, features)
    for encoder in layer.encoders:
        rotation = Encode.rotation.of(encoder.node)
        if encoder.codec.is_rotated and rotation not in rotations:
            rotations.add(rotation)
            yield from _rotation(rotation, layer.plan, encoder.codec)


def _encoder(encoder: EncodeNode, layer: ConvertedLayer, plan: Plan) -> Iterator[str]:
    cache, codec, width = encoder.cache, encoder.codec, encoder.cache.row_bytes
    where = f"the encoder of {encoder.role}s"
    if width < row_layout(codec, layer.plan.head_size).row_bytes:
        yield f"rows of {width} bytes are too short for {codec}"
    row_bytes = static_dim(encoder.output, -1)
    if row_bytes not in (None, width):
        yield f"{where} has rows of {row_bytes} bytes"
    past = Encode.past.of(encoder.node)
    if cache.past is not None and (past is None or past.name != cache.past):
        yield f"{where} has the cache {None if past is None else past.name}"
    if not all(shares_length(encoder, attention, plan) for attention in layer.attentions):
        yield f"{where} has another length than attention"
    for slot, shared in SHARED[encoder.role].items():
        operand = slot.of(encoder.node)
        if slot is not Encode.past_length and any(
            shared.of(attention.node) is not operand for attention in layer.attentions
        ):
            yield f"attention has another {shared.name} than {where}"
    padding = Encode.left_padding.of(encoder.node)
    if padding is not None and any(each.left_padding is not padding for each in layer.attentions):
        yield f"attention has another left_padding than {where}"
    yield from _attributes(where, encoder.node, encode_attributes(plan, layer.plan, encoder.role))


def _tables(encoder: EncodeNode) -> Iterator[str]:
    present, codec = encoder.cache.present, encoder.codec
    for slot, size in ((Encode.centroids, codec.levels), (Encode.boundaries, codec.boundaries)):
        if not codec.is_rotated:
            continue
        table, name = _array(slot.of(encoder.node)), slot.name
        if table is None:
            yield f"the {name} of {present} are not an initializer"
            continue
        if table.shape != (size,) or table.dtype != np.float32:
            yield f"the {name} of {present} are {table.dtype} {table.shape}"
            continue
        # The lowest integer of two's complement has no positive partner.
        inner = table[1:] if codec.is_signed else table
        if not (np.diff(table) > 0).all() or not np.array_equal(inner, -inner[::-1]):
            yield f"the {name} of {present} are not sorted and antisymmetric"


def _offset(encoder: EncodeNode, layer: LayerPlan) -> Iterator[str]:
    present, offset = encoder.cache.present, encoder.offset
    if offset is None:
        return
    array = _array(offset)
    sizes = (layer.kv_num_heads, layer.head_size)
    if array is None or array.shape[1:] != sizes or not len(array) or array.dtype != np.float32:
        yield f"the offset of {present} is not a float32 initializer of its heads' size"
    elif not np.isfinite(array).all():
        yield f"the offset of {present} is not finite"
    elif not layer.centered and array.any():
        yield f"the offset of {present} is not zero"
    elif encoder.cache.rotary and len(array) < _COSINES_AND_SINES:
        yield f"the offset of {present} has {len(array)} row, and turns"


def _frequencies(encoder: EncodeNode, layer: LayerPlan) -> Iterator[str]:
    if encoder.frequencies is None:
        return
    present, array = encoder.cache.present, _array(encoder.frequencies)
    sizes = (layer.head_size,) if encoder.cache.rotary else (1,)
    if array is None or array.shape != sizes or array.dtype != np.float32:
        yield f"the frequencies of {present} are not a float32 initializer of {sizes[0]} numbers"
    elif not (np.abs(array) <= np.float32(np.pi)).all():
        yield f"the frequencies of {present} are not within half a turn of a slot"


def _search(encoder: EncodeNode, layer: LayerPlan, plan: Plan) -> Iterator[str]:
    present, codec = encoder.cache.present, encoder.codec
    if encoder.gains is not None and codec.searches:
        array = _array(encoder.gains)
        if array is None or array.shape != (plan.gains,) or array.dtype != np.float32:
            yield f"the gains of {present} are not {plan.gains} float32 numbers"
        elif not (np.isfinite(array) & ((array > 0) | codec.is_signed)).all():
            yield f"the gains of {present} are not positive"
    if encoder.feedback is None:
        return
    array = _array(encoder.feedback)
    feeds_back = encoder.cache.feedback
    sizes = (layer.kv_num_heads, layer.head_size, layer.head_size) if feeds_back else (1,)
    if array is None or array.shape != sizes or array.dtype != np.float32:
        yield f"the error feedback of {present} is not a float32 initializer of its heads' size"
    elif feeds_back and not (
        np.isfinite(array).all() and (np.diagonal(array, axis1=1, axis2=2) > 0).all()
    ):
        yield f"the error feedback of {present} has moments that no queries have"


def _optional_inputs(node: ir.Node, features: Features) -> Iterator[str]:
    """Check that a node has the inputs that the features of its model bring, and no others."""
    for slot in BY_NAME[node.op_type].inputs:
        if slot.is_optional and (slot.of(node) is not None) != (slot.when <= features):
            names = " and ".join(feature.name for feature in slot.when)
            yield f"the input {slot.name} of {node.name} is not as planned ({names})"


def _attention(attention: AttentionNode, layer: ConvertedLayer, plan: Plan) -> Iterator[str]:
    encoded = (layer.key.vectors, layer.value.vectors) if plan.has_window else (None, None)
    if (attention.new_keys, attention.new_values) != encoded:
        yield "attention has other new keys and values than what is encoded"
    yield from _attributes("attention", attention.node, attention_attributes(plan, layer.plan))


def _attributes(where: str, node: ir.Node, expected: dict[str, Any]) -> Iterator[str]:
    """Compare attributes with the plan; what it does not name has its default, or is not there."""
    for attribute in BY_NAME[node.op_type].attributes:
        name, value = attribute.name, expected.get(attribute.name, attribute.default)
        stored, missing = node.attributes.get(name), None if attribute.name in expected else value
        actual = missing if stored is None else stored.value
        is_same = actual == value
        if isinstance(value, float) and isinstance(actual, float):
            is_same = abs(actual - value) <= _ROUNDING * abs(value)
        if not is_same:
            yield f"{where} has {name} {actual}, not {value}"


def _rotation(value: ir.Value | None, layer: LayerPlan, codec: Codec) -> Iterator[str]:
    matrix = _array(value)
    size = layer.head_size
    shape = (size, codec.coordinates(size))
    if matrix is None or matrix.shape != shape or matrix.dtype != np.float32:
        yield "the rotation is not a float32 initializer of the head's size"
        return
    if not np.isfinite(matrix[:, size:]).all():
        yield "the projection beside the rotation is not finite"
    # What stands beside the rotation is the projection of prod, which is any matrix.
    wide = matrix[:, :size].astype(np.float64)
    error = float(np.abs(wide.T @ wide - np.eye(size)).max())
    if not error <= ORTHOGONALITY:
        yield f"the rotation is not orthogonal (by {error:.1e})"


def _array(value: ir.Value | None) -> np.ndarray[Any, np.dtype[Any]] | None:
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()
