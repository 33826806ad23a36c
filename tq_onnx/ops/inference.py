"""Type and shape inference of the operators on caches, called by onnx with an ``InferenceContext``.

What is static must agree; what is symbolic or unknown is let through. Sizes are ``int``, ``str``
(a symbol) or None (unknown). The tables of a cache whose codec has no use for them are not looked
at, as no runtime looks at them. Rows may be wider than their codec needs.
"""

from __future__ import annotations

import onnx
from onnx import numpy_helper
from onnx.shape_inference import InferenceContext

from tq_onnx.codec.kind import NORM_CORRECTIONS
from tq_onnx.codec.window import Window
from tq_onnx.ops.node import Node, Size
from tq_onnx.ops.operators import Attention, Encode


def infer_encode(context: InferenceContext) -> None:
    """Infer present: uint8 [B, N, S, W].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, Encode.vectors)
    codec = node.codec(Encode.codec, Encode.bits)
    node.flag(Encode.norm_correction, NORM_CORRECTIONS)
    node.choice(Encode.codec_index)
    batch, heads, new, head_size = node.shape(Encode.vectors, 4)
    past_batch, past_heads, capacity, width = node.shape(Encode.past, 4)
    (lengths,) = node.shape(Encode.past_length, 1)
    batch = node.same("the batch size of vectors and past", batch, past_batch)
    heads = node.same("the number of heads of vectors and past", heads, past_heads)
    head_size = node.rotation(Encode.rotation, codec, head_size)
    node.one_of("the size of past_length", lengths, 1, batch)
    node.codebook(Encode.centroids, codec)
    node.codebook(Encode.boundaries, codec, missing=1)
    node.offset(Encode.offset, heads, head_size)
    node.search(Encode.gains, Encode.feedback, codec, heads, head_size)
    node.row_bytes(Encode.past, codec, head_size, width)
    window = node.window(Encode.recent, Encode.sinks, Encode.overlay_rows)
    node.overlay(Encode.past, window, head_size, width)
    slots = _slots(context, capacity, new, window)
    node.output(Encode.present, onnx.TensorProto.UINT8, [batch, heads, slots, width])


def infer_attention(context: InferenceContext) -> None:
    """Infer output: the query's type and shape, [B, H, T, D].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, Attention.query)
    node.flag(Attention.causal)
    node.choice(Attention.key_codec_index)
    node.choice(Attention.value_codec_index)
    for attribute, number in (
        (Attention.sliding_window, node.integer(Attention.sliding_window)),
        (Attention.softcap, node.number(Attention.softcap)),
    ):
        if number < 0:
            raise node.error(f"{attribute.name} is {number:g}, below 0")
    batch, heads, new, head_size = node.shape(Attention.query, 4)
    key_batch, key_heads, key_slots, key_width = node.shape(Attention.key_cache, 4)
    value_batch, value_heads, value_slots, value_width = node.shape(Attention.value_cache, 4)
    batch = node.same("the batch size of query and caches", batch, key_batch, value_batch)
    kv_heads = node.same("the number of heads of key_cache and value_cache", key_heads, value_heads)
    slots = node.same("the number of slots of key_cache and value_cache", key_slots, value_slots)
    key = node.codec(Attention.key_codec, Attention.key_bits)
    value = node.codec(Attention.value_codec, Attention.value_bits)
    head_size = node.rotation(Attention.key_rotation, key, head_size)
    head_size = node.rotation(Attention.value_rotation, value, head_size)
    window = node.window(Attention.recent, Attention.sinks, Attention.overlay_rows)
    for cache, centroids, codec, width in (
        (Attention.key_cache, Attention.key_centroids, key, key_width),
        (Attention.value_cache, Attention.value_centroids, value, value_width),
    ):
        node.row_bytes(cache, codec, head_size, width)
        node.codebook(centroids, codec)
        node.overlay(cache, window, head_size, width)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % max(kv_heads, 1):
        raise node.error(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if isinstance(new, int) and isinstance(slots, int) and window.overlay_rows + new > slots:
        overlay = f" and an overlay of {window.overlay_rows}" if window.overlay_rows else ""
        raise node.error(f"{new} new tokens{overlay} do not fit into caches of {slots} slots")
    (lengths,) = node.shape(Attention.past_length, 1)
    node.one_of("the size of past_length", lengths, 1, batch)
    _check_bias(node, batch, heads, new)
    node.same(
        "the number of heads of query and head_sink", heads, *node.shape(Attention.head_sink, 1)
    )
    _check_offsets(node, kv_heads, head_size)
    _check_new(node, window, [batch, kv_heads, new, head_size])
    node.output(
        Attention.output, node.element_type(Attention.query), [batch, heads, new, head_size]
    )


def _check_bias(node: Node, batch: Size, heads: Size, new: Size) -> None:
    sizes = node.shape(Attention.attention_bias, 4)
    for axis, size in enumerate((batch, heads, new)):
        node.one_of(f"dimension {axis} of attention_bias", sizes[axis], 1, size)
    last = sizes[3]
    if isinstance(last, int) and isinstance(new, int) and 1 < last < new:
        raise node.error(f"attention_bias has {last} columns for {new} new tokens alone")


def _check_offsets(node: Node, heads: Size, head_size: Size) -> None:
    has_key, has_value = map(node.has, (Attention.key_offset, Attention.value_offset))
    if has_key != has_value:
        raise node.error("key_offset and value_offset come together or not at all")
    node.same(
        "the number of rows of key_offset and value_offset",
        node.offset(Attention.key_offset, heads, head_size),
        node.offset(Attention.value_offset, heads, head_size),
    )


def _check_new(node: Node, window: Window, sizes: list[Size]) -> None:
    for one in (Attention.new_keys, Attention.new_values):
        if window.entries and not node.has(one):
            raise node.error(f"{one.name} is missing, which a window needs")
        for size, wanted in zip(node.shape(one, 4), sizes, strict=True):
            node.same(f"a size of {one.name} and of the new tokens", size, wanted)


def _slots(context: InferenceContext, capacity: Size, new: Size, window: Window) -> Size:
    """Return S = max(P, overlay_rows + max(past_length) + T), if all of it is constant."""
    lengths: onnx.TensorProto | None = context.get_input_data(Encode.past_length.slot)
    if lengths is None or not isinstance(capacity, int) or not isinstance(new, int):
        return None
    longest = int(numpy_helper.to_array(lengths).max(initial=0))
    return max(capacity, window.overlay_rows + longest + new)
