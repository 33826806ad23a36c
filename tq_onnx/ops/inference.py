"""Type and shape inference of the operators on caches, called by onnx with an ``InferenceContext``.

What is static must agree; what is symbolic or unknown is let through. Sizes are ``int``, ``str``
(a symbol) or None (unknown). The tables of a cache whose codec has no use for them are not looked
at, as no runtime looks at them. Rows may be wider than their codec needs.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx.shape_inference import InferenceContext

from tq_onnx.codec.kind import NORM_CORRECTIONS
from tq_onnx.codec.window import Window
from tq_onnx.ops.node import Node, Size
from tq_onnx.ops.operator import Attribute, Input
from tq_onnx.ops.operators import Attention, Encode, PagedAttention, PagedEncode


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
    head_size = node.rotation(Encode.rotation, codec, heads, head_size)
    node.one_of("the size of past_length", lengths, 1, batch)
    node.codebook(Encode.centroids, codec)
    node.codebook(Encode.boundaries, codec, is_boundaries=True)
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
    _check_bounds(node, Attention.sliding_window, Attention.softcap)
    batch, heads, new, head_size = node.shape(Attention.query, 4)
    key_batch, key_heads, key_slots, key_width = node.shape(Attention.key_cache, 4)
    value_batch, value_heads, value_slots, value_width = node.shape(Attention.value_cache, 4)
    batch = node.same("the batch size of query and caches", batch, key_batch, value_batch)
    kv_heads = node.same("the number of heads of key_cache and value_cache", key_heads, value_heads)
    slots = node.same("the number of slots of key_cache and value_cache", key_slots, value_slots)
    key = node.codec(Attention.key_codec, Attention.key_bits)
    value = node.codec(Attention.value_codec, Attention.value_bits)
    head_size = node.rotation(Attention.key_rotation, key, kv_heads, head_size)
    head_size = node.rotation(Attention.value_rotation, value, kv_heads, head_size)
    window = node.window(Attention.recent, Attention.sinks, Attention.overlay_rows)
    for cache, centroids, codec, width in (
        (Attention.key_cache, Attention.key_centroids, key, key_width),
        (Attention.value_cache, Attention.value_centroids, value, value_width),
    ):
        node.row_bytes(cache, codec, head_size, width)
        node.codebook(centroids, codec)
        node.overlay(cache, window, head_size, width)
    _check_groups(node, heads, kv_heads)
    if isinstance(new, int) and isinstance(slots, int) and window.overlay_rows + new > slots:
        overlay = f" and an overlay of {window.overlay_rows}" if window.overlay_rows else ""
        raise node.error(f"{new} new tokens{overlay} do not fit into caches of {slots} slots")
    (lengths,) = node.shape(Attention.past_length, 1)
    node.one_of("the size of past_length", lengths, 1, batch)
    (padding,) = node.shape(Attention.left_padding, 1)
    node.one_of("the size of left_padding", padding, 1, batch)
    _check_bias(node, batch, heads, new)
    node.same(
        "the number of heads of query and head_sink", heads, *node.shape(Attention.head_sink, 1)
    )
    _check_offsets(node, Attention.key_offset, Attention.value_offset, kv_heads, head_size)
    _check_new(node, window, [batch, kv_heads, new, head_size])
    node.output(
        Attention.output, node.element_type(Attention.query), [batch, heads, new, head_size]
    )


def infer_paged_encode(context: InferenceContext) -> None:
    """Infer present: uint8 [P, S, N, W], as past.

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, PagedEncode.vectors)
    codec = node.codec(PagedEncode.codec, PagedEncode.bits)
    node.flag(PagedEncode.norm_correction, NORM_CORRECTIONS)
    node.choice(PagedEncode.codec_index)
    batch, heads, _, head_size = node.shape(PagedEncode.vectors, 4)
    node.same("the batch of packed vectors and one", batch, 1)
    pages, slots, page_heads, width = node.shape(PagedEncode.past, 4)
    heads = node.same("the number of heads of vectors and past", heads, page_heads)
    _check_packing(
        node,
        PagedEncode.cumulative_sequence_length,
        PagedEncode.past_seqlens,
        PagedEncode.block_table,
    )
    head_size = node.rotation(PagedEncode.rotation, codec, heads, head_size)
    node.codebook(PagedEncode.centroids, codec)
    node.codebook(PagedEncode.boundaries, codec, is_boundaries=True)
    node.offset(PagedEncode.offset, heads, head_size)
    node.search(PagedEncode.gains, PagedEncode.feedback, codec, heads, head_size)
    node.row_bytes(PagedEncode.past, codec, head_size, width)
    node.output(PagedEncode.present, onnx.TensorProto.UINT8, [pages, slots, heads, width])


