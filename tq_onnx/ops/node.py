"""Show one node to type and shape inference, with errors that name it.

Sizes are ``int``, ``str`` (a symbol) or None (unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
from onnx.shape_inference import InferenceContext, InferenceError

from tq_onnx.codec.search import MAX_GAINS
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.window import Window, rows_per_entry
from tq_onnx.ops.operator import Attribute, Input, Output

Size = int | str | None

_ELEMENT_BITS: Final[dict[int, int]] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}


class Node:
    """The inputs and attributes of one node, with errors that name it."""

    def __init__(self, context: InferenceContext, floats: Input) -> None:
        """Read the node; ``floats`` is the input with the model's element type and head size.

        Inputs of other forms of the operator are those of the same names.
        """
        self.context = context
        self.floats = floats
        self._inputs = floats.operator.by_name

    def error(self, text: str) -> InferenceError:
        """Return an error that names the node."""
        return InferenceError(f"{self.context.get_display_name()}: {text}")

    def has(self, one: Input) -> bool:
        """Return whether the node has an input."""
        return one.name in self._inputs and bool(self.context.has_input(self._slot(one)))

    def _slot(self, one: Input) -> int:
        return self._inputs[one.name].slot

    def sizes(self, one: Input) -> list[Size] | None:
        """Return the sizes of an input; None if not even their number is known."""
        kind = self.context.get_input_type(self._slot(one)) if self.has(one) else None
        if kind is None or not kind.HasField("tensor_type"):
            return None
        if not kind.tensor_type.HasField("shape"):
            return None
        return [_size(dimension) for dimension in kind.tensor_type.shape.dim]

    def shape(self, one: Input, rank: int) -> list[Size]:
        """Return the sizes of an input of that rank; unknown ones if its shape is unknown."""
        sizes = self.sizes(one)
        if sizes is None:
            return [None] * rank
        if len(sizes) != rank:
            raise self.error(f"{one.name} has {len(sizes)} dimensions, not {rank}")
        return sizes

    def same(self, what: str, *sizes: Size) -> Size:
        """Return the size that all stand for: a number if one of them is."""
        numbers = sorted({size for size in sizes if isinstance(size, int)})
        if len(numbers) > 1:
            raise self.error(f"{what} differs: {' and '.join(map(str, numbers))}")
        if numbers:
            return numbers[0]
        return next((size for size in sizes if size is not None), None)

    def one_of(self, what: str, size: Size, *allowed: Size) -> None:
        """Refuse a size that is none of the allowed ones, where all are known."""
        numbers = [number for number in allowed if isinstance(number, int)]
        if isinstance(size, int) and len(numbers) == len(allowed) and size not in numbers:
            raise self.error(f"{what} is {size}, not {' or '.join(map(str, numbers))}")

    def integer(self, attribute: Attribute) -> int:
        """Return an attribute of that type."""
        return self._attribute(attribute).i

    def number(self, attribute: Attribute) -> float:
        """Return an attribute of that type."""
        return self._attribute(attribute).f

    def integers(self, attribute: Attribute) -> tuple[int, ...]:
        """Return an attribute of that type."""
        return tuple(self._attribute(attribute).ints)

    def codec(self, kind: Attribute, bits: Attribute) -> Codec:
        """Return the codec that two attributes say."""
        name = self._attribute(kind).s.decode(errors="replace")
        try:
            codec = Codec(name, self.integer(bits))
        except ValueError as error:
            raise self.error(str(error)) from error
        width = _ELEMENT_BITS.get(self.element_type(self.floats), codec.bits)
        if codec.is_raw and codec.bits != width:
            raise self.error(
                f"{bits.name} is {codec.bits}, but {codec.kind} rows hold the "
                f"{width}-bit elements of its float inputs"
            )
        return codec

    def element_type(self, one: Input) -> int:
        """Return the element type of an input as ONNX numbers it; 0 if it is not known."""
        kind = self.context.get_input_type(self._slot(one)) if self.has(one) else None
        return 0 if kind is None else int(kind.tensor_type.elem_type)

    def _attribute(self, attribute: Attribute) -> onnx.AttributeProto:
        value: onnx.AttributeProto | None = self.context.get_attribute(attribute.name)
        if value is None:
            raise self.error(f"attribute {attribute.name} is missing")
        return value

    def flag(self, attribute: Attribute, values: Sequence[int] = (0, 1)) -> None:
        """Refuse an attribute that is not one of these numbers."""
        if self.integer(attribute) not in values:
            known = " or ".join(map(str, values))
            raise self.error(f"{attribute.name} is {self.integer(attribute)}, not {known}")

    def choice(self, attribute: Attribute) -> None:
        """Refuse a number below 0; it may be missing."""
        number = self.context.get_attribute(attribute.name)
        if number is not None and number.i < 0:
            raise self.error(f"{attribute.name} is {number.i}, below 0")

    def window(self, recent: Attribute, sinks: Attribute, overlay_rows: Attribute) -> Window:
        """Return the exact window that a node says; none where it says nothing."""
        attributes = (recent, sinks, overlay_rows)
        numbers = {each.name: self.context.get_attribute(each.name) for each in attributes}
        for name, number in numbers.items():
            if number is not None and number.i < 0:
                raise self.error(f"{name} is {number.i}, below 0")
        return Window(*(0 if number is None else number.i for number in numbers.values()))

    def overlay(self, cache: Input, window: Window, head_size: Size, width: Size) -> None:
        """Refuse an overlay that has less room than the entries need, unless there is none."""
        if not isinstance(head_size, int) or not isinstance(width, int) or not width:
            return
        needed = window.entries * rows_per_entry(head_size, width)
        if not window.takes_spare_rows and window.overlay_rows < needed:
            raise self.error(
                f"overlay_rows is {window.overlay_rows}, but {window.entries} entries in rows of "
                f"{width} bytes of {cache.name} need {needed}"
            )

    def row_bytes(self, cache: Input, codec: Codec, head_size: Size, width: Size) -> None:
        """Refuse rows that have less room than the codec needs."""
        if not isinstance(head_size, int):
            return
        try:
            needed = row_layout(codec, head_size).row_bytes
        except ValueError as error:
            raise self.error(str(error)) from error
        if isinstance(width, int) and width < needed:
            raise self.error(
                f"{cache.name} has rows of {width} bytes, but {codec} at head size {head_size} "
                f"needs {needed}"
            )

    def rotation(self, table: Input, codec: Codec, head_size: Size) -> Size:
        """Return the head size, checked against a rotation [D, C] if the codec has one."""
        if not codec.is_rotated:
            return head_size
        rows, columns = self.shape(table, 2)
        head_size = self.same(self._head_size_of(table), head_size, rows)
        if isinstance(head_size, int):
            what = f"the width of {table.name} for {codec}"
            self.one_of(what, columns, codec.coordinates(head_size))
        return head_size

    def codebook(self, table: Input, codec: Codec, *, is_boundaries: bool = False) -> None:
        """Refuse centroids, or boundaries, of another number, if the codec has any."""
        if not codec.is_rotated:
            return
        (size,) = self.shape(table, 1)
        expected = codec.boundaries if is_boundaries else codec.levels
        self.one_of(f"the size of {table.name} for {codec}", size, expected)

    def offset(
        self, table: Input, heads: Size, head_size: Size, frequencies: Input | None = None
    ) -> Size:
        """Return the rows of an offset [P, N, D] that does not turn; None if there is none.

        Args:
            frequencies: those that it turns with, [D], or [1] where it does not; None for none.
        """
        rows, offset_heads, offset_size = self.shape(table, 3)
        self.same(f"the number of heads of {table.name} and of the cache", heads, offset_heads)
        self.same(self._head_size_of(table), head_size, offset_size)
        if rows == 0:
            raise self.error(f"{table.name} has no rows")
        if frequencies is None or not self.has(frequencies):
            return rows
        if not self.has(table):
            raise self.error(f"{frequencies.name} has no {table.name} to turn")
        (size,) = self.shape(frequencies, 1)
        if size == 1:
            return rows
        self.same(self._head_size_of(frequencies), head_size, size)
        if isinstance(size, int) and rows == 1:
            raise self.error(f"{table.name} turns and has one row, not one of cosines and of sines")
        return None

    def search(
        self, gains: Input, feedback: Input, codec: Codec, heads: Size, head_size: Size
    ) -> None:
        """Refuse gains [G] and feedback [N, D, D] or [1] of other sizes, if the codec has any."""
        if not codec.searches:
            return
        (count,) = self.shape(gains, 1)
        if isinstance(count, int) and not 1 <= count <= MAX_GAINS:
            raise self.error(f"{gains.name} has {count} numbers, not 1 to {MAX_GAINS}")
        if self.sizes(feedback) == [1]:
            return
        matrices, rows, columns = self.shape(feedback, 3)
        self.same(f"the number of heads of {feedback.name} and of the cache", heads, matrices)
        self.same(self._head_size_of(feedback), head_size, rows, columns)

    def _head_size_of(self, table: Input) -> str:
        return f"the head size of {self.floats.name} and {table.name}"

    def output(self, one: Output, element_type: int, sizes: Sequence[Size] | None) -> None:
        """State an output; ``sizes`` is None where its rank is unknown."""
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
        self.context.set_output_type(one.slot, kind)


def _size(dimension: onnx.TensorShapeProto.Dimension) -> Size:
    if dimension.HasField("dim_value"):
        return dimension.dim_value
    return dimension.dim_param or None
