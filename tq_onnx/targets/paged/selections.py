"""Follow tokens that a mask selects: NonZero lists them, a Gather reads their rows.

Experts are written so: each computes rows of its tokens, and a scatter puts them back. The entries
of such a list have an axis of their own. What is known of a list's numbers is which coordinates of
the mask they are made of, since a token's place in the call may choose rows of that token, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import operand

_COPIES: Final = frozenset({"Transpose", "Cast", "Identity"})
_RESHAPES: Final = frozenset({"Squeeze", "Unsqueeze", "Expand"})
"""These keep one place for each entry; of several they might mix the axes."""
_INTEGERS: Final = (int(ir.DataType.INT64), int(ir.DataType.INT32))


@dataclass(frozen=True)
class Place:
    """A number for each entry of a list: a sum of coordinates times factors, and a constant."""

    factors: tuple[int, ...]  #: of each coordinate of the mask
    constant: int = 0  #: what is added

    def __add__(self, term: Place) -> Place:
        factors = zip(self.factors, term.factors, strict=True)
        return Place(tuple(map(sum, factors)), self.constant + term.constant)

    def times(self, factor: int) -> Place:
        """Return the product with a number."""
        return Place(tuple(each * factor for each in self.factors), self.constant * factor)


@dataclass(frozen=True, eq=False)
class Selection:
    """What a value with an axis of entries is."""

    mask: ir.Value  #: what NonZero read
    axis: int  #: of the tokens in the mask
    sizes: tuple[int, ...]  #: of the mask
    #: the numbers, if they are known by coordinates; empty for other contents
    places: tuple[Place, ...] = ()

    @property
    def contents(self) -> Selection:
        """Rows of the same entries that are no places."""
        return replace(self, places=())

    def is_same_list(self, selection: Selection) -> bool:
        """Return True if the entries of both are the same, in the same order."""
        return self.mask is selection.mask

    def chooses(self, rows: int) -> bool:
        """Return True if the numbers are rows of each entry's token, in a table of such rows."""
        if len(self.places) != 1:
            return False
        place = self.places[0]
        beside = [
            (factor, size - 1)
            for axis, (factor, size) in enumerate(zip(place.factors, self.sizes, strict=True))
            if axis != self.axis
        ]
        most = place.constant + sum(factor * last for factor, last in beside)
        is_positive = place.constant >= 0 and all(factor >= 0 for factor, _ in beside)
        return place.factors[self.axis] == rows and is_positive and most < rows


def listed(mask: ir.Value, axis: int, sizes: Sequence[int]) -> Selection:
    """Return what NonZero makes of a mask: its coordinates, each once."""
    rank = len(sizes)
    units = (tuple(int(row == column) for row in range(rank)) for column in range(rank))
    return Selection(mask, axis, tuple(sizes), tuple(Place(unit) for unit in units))


def places_of(
    node: ir.Node,
    selections: Sequence[Selection | None],
    numbers: Sequence[int | None],
    axis: int,
) -> list[Selection] | None:
    """Return what the outputs of a node are that computes with places.

    Returns:
        None for a node that is not known to keep places.
    """
    first, name = selections[0], kind(node)
    if first is not None and (name in _COPIES or (name in _RESHAPES and len(first.places) == 1)):
        is_integer = name != "Cast" or attribute_int(node, "to", 0) in _INTEGERS
        return [first] if is_integer else None
    if name == "Split" and first is not None:
        parts = integers(operand(node, 1)) or (1,) * len(node.outputs)
        along = attribute_int(node, "axis", 0) % 2
        if along == axis or len(parts) != len(node.outputs) or sum(parts) != len(first.places):
            return None
        starts = [sum(parts[:index]) for index in range(len(parts))]
        return [
            replace(first, places=first.places[start : start + part])
            for start, part in zip(starts, parts, strict=True)
        ]
    return _computed(name, selections, numbers) if name in ("Add", "Mul") else None


def _computed(
    name: str, selections: Sequence[Selection | None], numbers: Sequence[int | None]
) -> list[Selection] | None:
    """Return a sum of places, or a product with a number."""
    left, right = selections
    if left is not None and right is not None:
        is_sum = name == "Add" and left.is_same_list(right)
        if not is_sum or len(left.places) != 1 or len(right.places) != 1:
            return None
        return [replace(left, places=(left.places[0] + right.places[0],))]
    selection, number = (left, numbers[1]) if left is not None else (right, numbers[0])
    if selection is None or number is None or len(selection.places) != 1:
        return None
    place = selection.places[0]
    result = (
        place.times(number) if name == "Mul" else replace(place, constant=place.constant + number)
    )
    return [replace(selection, places=(result,))]
