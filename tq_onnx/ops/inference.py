"""Type and shape inference of the operators on caches, called by onnx with an ``InferenceContext``.

What is static must agree; what is symbolic or unknown is let through. Sizes are ``int``, ``str``
(a symbol) or None (unknown). The tables of a cache whose codec has no use for them are not looked
at, as no runtime looks at them. Rows may be wider than their codec needs.
"""

from __future__ import annotations

import onnx
from onnx import numpy_helper
from onnx.shape_inference import InferenceContext

from tq_onnx.ops.node import Node, Size

_VECTORS, _PAST, _ENCODE_LENGTH, _ROTATION, _CENTROIDS, _BOUNDARIES, _OFFSET = range(7)
_QUERY, _KEY_CACHE, _VALUE_CACHE, _LENGTH = range(4)
_KEY_ROTATION, _KEY_CENTROIDS, _VALUE_ROTATION, _VALUE_CENTROIDS = range(4, 8)
_BIAS, _SINK, _KEY_OFFSET, _VALUE_OFFSET = range(8, 12)


def infer_encode(context: InferenceContext) -> None:
    """present: uint8 [B, N, S, W].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, "vectors")
    codec = node.codec("", _VECTORS)
    node.flag("norm_correction")
    node.choice("codec_index")
    batch, heads, new, head_size = node.shape(_VECTORS, "vectors", 4)
    past_batch, past_heads, capacity, width = node.shape(_PAST, "past", 4)
    (lengths,) = node.shape(_ENCODE_LENGTH, "past_length", 1)
    batch = node.same("the batch size of vectors and past", batch, past_batch)
    heads = node.same("the number of heads of vectors and past", heads, past_heads)
    head_size = node.rotation("rotation", codec, _ROTATION, head_size)
    node.one_of("the size of past_length", lengths, 1, batch)
    node.codebook("centroids", codec, _CENTROIDS)
    node.codebook("boundaries", codec, _BOUNDARIES, missing=1)
    node.offset("offset", _OFFSET, heads, head_size)
    node.row_bytes("past", codec, head_size, width)
    slots = _slots(context, capacity, new)
    node.output(onnx.TensorProto.UINT8, [batch, heads, slots, width])


def infer_attention(context: InferenceContext) -> None:
    """output: the query's type and shape, [B, H, T, D].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, "query")
    node.flag("causal")
    node.choice("key_codec_index")
    node.choice("value_codec_index")
    for name, number in (
        ("sliding_window", node.integer("sliding_window")),
        ("softcap", node.number("softcap")),
    ):
        if number < 0:
            raise node.error(f"{name} is {number:g}, below 0")
    batch, heads, new, head_size = node.shape(_QUERY, "query", 4)
    key_batch, key_heads, key_slots, key_width = node.shape(_KEY_CACHE, "key_cache", 4)
    value_batch, value_heads, value_slots, value_width = node.shape(_VALUE_CACHE, "value_cache", 4)
    batch = node.same("the batch size of query and caches", batch, key_batch, value_batch)
    kv_heads = node.same("the number of heads of key_cache and value_cache", key_heads, value_heads)
    slots = node.same("the number of slots of key_cache and value_cache", key_slots, value_slots)
    key, value = node.codec("key_", _QUERY), node.codec("value_", _QUERY)
    head_size = node.rotation("key_rotation", key, _KEY_ROTATION, head_size)
    head_size = node.rotation("value_rotation", value, _VALUE_ROTATION, head_size)
    for prefix, codec, width, index in (
        ("key_", key, key_width, _KEY_CENTROIDS),
        ("value_", value, value_width, _VALUE_CENTROIDS),
    ):
        node.row_bytes(f"{prefix}cache", codec, head_size, width)
        node.codebook(f"{prefix}centroids", codec, index)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % max(kv_heads, 1):
        raise node.error(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if isinstance(new, int) and isinstance(slots, int) and new > slots:
        raise node.error(f"{new} new tokens do not fit into caches of {slots} slots")
    (lengths,) = node.shape(_LENGTH, "past_length", 1)
    node.one_of("the size of past_length", lengths, 1, batch)
    _check_bias(node, batch, heads, new)
    node.same(
        "the number of heads of query and head_sink", heads, *node.shape(_SINK, "head_sink", 1)
    )
    _check_offsets(node, kv_heads, head_size)
    node.output(node.element_type(_QUERY), [batch, heads, new, head_size])


def _check_bias(node: Node, batch: Size, heads: Size, new: Size) -> None:
    sizes = node.shape(_BIAS, "attention_bias", 4)
    for axis, size in enumerate((batch, heads, new)):
        node.one_of(f"dimension {axis} of attention_bias", sizes[axis], 1, size)
    last = sizes[3]
    if isinstance(last, int) and isinstance(new, int) and 1 < last < new:
        raise node.error(f"attention_bias has {last} columns for {new} new tokens alone")


def _check_offsets(node: Node, heads: Size, head_size: Size) -> None:
    has_key, has_value = map(node.context.has_input, (_KEY_OFFSET, _VALUE_OFFSET))
    if has_key != has_value:
        raise node.error("key_offset and value_offset come together or not at all")
    node.same(
        "the number of rows of key_offset and value_offset",
        node.offset("key_offset", _KEY_OFFSET, heads, head_size),
        node.offset("value_offset", _VALUE_OFFSET, heads, head_size),
    )


def _slots(context: InferenceContext, capacity: Size, new: Size) -> Size:
    """S = max(P, max(past_length) + T), if all of it is constant."""
    lengths: onnx.TensorProto | None = context.get_input_data(_ENCODE_LENGTH)
    if lengths is None or not isinstance(capacity, int) or not isinstance(new, int):
        return None
    return max(capacity, int(numpy_helper.to_array(lengths).max(initial=0)) + new)
