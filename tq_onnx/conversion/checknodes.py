"""What must hold of the operators in a converted model; a part of ``tq_onnx.conversion.check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.conversion.bake import codec_index
from tq_onnx.conversion.cachenodes import maker
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE
from tq_onnx.plan import CachePair, LayerPlan, Plan

ORTHOGONALITY: Final = 1e-5
"""Largest entry of ``R^T R - I``."""


def layer_violations(model: ir.Model, plan: Plan) -> Iterator[str]:
    """What does not hold of the operators of a converted model, a clause each."""
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    encoders = [node for node in nodes if node.op_type == ENCODE]
    readers = [node for node in nodes if node.op_type == ATTENTION]
    count = len(plan.layers)
    if len(encoders) != 2 * count or len(readers) != count:
        yield f"{len(encoders)} encoders and {len(readers)} attentions for {count} layers"
        return
    outputs = {value.name: value for value in model.graph.outputs}
    rotations: set[ir.Value | None] = set()
    for layer in plan.layers:
        label = f"layer {layer.layer}"
        made = []
        for pair, codec, width in (
            (layer.key, layer.key_of, layer.key_row_bytes),
            (layer.value, layer.value_of, layer.value_row_bytes),
        ):
            if width < row_layout(codec, layer.head_size).row_bytes:
                yield f"{label}: rows of {width} bytes are too short for {codec}"
            node = maker(outputs[pair.present])
            if node is None or node not in encoders:
                yield f"{label}: {pair.present} is not made by {ENCODE}"
                continue
            made.append(node)
            yield from (f"{label}: {text}" for text in _encoder(node, pair, codec, plan))
            yield from (f"{label}: {text}" for text in _offset(node, pair, layer, plan))
        if len(made) != 2:
            continue
        key, value = (node.outputs[0] for node in made)
        attention = [n for n in readers if n.inputs[1] is key and n.inputs[2] is value]
        if len(attention) != 1:
            yield f"{label}: {len(attention)} attentions read its caches"
            continue
        yield from (f"{label}: {text}" for text in _attention(attention[0], made, layer, plan))
        for node, codec in zip(made, layer.codecs, strict=True):
            rotation = node.inputs[3]
            if codec.is_rotated and rotation not in rotations:
                rotations.add(rotation)
                yield from (f"{label}: {text}" for text in _rotation(rotation, layer, codec))


def _encoder(node: ir.Node, pair: CachePair, codec: Codec, plan: Plan) -> Iterator[str]:
    past = node.inputs[1]
    if pair.past is not None and (past is None or past.name != pair.past):
        yield f"{pair.present} does not append to {pair.past}"
    yield from _attributes(
        node,
        {
            "codec": codec.kind,
            "bits": codec.bits,
            "norm_correction": int(plan.norm_correction and codec.corrects_norm),
            **codec_index(plan, "", codec),
        },
    )
    if not codec.is_rotated:
        return
    centroids, boundaries = _array(node.inputs[4]), _array(node.inputs[5])
    if centroids is None or boundaries is None:
        yield f"the codebook of {pair.present} is not an initializer"
        return
    for name, table, size in (
        ("centroids", centroids, codec.levels),
        ("boundaries", boundaries, codec.levels - 1),
    ):
        if table.shape != (size,) or table.dtype != np.float32:
            yield f"the {name} of {pair.present} are {table.dtype} {table.shape}"
        elif not (np.diff(table) > 0).all() or not np.array_equal(table, -table[::-1]):
            yield f"the {name} of {pair.present} are not sorted and antisymmetric"


def _offset(node: ir.Node, pair: CachePair, layer: LayerPlan, plan: Plan) -> Iterator[str]:
    offset = node.inputs[6] if len(node.inputs) > 6 else None
    if (offset is not None) != plan.centered:
        yield f"the offset of {pair.present} is not as planned"
    if offset is None:
        return
    array = _array(offset)
    sizes = (layer.kv_num_heads, layer.head_size)
    if array is None or array.shape[1:] != sizes or not len(array) or array.dtype != np.float32:
        yield f"the offset of {pair.present} is not a float32 initializer of its heads' size"
    elif not np.isfinite(array).all():
        yield f"the offset of {pair.present} is not finite"
    elif not layer.centered and array.any():
        yield f"the offset of {pair.present} is not zero"


def _attention(node: ir.Node, made: list[ir.Node], layer: LayerPlan, plan: Plan) -> Iterator[str]:
    key, value = made
    wired = {
        3: key.inputs[2],
        4: key.inputs[3],
        5: key.inputs[4],
        6: value.inputs[3],
        7: value.inputs[4],
    }
    if plan.centered:
        wired |= {10: (*key.inputs, None)[6], 11: (*value.inputs, None)[6]}
    inputs = (*node.inputs, *[None] * 12)
    if any(inputs[slot] is not wanted for slot, wanted in wired.items()):
        yield "attention and encoders do not share past length, rotation, codebook and offset"
    for slot, what, planned in ((8, "bias", layer.has_bias), (9, "sink", layer.has_sink)):
        if (inputs[slot] is not None) != planned:
            yield f"the {what} of attention is not as planned"
    yield from _attributes(
        node,
        {
            "causal": int(layer.causal),
            "sliding_window": layer.sliding_window,
            "key_codec": layer.key_codec,
            "key_bits": layer.key_bits,
            "value_codec": layer.value_codec,
            "value_bits": layer.value_bits,
            "scale": np.float32(layer.scale),
            "softcap": np.float32(layer.softcap),
            **codec_index(plan, "key_", layer.key_of),
            **codec_index(plan, "value_", layer.value_of),
        },
    )


def _attributes(node: ir.Node, wanted: dict[str, Any]) -> Iterator[str]:
    for name, value in wanted.items():
        attribute = node.attributes.get(name)
        found = None if attribute is None else attribute.value
        if found is None or type(value)(found) != value:
            yield f"{node.op_type} has {name} = {found!r} instead of {value!r}"


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
