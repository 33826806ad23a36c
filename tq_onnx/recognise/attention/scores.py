"""Follow decomposed attention scores forward: from Q K^T over the softmax to the values.

They are ``[B, H, T, S]``, or for a part of the way ``[B * H, T, S]``. That a Reshape between the
two changes nothing else follows from the sizes that it gives: see ``Scores.reshaped``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int, scalar
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import PRODUCTS, kind
from tq_onnx.graph.values import keeps_numbers, rank, static_dim
from tq_onnx.recognise.attention.products import product
from tq_onnx.recognise.attention.sinks import drops_the_last, shifted, sinks_beside
from tq_onnx.recognise.operands import Mask
from tq_onnx.recognise.site import GraphView

_MAX_STEPS: Final = 16
_HIDING: Final = -3e4
"""A fill that no score comes near. Scores of models with large biases in their projections reach
-1e4, a fill of some float16 exports, which does not hide a key from them as a bias would."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The way of the scores from Q K^T to the values."""

    scale: float  #: product of the constant factors before the softcap and the mask
    softcap: float  #: 0 for none
    masks: tuple[Mask, ...]  #: in the order in which they act
    softmax: ir.Node
    output_matmul: ir.Node  #: the product of the probabilities with the values
    #: scores without a value, ``[1, H, 1, 1]``; None if there are none
    sinks: ir.Value | None = None
    #: what each Reshape on the way makes, which has to be ``[B, H, T, S]`` or ``[B * H, T, S]``
    reshaped: tuple[ir.Value, ...] = ()


@dataclass
class _Effects:
    """What happens to the scores on their way to the softmax."""

    scale: float
    rank: int
    """Of the scores: 4, or 3 where batch and heads are one dimension."""
    reshaped: list[ir.Value] = field(default_factory=list)
    cap: float = 1.0
    capped: bool = False
    clamped: bool = False
    masks: list[Mask] = field(default_factory=list)
    sinks: ir.Value | None = None
    final: bool = False
    """True if nothing but the softmax may follow."""

    def pass_through(self, node: ir.Node, index: int) -> None:
        """Add the effect of a node that reads the scores by an input."""
        what = kind(node)
        if keeps_numbers(node):
            return
        if self.final:
            raise NoMatch(f"the scores go through {what} behind their sinks or maxima", node)
        if what in ("Mul", "Div"):
            self._scaled(node, index)
        elif what == "Tanh" and not self.capped and not self.masks:
            self.capped = True
        elif what == "Concat":
            self.sinks, self.final = sinks_beside(node, index), True
        elif what == "Add":
            self.masks.append(_checked(self._of_rank(_additive(node, index), node), node))
        elif what == "Where" and index in (1, 2):
            self.masks.append(_checked(self._of_rank(_selecting(node, index), node), node))
        elif what == "Max":
            self._clamp(node, index)
        elif what == "Reshape" and index == 0 and splits_or_merges_heads(node):
            self.reshape(node)
        else:
            raise NoMatch(f"the scores go through {what}", node)

    def reshape(self, node: ir.Node) -> None:
        """Go through a Reshape that splits or merges batch and heads."""
        self.reshaped.append(node.outputs[0])
        self.rank = 7 - self.rank

    def _of_rank(self, mask: Mask, node: ir.Node) -> Mask:
        """Return the mask of scores of this rank."""
        size = rank(mask.value)
        if self.rank == 3 and size is not None and size > 3:
            raise NoMatch(f"the scores are of rank 3, and the mask is of rank {size}", node)
        one_for_all = static_dim(mask.value, 0) == 1
        return replace(mask, merged=self.rank == 3 == size and not one_for_all)

    def _clamp(self, node: ir.Node, index: int) -> None:
        """Go through a least score, which only hidden keys may have (OPT)."""
        least = scalar(node.inputs[1 - index]) if len(node.inputs) == 2 else None
        if least is None or not least <= _HIDING:
            raise NoMatch("the scores are limited by something that visible keys may reach", node)
        self.clamped = True

    def _scaled(self, node: ir.Node, index: int) -> None:
        if self.clamped:
            raise NoMatch("the scores are scaled after a least score was put in", node)
        number = scalar(node.inputs[1 - index])
        if not number or (node.op_type == "Div" and index != 0):
            raise NoMatch("the scores are multiplied by something not constant", node)
        number = number if node.op_type == "Mul" else 1 / number
        if self.masks and number < 0:
            raise NoMatch("the scores are turned over after the mask was applied", node)
        self.masks = [_checked(mask.scaled(number), node) for mask in self.masks]
        if self.capped:
            self.cap *= number
        else:
            self.scale *= number


def follow_scores(matmul: ir.Node, view: GraphView) -> Scores:
    """Follow the scores from the product that makes them to the one that uses them."""
    effects = _Effects(product(matmul).factor, 3 if rank(matmul.outputs[0]) == 3 else 4)
    value = matmul.outputs[0]
    for _ in range(_MAX_STEPS):
        less = shifted(view.consumers(value))
        if less is not None:
            value, effects.final = less, True
            continue
        node, index = _only_reader(value, view)
        if kind(node) == "Softmax":
            _check_axis(node, view, effects.rank)
            output_matmul = _values(node, view, effects)
            # scores * scale / softcap went into the tanh, which is odd.
            return Scores(
                effects.scale * effects.cap if effects.capped else effects.scale,
                abs(effects.cap) if effects.capped else 0.0,
                tuple(effects.masks),
                node,
                output_matmul,
                effects.sinks,
                tuple(effects.reshaped),
            )
        effects.pass_through(node, index)
        value = node.outputs[0]
    raise NoMatch("the scores do not reach a softmax", matmul)


