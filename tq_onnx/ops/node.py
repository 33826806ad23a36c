"""What type and shape inference sees of one node, with errors that name it.

Sizes are ``int``, ``str`` (a symbol) or None (unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
from onnx.shape_inference import InferenceContext, InferenceError

from tq_onnx.codec.spec import Codec, row_layout

Size = int | str | None

_ELEMENT_BITS: Final[dict[int, int]] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}


class Node:
    """What inference needs to see of one node, with errors that name it."""

    def __init__(self, context: InferenceContext, floats: str) -> None:
        """``floats`` is the name of the input that has the model's element type."""
        self.context = context
        self.floats = floats

    def error(self, text: str) -> InferenceError:
        """An error that names the node."""
        return InferenceError(f"{self.context.get_display_name()}: {text}")

    def sizes(self, index: int) -> list[Size] | None:
        """Sizes of an input; None if not even their number is known."""
        kind = self.context.get_input_type(index) if self.context.has_input(index) else None
        if kind is None or not kind.HasField("tensor_type"):
            return None
        if not kind.tensor_type.HasField("shape"):
            return None
        return [_size(dimension) for dimension in kind.tensor_type.shape.dim]

    def shape(self, index: int, name: str, rank: int) -> list[Size]:
        """Sizes of an input of that rank; unknown ones if its shape is unknown."""
        sizes = self.sizes(index)
        if sizes is None:
            return [None] * rank
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
        """An attribute."""
        return self._attribute(name).i

    def number(self, name: str) -> float:
        """An attribute."""
        return self._attribute(name).f

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute."""
        return tuple(self._attribute(name).ints)

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
        """Refuses an attribute that is not 0 or 1."""
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
        """Refuses a codebook of another size, less what is missing, if the codec has one."""
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

    def output(self, element_type: int, sizes: Sequence[Size] | None) -> None:
        """States output 0; None where its rank is unknown."""
        kind = onnx.TypeProto()
        kind.tensor_type.elem_type = element_type
        if sizes is not None:
            kind.tensor_type.shape.SetInParent()
        for size in sizes or ():
            dimension = kind.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dimension.dim_value = size
            elif size is not None:
                dimension.dim_param = size
        self.context.set_output_type(0, kind)


def _size(dimension: onnx.TensorShapeProto.Dimension) -> Size:
    if dimension.HasField("dim_value"):
        return dimension.dim_value
    return dimension.dim_param or None
