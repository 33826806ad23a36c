"""Tell of an operator whether it leaves tokens apart, from the axes that they lie on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, integers
from tq_onnx.graph.sizerules import REDUCTIONS, operand
from tq_onnx.targets.paged.states import STATE_SLOTS

_MICROSOFT: Final = "com.microsoft"


class Tokenwise(Protocol):
    """What rules ask of the values that hold something of tokens."""

    def holds(self, value: ir.Value | None) -> bool:
        """Return True if a value holds something of each token."""

    def axis(self, value: ir.Value) -> int:
        """Return the axis that tokens lie on."""

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Return the sizes of a value in the call that was looked at."""

    def is_counted(self, value: ir.Value | None) -> bool:
        """Return True if a value differs with the number of tokens."""

    def fixed(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Return the integers that a value is in every call; None if they are not known."""

    def repeats_tokens(self, value: ir.Value, copies: int) -> None:
        """Note that all tokens follow one another so often on their axis."""


_LAST_AXIS: Final = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Softmax"),
        *("LogSoftmax", "LpNormalization", "TopK", "Hardmax"),
        *(
            f"{_MICROSOFT}.{name}"
            for name in (
                *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
                *("SimplifiedLayerNormalization", "MatMulNBits", "MatMulBnb4"),
            )
        ),
    }
)
"""Their attribute ``axis`` is the last one where they do not say, or they have none."""
_ALONG: Final[Mapping[str, int]] = {
    **{"Split": 0, "Concat": 0, "ArgMax": 0, "ArgMin": 0},
    **{"GatherElements": 0, "ScatterElements": 0},
}
"""Operators that work along an axis, and the default of the attribute."""
_MATRIX_RANK: Final = 2


def is_fill(value: ir.Value) -> bool:
    """Return True if a value is one number, or one row, repeated."""
    node = value.producer()
    return node is not None and node.op_type in ("ConstantOfShape", "Expand")


def _stateful(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    """Return True for packed tokens, which the operator keeps apart by request."""
    return all(of.holds(value) and of.axis(value) == 0 for value in data)


def _reduction(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    axes = integers(operand(node, 1))
    if axes is None and "axes" in node.attributes:
        axes = tuple(node.attributes["axes"].as_ints())
    rank = len(of.shape(data[0]))
    return bool(axes) and of.axis(data[0]) not in {axis % rank for axis in axes or ()}


def _last(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    if not of.holds(data[0]) or any(of.holds(one) for one in data[2:]):
        return False
    rank, axis = len(of.shape(data[0])), of.axis(data[0])
    skips = node.op_type.startswith("Skip")
    if len(data) > 1 and of.holds(data[1]) and (not skips or of.axis(data[1]) != axis):
        return False
    return axis < attribute_int(node, "axis", -1) % rank


def _along(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    rank = len(of.shape(data[0])) if of.holds(data[0]) else len(of.shape(node.outputs[0]))
    axis = attribute_int(node, "axis", _ALONG[node.op_type]) % rank
    tokens = of.axis(node.outputs[0])
    if node.op_type == "GatherElements" and not of.holds(data[0]):
        return axis == tokens  # each number comes from the place that its index names
    if node.op_type in ("ArgMax", "ArgMin") and not attribute_int(node, "keepdims", 1):
        tokens = of.axis(data[0])
    if axis == tokens:
        return False
    return all(of.axis(one) == tokens if of.holds(one) else is_fill(one) for one in data)


def _transposition(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    return of.axis(data[0]) >= 0


def _product(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    left, right = data[:2]
    if any(attribute_int(node, f"transBatch{side}", 0) for side in "AB"):
        return False
    if of.holds(left) and of.holds(right):
        # A product for each token, of two matrices of its own.
        tokens = {(len(of.shape(v)) - of.axis(v), of.shape(v)[of.axis(v)]) for v in (left, right)}
        return len(tokens) == 1 and min(tokens)[0] > _MATRIX_RANK
    held = left if of.holds(left) else right
    shape, axis = of.shape(held), of.axis(held)
    turned = attribute_int(node, "transA" if held is left else "transB", 0)
    summed = len(shape) - 1 if (held is left) != bool(turned) else len(shape) - 2
    if axis == summed or (len(data) > 2 and of.holds(data[2])):
        return False
    if len(shape) == 2:
        return True
    other = of.shape(right if held is left else left)
    return len(other) <= 2 or axis >= len(shape) - 2


def _gathering(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    table, indices = data[:2]
    if of.holds(table) and of.holds(indices):
        return False
    if of.holds(indices):
        return of.axis(indices) >= 0
    axis = attribute_int(node, "axis", 0) % len(of.shape(table))
    return axis != of.axis(table)


def _gathering_parts(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    """Return True for parts along axes in front of the tokens, the same in every call."""
    table, indices = data[:2]
    if of.holds(indices) or attribute_int(node, "batch_dims", 0):
        return False
    shape, parts, by = (of.shape(value) for value in (table, node.outputs[0], indices))
    return len(shape) - len(parts) + len(by) - 1 <= of.axis(table)


def _packed_gathering(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    return of.holds(data[1]) and not of.holds(data[0])


def _slice(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    """Return True for a Slice along other axes, or one that leaves all tokens as they are."""
    axes, steps = integers(operand(node, 3)), integers(operand(node, 4))
    if steps is not None and min(steps, default=1) < 1:
        return False
    if operand(node, 4) is not None and steps is None:
        return False
    rank, axis = len(of.shape(data[0])), of.axis(data[0])
    if axes is None:
        axes = tuple(range(len(integers(operand(node, 1)) or (0,) * rank)))
    along = {each % rank for each in axes}
    if axis in along:
        starts, ends = integers(operand(node, 1)), integers(operand(node, 2))
        return along == {axis} and starts == (0,) and ends is not None and ends[0] >= 1 << 31
    return not any(of.is_counted(one) for one in node.inputs[1:3])


def _tile(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    """Return True for repeats of a fixed number; those of all tokens are noted."""
    repeats, axis = of.fixed(operand(node, 1)), of.axis(data[0])
    if repeats is None or len(repeats) != len(of.shape(data[0])):
        return False
    of.repeats_tokens(node.outputs[0], repeats[axis])
    return True


def _padding(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    """Return True for constants that are added along other axes."""
    pads, is_all = of.fixed(operand(node, 1)), operand(node, 3) is None
    mode = node.attributes.get_string("mode", "constant")
    rank, axis = len(of.shape(data[0])), of.axis(data[0])
    if pads is None or not is_all or mode != "constant" or of.holds(operand(node, 2)):
        return False
    return len(pads) == 2 * rank and pads[axis] == pads[axis + rank] == 0


def _one_hot(of: Tokenwise, node: ir.Node, data: list[ir.Value]) -> bool:
    return of.axis(data[0]) >= 0


RULES: Final[Mapping[str, Callable[[Tokenwise, ir.Node, list[ir.Value]], bool]]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(_LAST_AXIS, _last),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(STATE_SLOTS, _stateful),
    "Transpose": _transposition,
    "MatMul": _product,
    "Gemm": _product,
    f"{_MICROSOFT}.FusedMatMul": _product,
    "Gather": _gathering,
    f"{_MICROSOFT}.GatherBlockQuantized": _packed_gathering,
    "GatherND": _gathering_parts,
    "Slice": _slice,
    "OneHot": _one_hot,
    "Tile": _tile,
    "Pad": _padding,
}
"""What tells it of each operator that reads something of tokens."""
