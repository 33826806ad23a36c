"""Type and shape inference of both operators, called by onnx with an ``InferenceContext``.

What is static must agree; what is symbolic or unknown is let through. Sizes are ``int``, ``str``
(a symbol) or None (unknown). The tables of a cache whose codec has no use for them are not looked
at, as no runtime looks at them. Rows may be wider than their codec needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
from onnx import numpy_helper
from onnx.shape_inference import InferenceContext, InferenceError

from tq_onnx.codec.spec import Codec, row_layout

Size = int | str | None

_ELEMENT_BITS: Final[dict[int, int]] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}

_VECTORS, _PAST, _ENCODE_LENGTH, _ROTATION, _CENTROIDS, _BOUNDARIES, _OFFSET = range(7)
_QUERY, _KEY_CACHE, _VALUE_CACHE, _LENGTH = range(4)
_KEY_ROTATION, _KEY_CENTROIDS, _VALUE_ROTATION, _VALUE_CENTROIDS = range(4, 8)
_BIAS, _SINK, _KEY_OFFSET, _VALUE_OFFSET = range(8, 12)


class _Node:
    """What inference needs to see of one node, with errors that name it."""

    def __init__(self, context: InferenceContext, floats: str) -> None:
        """``floats`` is the name of the input that has the model's element type."""
        self.context = context
        self.floats = floats

    def error(self, text: str) -> InferenceError:
        return InferenceError(f"{self.context.get_display_name()}: {text}")

    def shape(self, index: int, name: str, rank: int) -> list[Size]:
        """Sizes of an input; unknown ones if its shape is unknown."""
        kind = self.context.get_input_type(index) if self.context.has_input(index) else None
        if kind is None or not kind.HasField("tensor_type"):
            return [None] * rank
        if not kind.tensor_type.HasField("shape"):
            return [None] * rank
        sizes = [_size(dimension) for dimension in kind.tensor_type.shape.dim]
        if len(sizes) != rank:
            raise self.error(f"{name} has {len(sizes)} dimensions, not {rank}")
        return sizes

    def same(self, what: str, *sizes: Size) -> Size:
        """The size that all stand for: a number if one of them is."""
        numbers = sorted({size for size in sizes if isinstance(size, int)})
        if len(numbers) > 1:
            raise self.error(f"{what} differs: {' and '.join(map(str, numbers))}")
        if numbers:
            return numbers[0]
        return next((size for size in sizes if size is not None), None)

    def one_of(self, what: str, size: Size, *allowed: Size) -> None:
        """A size that is 1 or what it broadcasts to."""
        numbers = [number for number in allowed if isinstance(number, int)]
        if isinstance(size, int) and len(numbers) == len(allowed) and size not in numbers:
            raise self.error(f"{what} is {size}, not {' or '.join(map(str, numbers))}")

    def integer(self, name: str) -> int:
        return self._attribute(name).i

    def number(self, name: str) -> float:
        return self._attribute(name).f

    def codec(self, prefix: str, elements: int) -> Codec:
        """The codec that the attributes say; ``elements`` is an input of the model's floats."""
        kind = self._attribute(f"{prefix}codec").s.decode(errors="replace")
        try:
            codec = Codec(kind, self.integer(f"{prefix}bits"))
        except ValueError as error:
            raise self.error(str(error)) from error
        bits = _ELEMENT_BITS.get(self.element_type(elements), codec.bits)
        if codec.is_raw and codec.bits != bits:
            raise self.error(
                f"{prefix}bits is {codec.bits}, but {codec.kind} rows hold the "
                f"{bits}-bit elements of its float inputs"
            )
        return codec

    def element_type(self, index: int) -> int:
        """0 if it is not known."""
        kind = self.context.get_input_type(index) if self.context.has_input(index) else None
        return 0 if kind is None else int(kind.tensor_type.elem_type)

    def _attribute(self, name: str) -> onnx.AttributeProto:
        attribute: onnx.AttributeProto | None = self.context.get_attribute(name)
        if attribute is None:
            raise self.error(f"attribute {name} is missing")
        return attribute

    def flag(self, name: str) -> None:
        if self.integer(name) not in (0, 1):
            raise self.error(f"{name} is {self.integer(name)}, not 0 or 1")

    def choice(self, name: str) -> None:
        """A number that may be missing."""
        attribute = self.context.get_attribute(name)
        if attribute is not None and attribute.i < 0:
            raise self.error(f"{name} is {attribute.i}, below 0")

    def row_bytes(self, what: str, codec: Codec, head_size: Size, width: Size) -> None:
        """Refuses rows that have less room than the codec needs."""
        if not isinstance(head_size, int):
            return
        try:
            needed = row_layout(codec, head_size).row_bytes
        except ValueError as error:
            raise self.error(str(error)) from error
        if isinstance(width, int) and width < needed:
            raise self.error(
                f"{what} has rows of {width} bytes, but {codec} at head size {head_size} "
                f"needs {needed}"
            )

    def rotation(self, name: str, codec: Codec, index: int, head_size: Size) -> Size:
        """The head size, checked against a rotation [D, C] if the codec has one."""
        if not codec.is_rotated:
            return head_size
        rows, columns = self.shape(index, name, 2)
        head_size = self.same(f"the head size of {self.floats} and {name}", head_size, rows)
        if isinstance(head_size, int):
            self.one_of(f"the width of {name} for {codec}", columns, codec.coordinates(head_size))
        return head_size

    def codebook(self, name: str, codec: Codec, index: int, missing: int = 0) -> None:
        if not codec.is_rotated:
            return
        (size,) = self.shape(index, name, 1)
        self.one_of(f"the size of {name} for {codec}", size, codec.levels - missing)

    def offset(self, name: str, index: int, heads: Size, head_size: Size) -> Size:
        """Rows of an offset [P, N, D]; None if there is none."""
        rows, offset_heads, offset_size = self.shape(index, name, 3)
        self.same(f"the number of heads of {name} and of the cache", heads, offset_heads)
        self.same(f"the head size of {self.floats} and {name}", head_size, offset_size)
        if rows == 0:
            raise self.error(f"{name} has no rows")
        return rows

    def output(self, element_type: int, sizes: Sequence[Size]) -> None:
        kind = onnx.TypeProto()
        kind.tensor_type.elem_type = element_type
        kind.tensor_type.shape.SetInParent()
        for size in sizes:
            dimension = kind.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dimension.dim_value = size
            elif size is not None:
                dimension.dim_param = size
        self.context.set_output_type(0, kind)


def infer_encode(context: InferenceContext) -> None:
    """present: uint8 [B, N, S, W].

    Raises:
        InferenceError: static sizes or attributes contradict each other.
    """
    node = _Node(context, "vectors")
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
    node = _Node(context, "query")
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
    query_type = context.get_input_type(_QUERY)
    node.output(query_type.tensor_type.elem_type, [batch, heads, new, head_size])


def _check_bias(node: _Node, batch: Size, heads: Size, new: Size) -> None:
    sizes = node.shape(_BIAS, "attention_bias", 4)
    for axis, size in enumerate((batch, heads, new)):
        node.one_of(f"dimension {axis} of attention_bias", sizes[axis], 1, size)
    last = sizes[3]
    if isinstance(last, int) and isinstance(new, int) and 1 < last < new:
        raise node.error(f"attention_bias has {last} columns for {new} new tokens alone")


def _check_offsets(node: _Node, heads: Size, head_size: Size) -> None:
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


def _size(dimension: onnx.TensorShapeProto.Dimension) -> Size:
    if dimension.HasField("dim_value"):
        return dimension.dim_value
    return dimension.dim_param or None
