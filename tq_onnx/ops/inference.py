"""Type and shape inference of the operators on caches, called by onnx with an ``InferenceContext``.

What is static must agree; what is symbolic or unknown is let through. Sizes are ``int``, ``str``
(a symbol) or None (unknown). The tables of a cache whose codec has no use for them are not looked
at, as no runtime looks at them. Rows may be wider than their codec needs.
"""

from __future__ import annotations

from typing import Final

import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx.shape_inference import InferenceContext

from tq_onnx.codec.kind import NORM_CORRECTIONS
from tq_onnx.codec.window import Window
from tq_onnx.ops.node import Node, Size
from tq_onnx.ops.operator import Attribute
from tq_onnx.ops.operators import Attention, Encode, PagedAttention, PagedEncode

_ROTATIONS: Final = Attention.key_rotation, Attention.value_rotation
_CACHES: Final = (
    (Attention.key_cache, Attention.key_centroids),
    (Attention.value_cache, Attention.value_centroids),
)


def infer_encode(context: InferenceContext) -> None:
    """Infer present: uint8 [B, N, S, W]."""
    node = Node(context, Encode.vectors)
    node.choice(Encode.codec_index)
    batch, heads, new, head_size = node.shape(Encode.vectors, 4)
    past_batch, past_heads, capacity, width = node.shape(Encode.past, 4)
    (lengths,) = node.shape(Encode.past_length, 1)
    batch = node.same("the batch size of vectors and past", batch, past_batch)
    node.one_of("the size of past_length", lengths, 1, batch)
    node.one_of("the size of left_padding", *node.shape(Encode.left_padding, 1), 1, batch)
    heads, head_size = _rows(node, heads, past_heads, head_size, width)
    window = node.window(Encode.recent, Encode.sinks, Encode.overlay_rows)
    node.overlay(Encode.past, window, head_size, width)
    slots = _slots(context, capacity, new, window)
    node.output(Encode.present, onnx.TensorProto.UINT8, [batch, heads, slots, width])


def _rows(
    node: Node, heads: Size, past_heads: Size, head_size: Size, width: Size
) -> tuple[Size, Size]:
    """Check what rows are made with; return the heads and their size."""
    codec = node.codec(Encode.codec, Encode.bits)
    node.flag(Encode.norm_correction, NORM_CORRECTIONS)
    heads = node.same("the number of heads of vectors and past", heads, past_heads)
    head_size = node.rotation(Encode.rotation, codec, head_size)
    node.codebook(Encode.centroids, codec)
    node.codebook(Encode.boundaries, codec, is_boundaries=True)
    node.offset(Encode.offset, heads, head_size, Encode.frequencies)
    node.search(Encode.gains, Encode.feedback, codec, heads, head_size)
    node.row_bytes(Encode.past, codec, head_size, width)
    return heads, head_size


def infer_attention(context: InferenceContext) -> None:
    """Infer output: the query's type and shape, [B, H, T, D]."""
    node = Node(context, Attention.query)
    node.flag(Attention.causal)
    node.choice(Attention.key_codec_index)
    node.choice(Attention.value_codec_index)
    batch, heads, new, head_size = node.shape(Attention.query, 4)
    key_batch, key_heads, key_slots, key_width = node.shape(Attention.key_cache, 4)
    value_batch, value_heads, value_slots, value_width = node.shape(Attention.value_cache, 4)
    batch = node.same("the batch size of query and caches", batch, key_batch, value_batch)
    slots = node.same("the number of slots of key_cache and value_cache", key_slots, value_slots)
    window = node.window(Attention.recent, Attention.sinks, Attention.overlay_rows)
    widths = key_width, value_width
    kv_heads, head_size = _reads(node, heads, (key_heads, value_heads), head_size, widths)
    for cache, width in zip((Attention.key_cache, Attention.value_cache), widths, strict=True):
        node.overlay(cache, window, head_size, width)
    if isinstance(new, int) and isinstance(slots, int) and window.overlay_rows + new > slots:
        overlay = f" and an overlay of {window.overlay_rows}" if window.overlay_rows else ""
        raise node.error(f"{new} new tokens{overlay} do not fit into caches of {slots} slots")
    for lengths in (Attention.past_length, Attention.left_padding):
        node.one_of(f"the size of {lengths.name}", *node.shape(lengths, 1), 1, batch)
    _check_bias(node, batch, heads, new)
    _check_new(node, window, [batch, kv_heads, new, head_size])
    sizes = [batch, heads, new, head_size]
    node.output(Attention.output, node.element_type(Attention.query), sizes)


