"""Follow decomposed attention scores forward: from Q K^T over the softmax to the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int, scalar
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import PRODUCTS, kind
from tq_onnx.graph.values import keeps_numbers, rank
from tq_onnx.recognise.attention.products import product
from tq_onnx.recognise.site import GraphView

_MAX_STEPS: Final = 16
_HIDING: Final = -3e4
"""A fill that no score comes near. Scores of models with large biases in their projections reach
-1e4, a fill of some float16 exports, which does not hide a key from them as a bias would."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Something that hides keys.

    Attributes:
        value: a float added to the scores, or a Boolean that selects.
        keeps: None for an additive mask; otherwise the truth value that keeps a key.
    """

    value: ir.Value
    keeps: bool | None

    def bias(self, build: Builder, dtype: ir.DataType) -> ir.Value:
        """Return the mask as a bias of rank 4 and of the query's type; made once per model."""
        value = self.value
        if self.keeps is not None:
            keeps = self.keeps
            value = build.once(("bias", value, keeps, dtype), lambda: self._select(build, dtype))
        elif value.dtype != dtype:
            source = value
            value = build.once(
                ("cast", source, dtype),
                lambda: build.op(
                    "Cast",
                    [source],
                    "bias_cast",
                    dtype=dtype,
                    shape=_dims(source),
                    to=int(dtype),
                ),
            )
        missing = 4 - (rank(self.value) or 4)
        if not missing:
            return value
        narrow = value
        return build.once(
            ("unsqueeze", narrow),
            lambda: build.op(
                "Unsqueeze",
                [narrow, build.integers(*range(missing))],
                "bias_rank_4",
                dtype=dtype,
                shape=[None] * 4,
            ),
        )

    def _select(self, build: Builder, dtype: ir.DataType) -> ir.Value:
        numpy = dtype.numpy()
        zero = build.constant(f"tq.{dtype.name}.zero", numpy.type(0))
        lowest = build.constant(f"tq.{dtype.name}.lowest", numpy.type(dtype.min))
        chosen = [zero, lowest] if self.keeps else [lowest, zero]
        return build.op(
            "Where", [self.value, *chosen], "bias", dtype=dtype, shape=_dims(self.value)
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """The way of the scores from Q K^T to the values.

    Attributes:
        scale: product of the constant factors before the softcap and the mask.
        softcap: 0 for none.
        masks: in the order in which they act.
        softmax: the softmax.
        output_matmul: the product of the probabilities with the values.
    """

    scale: float
    softcap: float
    masks: tuple[Mask, ...]
    softmax: ir.Node
    output_matmul: ir.Node


def follow_scores(matmul: ir.Node, view: GraphView) -> Scores:
    """Follow the scores from the product that makes them to the one that uses them.

    Raises:
        NoMatch: something else happens to them.
    """
    scale, cap, capped = product(matmul).factor, 1.0, False
    masks: list[Mask] = []
    value = matmul.outputs[0]
    for _ in range(_MAX_STEPS):
        node, index = _only_reader(value, view)
        what = kind(node)
        if what == "Softmax":
            _check_axis(node, view)
            # scores * scale / softcap went into the tanh, which is odd.
            softcap = abs(cap) if capped else 0.0
            return Scores(
                scale * cap if capped else scale,
                softcap,
                tuple(masks),
                node,
                _values(node, view),
            )
        if what in ("Mul", "Div"):
            number = scalar(node.inputs[1 - index])
            if not number or (what == "Div" and index != 0):
                raise NoMatch("the scores are multiplied by something not constant", node)
            if masks:
                raise NoMatch("the scores are scaled after the mask was applied", node)
            number = number if what == "Mul" else 1 / number
            if capped:
                cap *= number
            else:
                scale *= number
        elif what == "Tanh" and not capped and not masks:
            capped = True
        elif what == "Add":
            masks.append(_additive(node, index))
        elif what == "Where" and index in (1, 2):
            masks.append(_selecting(node, index))
        elif not keeps_numbers(node):
            raise NoMatch(f"the scores go through {what}", node)
        value = node.outputs[0]
    raise NoMatch("the scores do not reach a softmax", matmul)


def probabilities_above(value: ir.Value | None, view: GraphView) -> ir.Node | None:
    """Return the softmax whose (guarded) result a value is; None if there is none."""
    node = _above_guards(value, view)
    return node if node is not None and node.op_type == "Softmax" else None


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
        elif node.op_type == "Dropout" or keeps_numbers(node):
            value = node.inputs[0]
        else:
            return node
    return None


def _values(softmax: ir.Node, view: GraphView) -> ir.Node:
    """Return the MatMul with the values, past a guard against NaN."""
    value = softmax.outputs[0]
    for _ in range(_MAX_STEPS):
        readers = view.consumers(value)
        guard = [node for node, _ in readers if node.op_type == "IsNaN" and node.domain == ""]
        if guard:
            value = _guarded(guard[0], readers, view)
            continue
        node, index = _only_reader(value, view)
        if kind(node) in PRODUCTS:
            _check_values(node, index)
            return node
        if index == 0 and (keeps_numbers(node) or _inactive_dropout(node)):
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
    return _checked(Mask(value, None), node)


def _selecting(node: ir.Node, index: int) -> Mask:
    fill = scalar(node.inputs[3 - index])
    condition = node.inputs[0]
    if fill is None or not fill <= _HIDING or condition is None:
        raise NoMatch("the scores are replaced by something that does not hide a key", node)
    return _checked(Mask(condition, index == 1), node)


def _checked(mask: Mask, node: ir.Node) -> Mask:
    size = rank(mask.value)
    if size is None or not 1 <= size <= 4:
        raise NoMatch(f"the mask is of rank {'unknown' if size is None else size}", node)
    return mask


def _check_axis(node: ir.Node, view: GraphView) -> None:
    default = -1 if view.opset >= 13 else 1
    if attribute_int(node, "axis", default) not in (-1, 3):
        raise NoMatch("the softmax does not run over the keys", node)


def _only_reader(value: ir.Value, view: GraphView) -> tuple[ir.Node, int]:
    readers = [(node, index) for node, index in view.consumers(value) if node.op_type != "Shape"]
    if len(readers) != 1:
        names = ", ".join(node.op_type for node, _ in readers) or "nothing"
        raise NoMatch(f"the scores or probabilities are read by {names}", value.producer())
    return readers[0]


def _dims(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]
