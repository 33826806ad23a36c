"""RMS norms, as one node or spelled out, as ``RMSNormalization``.

    Y = X / sqrt(mean(X^2, last axis) + epsilon) * scale

Recognised are SimplifiedLayerNormalization, RMSNormalization of ONNX 23, com.microsoft's
SkipSimplifiedLayerNormalization (whose sum becomes an Add), and arithmetic: squares by Pow or Mul,
their mean along the last axis, a constant epsilon, the root by Sqrt or Pow, over or times one over
it, times a constant weight on either side. Casts between float types may stand anywhere in it; the
operator computes in float32 and rounds once. Everything else is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.rmsnorm import RmsNorm, constant_channels, match_norms
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import holds, label, static_dim, substitute, widened
from tq_onnx.ops.operators import RmsNormalization


@dataclass(frozen=True, eq=False)
class _Norm:
    """A norm that the operator computes."""

    form: RmsNorm  #: what was matched
    source: ir.Value  #: X in a type that the operator takes
    weight: ir.Value | npt.NDArray[Any]  #: a value ``[E]`` of the type of X, or what it always is


def lower_norms(model: ir.Model, build: Builder) -> int:
    """Replace every RMS norm with a constant weight; return how many were replaced.

    Args:
        model: a converted model whose values have shapes; changed in place, what is left without a
            reader stays.
    """
    count = 0
    for node in list(model.graph):
        norm = next(filter(None, map(_as_norm, match_norms(node))), None)
        if norm is not None:
            with build.before(node, label(node)):
                _replace(norm, build)
            count += 1
    return count


def _replace(norm: _Norm, build: Builder) -> None:
    form, source, weight = norm.form, norm.source, norm.weight
    output = form.node.outputs[0]
    for value in form.summands:
        source = build.op(
            "Add", [source, value], "sum", dtype=output.dtype, shape=sizes(norm.source)
        )
    if form.total is not None:
        substitute(form.total, source)
    if not isinstance(weight, ir.Value):
        weight = build.constant(f"tq.norm_weight.{output.name}", weight)
    shape = sizes(source)
    normalised = build.operator(
        RmsNormalization,
        {RmsNormalization.X: source, RmsNormalization.scale: weight},
        dtype=norm.source.dtype,
        shape=shape,
        epsilon=form.epsilon,
    )
    if norm.source.dtype is not output.dtype:
        to = int(output.dtype or 0)
        normalised = build.op(
            "Cast", [normalised], "narrow", dtype=output.dtype, shape=shape, to=to
        )
    substitute(output, normalised)


def _as_norm(form: RmsNorm) -> _Norm | None:
    """Return the norm if the operator computes it."""
    output, source = form.node.outputs[0], form.source
    if source is None or form.bias is not None or form.centers or not form.is_of_last_axis:
        return None
    if output.dtype not in ELEMENTS:
        return None
    if not form.is_operator:
        source = _source(source, output)
    elif not _is_plain(form):
        return None
    weight = None if source is None else _weight(form.weight, source)
    return None if source is None or weight is None else _Norm(form, source, weight)


def _is_plain(form: RmsNorm) -> bool:
    """Return True if an operator computes in float32, in one type, with one output read."""
    output = form.node.outputs[0]
    unused = [value for value in form.node.outputs[1:] if value is not form.total]
    return (
        attribute_int(form.node, "stash_type", 1) == ir.DataType.FLOAT
        and not any(value.uses() or value.is_graph_output() for value in unused)
        and all(
            value is not None and value.dtype is output.dtype
            for value in (form.source, *form.summands)
        )
    )


def _source(numbers: ir.Value, output: ir.Value) -> ir.Value | None:
    """Return X in the type of Y; or else in a wider one, and Y is rounded to its own."""
    values = widened(numbers)
    exact = [value for value in values if value.dtype is output.dtype]
    wider = [v for v in values if v.dtype in ELEMENTS and holds(v.dtype, output.dtype)]
    return next(iter((*exact[-1:], *wider[-1:])), None)


def _weight(value: ir.Value | None, source: ir.Value) -> ir.Value | npt.NDArray[Any] | None:
    """Return a constant weight of as many elements as X has along its last axis, in its type."""
    width = static_dim(source, -1)
    if value is None or width is None:
        return None
    as_it_is = value.dtype is source.dtype and sizes(value) == (width,)
    if as_it_is and value.is_initializer() and not value.is_graph_input():
        return value
    array = constant_channels(value, width)
    if array is None or source.dtype is None:
        return None
    exact = holds(source.dtype, ir.DataType.from_numpy(array.dtype))
    return array.astype(source.dtype.numpy()).reshape(width) if exact else None