def _reads(
    node: Node,
    heads: Size,
    cache_heads: tuple[Size, Size],
    head_size: Size,
    widths: tuple[Size, Size],
) -> tuple[Size, Size]:
    """Check what rows are read with; return the KV heads and the size of a head."""
    _check_bounds(node, Attention.sliding_window, Attention.softcap)
    kv_heads = node.same("the number of heads of key_cache and value_cache", *cache_heads)
    codecs = (
        node.codec(Attention.key_codec, Attention.key_bits),
        node.codec(Attention.value_codec, Attention.value_bits),
    )
    for rotation, codec in zip(_ROTATIONS, codecs, strict=True):
        head_size = node.rotation(rotation, codec, head_size)
    for (cache, centroids), codec, width in zip(_CACHES, codecs, widths, strict=True):
        node.row_bytes(cache, codec, head_size, width)
        node.codebook(centroids, codec)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % max(kv_heads, 1):
        raise node.error(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    (sinks,) = node.shape(Attention.head_sink, 1)
    node.same("the number of heads of query and head_sink", heads, sinks)
    _check_offsets(node, kv_heads, head_size)
    return kv_heads, head_size


def infer_paged_encode(context: InferenceContext) -> None:
    """Infer present: uint8 [P, S, N, W], as past."""
    node = Node(context, PagedEncode.vectors)
    batch, heads, _, head_size = node.shape(PagedEncode.vectors, 4)
    node.same("the batch of packed vectors and one", batch, 1)
    pages, slots, page_heads, width = node.shape(PagedEncode.past, 4)
    heads, _ = _rows(node, heads, page_heads, head_size, width)
    _check_packing(node)
    node.output(PagedEncode.present, onnx.TensorProto.UINT8, [pages, slots, heads, width])


def infer_paged_attention(context: InferenceContext) -> None:
    """Infer output: the query's type and shape, [1, H, T, D]."""
    node = Node(context, PagedAttention.query)
    batch, heads, new, head_size = node.shape(PagedAttention.query, 4)
    batch = node.same("the batch of packed queries and one", batch, 1)
    key_pages, key_slots, key_heads, key_width = node.shape(PagedAttention.key_cache, 4)
    value_pages, value_slots, value_heads, value_width = node.shape(PagedAttention.value_cache, 4)
    node.same("the number of pages of key_cache and value_cache", key_pages, value_pages)
    node.same("the slots of a page of key_cache and value_cache", key_slots, value_slots)
    cache_heads, widths = (key_heads, value_heads), (key_width, value_width)
    _, head_size = _reads(node, heads, cache_heads, head_size, widths)
    _check_packing(node)
    sizes = [batch, heads, new, head_size]
    node.output(PagedAttention.output, node.element_type(PagedAttention.query), sizes)


def _check_packing(node: Node) -> None:
    cumulative, past = PagedEncode.cumulative_sequence_length, PagedEncode.past_seqlens
    (bounds,) = node.shape(cumulative, 1)
    requests, _ = node.shape(PagedEncode.block_table, 2)
    ends = bounds - 1 if isinstance(bounds, int) else None
    node.same(
        f"the number of requests of {cumulative.name}, {past.name} and block_table",
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


def _check_bias(node: Node, batch: Size, heads: Size, new: Size) -> None:
    sizes = node.shape(Attention.attention_bias, 4)
    for axis, size in enumerate((batch, heads, new)):
        node.one_of(f"dimension {axis} of attention_bias", sizes[axis], 1, size)
    last = sizes[3]
    if isinstance(last, int) and isinstance(new, int) and 1 < last < new:
        raise node.error(f"attention_bias has {last} columns for {new} new tokens alone")


def _check_offsets(node: Node, heads: Size, head_size: Size) -> None:
    offsets = Attention.key_offset, Attention.value_offset
    if node.has(offsets[0]) != node.has(offsets[1]):
        raise node.error("key_offset and value_offset come together or not at all")
    rows = (
        node.offset(offsets[0], heads, head_size, Attention.key_frequencies),
        node.offset(offsets[1], heads, head_size),
    )
    node.same("the number of rows of key_offset and value_offset", *rows)


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
