"""SiLU, ``x * Sigmoid(x)`` in either order or one node, as ``Swish``."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_float
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import label, substitute
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.ops.operators import Swish

_ALPHAS: Final = {"Swish": 1.0, f"{MICROSOFT}.QuickGelu": 1.702}
"""Operators for ``x * Sigmoid(alpha * x)``, and the alpha of each that does not tell its own."""


def lower_swish(model: ir.Model, build: Builder) -> int:
    """Replace every SiLU; return how many were replaced.

    Args:
        model: a converted model; changed in place, what is left without a reader stays.
    """
    count = 0
    for node in list(model.graph):
        source = _argument(node)
        if source is None or source.dtype not in ELEMENTS:
            continue
        with build.before(node, label(node)):
            swish = build.operator(
                Swish, {Swish.X: source}, dtype=source.dtype, shape=sizes(source)
            )
        substitute(node.outputs[0], swish)
        count += 1
    return count


def _argument(node: ir.Node) -> ir.Value | None:
    """Return the x of a node that is x * Sigmoid(x)."""
    if kind(node) in _ALPHAS:
        alpha = attribute_float(node, "alpha", _ALPHAS[kind(node)])
        return node.inputs[0] if alpha == 1 else None
    if kind(node) != "Mul":
        return None
    for index in (0, 1):
        source, gate = node.inputs[index], node.inputs[1 - index]
        maker = None if gate is None else gate.producer()
        if maker is not None and kind(maker) == "Sigmoid" and maker.inputs[0] is source:
            return source
    return None