def probabilities_above(value: ir.Value | None, view: GraphView) -> ir.Node | None:
    """Return the softmax whose (guarded) result a value is; None if there is none."""
    node = _above_guards(value, view)
    return node if node is not None and node.op_type == "Softmax" else None


def _hands_on(node: ir.Node) -> bool:
    return (
        node.op_type in ("Dropout", "Slice") or keeps_numbers(node) or splits_or_merges_heads(node)
    )


def spelled_out(value: ir.Value | None, view: GraphView) -> bool:
    """Return True if a value is a quotient of exponentials: a softmax without its operator."""
    node = _above_guards(value, view)
    if node is None or node.op_type != "Div":
        return False
    above = _above_guards(node.inputs[0], view)
    return above is not None and above.op_type == "Exp"


def _above_guards(value: ir.Value | None, view: GraphView) -> ir.Node | None:
    """Return the producer of a value, past guards against NaN and changes of precision."""
    for _ in range(_MAX_STEPS):
        node = None if value is None else value.producer()
        if node is None or node not in view.live or node.domain != "":
            return None
        if node.op_type == "Where":
            value = node.inputs[2]
        elif _hands_on(node):
            value = node.inputs[0]
        else:
            return node
    return None


def splits_or_merges_heads(node: ir.Node) -> bool:
    """Return True if a Reshape is one from rank 3 to 4, or back."""
    source = node.inputs[0] if node.op_type == "Reshape" and node.inputs else None
    return source is not None and {rank(source), rank(node.outputs[0])} == {3, 4}


def _values(softmax: ir.Node, view: GraphView, effects: _Effects) -> ir.Node:
    """Return the MatMul with the values, past a guard against NaN.

    With sinks the last column is left out on the way.
    """
    value, cut = softmax.outputs[0], effects.sinks is not None
    for _ in range(_MAX_STEPS):
        readers = view.consumers(value)
        guard = [node for node, _ in readers if node.op_type == "IsNaN" and node.domain == ""]
        if guard:
            value = _guarded(guard[0], readers, view)
            continue
        node, index = _only_reader(value, view)
        if kind(node) in PRODUCTS and not cut:
            _check_values(node, index)
            return node
        if cut and index == 0 and drops_the_last(node):
            value, cut = node.outputs[0], False
            continue
        if index == 0 and (keeps_numbers(node) or _inactive_dropout(node)):
            value = node.outputs[0]
            continue
        if index == 0 and not cut and splits_or_merges_heads(node):
            effects.reshape(node)
            value = node.outputs[0]
            continue
        raise NoMatch(f"the probabilities go into {node.op_type}", node)
    raise NoMatch("the probabilities do not reach the values", softmax)


def _check_values(node: ir.Node, index: int) -> None:
    how = product(node)
    if how.left != index:
        raise NoMatch("the probabilities are the second operand of a matrix product", node)
    if how.factor != 1.0:
        raise NoMatch("the result is scaled", node)


def _guarded(is_nan: ir.Node, readers: list[tuple[ir.Node, int]], view: GraphView) -> ir.Value:
    where, index = _only_reader(is_nan.outputs[0], view)
    expected = {(is_nan, 0), (where, 2)}
    replaces = where.op_type == "Where" and index == 0 and scalar(where.inputs[1]) == 0.0
    if not replaces or set(readers) != expected:
        raise NoMatch("the probabilities are tested for NaN in an unknown way", is_nan)
    return where.outputs[0]


def _inactive_dropout(node: ir.Node) -> bool:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    return node.op_type == "Dropout" and (training is None or scalar(training) == 0.0)


def _additive(node: ir.Node, index: int) -> Mask:
    value = node.inputs[1 - index]
    if value is None or value.dtype is None or not value.dtype.is_floating_point():
        raise NoMatch("something without a float type is added to the scores", node)
    return Mask(value)


def _selecting(node: ir.Node, index: int) -> Mask:
    fill = scalar(node.inputs[3 - index])
    condition = node.inputs[0]
    if fill is None or condition is None:
        raise NoMatch("the scores are replaced by something that does not hide a key", node)
    return Mask(condition, index == 1, fill=fill)


def _checked(mask: Mask, node: ir.Node) -> Mask:
    if not mask.fill <= _HIDING:
        raise NoMatch("the scores are replaced by something that does not hide a key", node)
    size = rank(mask.value)
    if size is None or not 1 <= size <= 4:
        raise NoMatch(f"the mask is of rank {'unknown' if size is None else size}", node)
    return mask


def _check_axis(node: ir.Node, view: GraphView, size: int) -> None:
    default = -1 if view.opset >= 13 else 1
    if attribute_int(node, "axis", default) not in (-1, size - 1):
        raise NoMatch("the softmax does not run over the keys", node)


def _only_reader(value: ir.Value, view: GraphView) -> tuple[ir.Node, int]:
    readers = [(node, index) for node, index in view.consumers(value) if node.op_type != "Shape"]
    if len(readers) != 1:
        names = ", ".join(node.op_type for node, _ in readers) or "nothing"
        raise NoMatch(f"the scores or probabilities are read by {names}", value.producer())
    return readers[0]