def infer_paged_attention(context: InferenceContext) -> None:
    """Infer output: the query's type and shape, [1, H, T, D].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = Node(context, PagedAttention.query)
    node.choice(PagedAttention.key_codec_index)
    node.choice(PagedAttention.value_codec_index)
    _check_bounds(node, PagedAttention.sliding_window, PagedAttention.softcap)
    batch, heads, new, head_size = node.shape(PagedAttention.query, 4)
    batch = node.same("the batch of packed queries and one", batch, 1)
    key_pages, key_slots, key_heads, key_width = node.shape(PagedAttention.key_cache, 4)
    value_pages, value_slots, value_heads, value_width = node.shape(PagedAttention.value_cache, 4)
    node.same("the number of pages of key_cache and value_cache", key_pages, value_pages)
    node.same("the slots of a page of key_cache and value_cache", key_slots, value_slots)
    kv_heads = node.same("the number of heads of key_cache and value_cache", key_heads, value_heads)
    key = node.codec(PagedAttention.key_codec, PagedAttention.key_bits)
    value = node.codec(PagedAttention.value_codec, PagedAttention.value_bits)
    head_size = node.rotation(PagedAttention.key_rotation, key, kv_heads, head_size)
    head_size = node.rotation(PagedAttention.value_rotation, value, kv_heads, head_size)
    for cache, centroids, codec, width in (
        (PagedAttention.key_cache, PagedAttention.key_centroids, key, key_width),
        (PagedAttention.value_cache, PagedAttention.value_centroids, value, value_width),
    ):
        node.row_bytes(cache, codec, head_size, width)
        node.codebook(centroids, codec)
    _check_groups(node, heads, kv_heads)
    _check_packing(
        node,
        PagedAttention.cumulative_sequence_length,
        PagedAttention.past_seqlens,
        PagedAttention.block_table,
    )
    (sinks,) = node.shape(PagedAttention.head_sink, 1)
    node.same("the number of heads of query and head_sink", heads, sinks)
    _check_offsets(
        node, PagedAttention.key_offset, PagedAttention.value_offset, kv_heads, head_size
    )
    node.output(
        PagedAttention.output,
        node.element_type(PagedAttention.query),
        [batch, heads, new, head_size],
    )


def _check_packing(node: Node, cumulative: Input, past: Input, table: Input) -> None:
    (bounds,) = node.shape(cumulative, 1)
    requests, _ = node.shape(table, 2)
    ends = bounds - 1 if isinstance(bounds, int) else None
    node.same(
        f"the number of requests of {cumulative.name}, {past.name} and {table.name}",
        ends,
        *node.shape(past, 1),
        requests,
    )


def _check_bounds(node: Node, *attributes: Attribute) -> None:
    for attribute in attributes:
        is_int = attribute.kind is ir.AttributeType.INT
        number = node.integer(attribute) if is_int else node.number(attribute)
        if number < 0:
            raise node.error(f"{attribute.name} is {number:g}, below 0")


def _check_groups(node: Node, heads: Size, kv_heads: Size) -> None:
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % max(kv_heads, 1):
        raise node.error(f"{heads} query heads are not a multiple of {kv_heads} KV heads")


def _check_bias(node: Node, batch: Size, heads: Size, new: Size) -> None:
    sizes = node.shape(Attention.attention_bias, 4)
    for axis, size in enumerate((batch, heads, new)):
        node.one_of(f"dimension {axis} of attention_bias", sizes[axis], 1, size)
    last = sizes[3]
    if isinstance(last, int) and isinstance(new, int) and 1 < last < new:
        raise node.error(f"attention_bias has {last} columns for {new} new tokens alone")


def _check_offsets(node: Node, key: Input, value: Input, heads: Size, head_size: Size) -> None:
    if node.has(key) != node.has(value):
        raise node.error("key_offset and value_offset come together or not at all")
    node.same(
        "the number of rows of key_offset and value_offset",
        node.offset(key, heads, head_size),
        node.offset(value, heads, head_size),
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
