"""Read lengths from the mask in a graph whose inputs always have the same size.

A converted decoder reads the number of tokens off sizes: the attention mask is as long as all
tokens, a cache as long as those before. In graph mode neither may change, because CANN compiles a
graph for the sizes of its inputs. Then the mask is as long as the caches have room, ones for tokens
that count and zeros for all else, padding on the left or slots behind:

    total = the place of the last one, counted from 1
    past  = total - T

and what was read off a size is replaced by these numbers, wherever it goes. The mask of floats that
the exporter spelled out is cut, where its numbers show that it hides the future and padding only;
attention hides the future itself, and gets the zeros of the mask as its bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.layers import converted_layers
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import rank
from tq_onnx.plan import Plan
from tq_onnx.targets import causality

SCOPE = "graph_mode"

_INT64 = ir.DataType.INT64
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the inputs of a graph.

    Attributes:
        batch: sequences.
        tokens: new tokens in a call.
        capacity: slots of a cache.
    """

    batch: int
    tokens: int
    capacity: int


def fix_lengths(model: ir.Model, build: Builder, plan: Plan, sizes: Sizes) -> None:
    """Replace lengths and masks by what the attention mask says, and fix all inputs' sizes.

    Raises:
        NoMatch: there is no attention mask, or a layer's mask hides something else.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    mask = inputs.get(plan.interface.attention_mask)
    if mask is None or mask.dtype not in _INTEGERS or rank(mask) != 2:
        raise NoMatch(
            "the model has no attention_mask of integers [batch, total tokens], the only input "
            "that tells how many tokens there are in a cache of fixed capacity"
        )
    layers = converted_layers(model, plan)
    for layer in causality.of_each_mask(layers):
        if not causality.is_causal(layer.attention, plan, model):
            number, node = layer.plan.layer, layer.attention.node
            raise NoMatch(f"the mask of layer {number} hides more than the future", node)
    causality.keep_all_rows(model, plan)
    with build.before(next(iter(model.graph)), SCOPE):
        total = _total(build, mask, sizes)
        past = build.op(
            "Sub", [total, build.integers(sizes.tokens)], "past_length", dtype=_INT64, shape=[1]
        )
        bias = _bias(build, mask, sizes)
    for layer in layers:
        causality.drop_bias(layer.attention)
        layer.attention.bias = bias
        for operator in layer.operators:
            operator.past_length = past
    caches = {cache.past for cache in plan.caches}
    read = {mask: (1, total)} | {inputs[name]: (2, past) for name in caches if name in inputs}
    for value, (axis, length) in read.items():
        for node in _asking(value):
            _answer(build, node, axis, length)
    _fix_inputs(model, plan, sizes)


def _total(build: Builder, mask: ir.Value, sizes: Sizes) -> ir.Value:
    """Return the place of the last one in any sequence's mask, int64 ``[1]``."""
    wide = mask
    if mask.dtype is not _INT64:
        wide = build.op("Cast", [mask], "wide_mask", dtype=_INT64, to=int(_INT64))
    places = build.constant("tq.places", np.arange(1, sizes.capacity + 1, dtype=np.int64))
    counted = build.op("Mul", [wide, places], "counted", dtype=_INT64)
    largest = build.op("ReduceMax", [counted], "last_place", dtype=_INT64, keepdims=0)
    return build.op("Reshape", [largest, build.integers(1)], "total_length", dtype=_INT64)


def _bias(build: Builder, mask: ir.Value, sizes: Sizes) -> ir.Value:
    """Make 0 for tokens that count, the lowest number for others: float32 ``[B, 1, 1, S]``."""
    column = build.op(
        "Reshape",
        [mask, build.integers(sizes.batch, 1, 1, sizes.capacity)],
        "mask",
        dtype=mask.dtype,
    )
    counts = build.op("Cast", [column], "counts", dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))
    zero = build.constant("tq.zero", np.zeros((), np.float32))
    lowest = build.constant("tq.lowest", np.array(_LOWEST, np.float32))
    return build.op("Where", [counts, zero, lowest], "bias", dtype=ir.DataType.FLOAT)


def _asking(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes of the main graph that ask for a value's shape."""
    for use in list(value.uses()):
        if use.node.op_type == "Shape" and use.node.domain == "":
            yield use.node


def _answer(build: Builder, node: ir.Node, axis: int, length: ir.Value) -> None:
    """Replace what a Shape node says of one axis."""
    value, output = node.inputs[0], node.outputs[0]
    assert value is not None  # it is asked for its shape
    size = rank(value) or 0
    start, end = (
        min(max(bound + size if bound < 0 else bound, 0), size)
        for bound in (
            node.attributes.get_int("start", 0),
            node.attributes.get_int("end", size),
        )
    )
    if not start <= axis < end:
        return
    parts: list[ir.Value] = []
    with build.before(node, SCOPE):
        if start < axis:
            parts.append(_part(build, value, start, axis))
        parts.append(length)
        if axis + 1 < end:
            parts.append(_part(build, value, axis + 1, end))
        joined = length
        if len(parts) > 1:
            joined = build.op("Concat", parts, "sizes", dtype=_INT64, shape=[end - start], axis=0)
    output.replace_all_uses_with(joined, replace_graph_outputs=True)


def _part(build: Builder, value: ir.Value, start: int, end: int) -> ir.Value:
    return build.op(
        "Shape", [value], "sizes", dtype=_INT64, shape=[end - start], start=start, end=end
    )


def _fix_inputs(model: ir.Model, plan: Plan, sizes: Sizes) -> None:
    """Give every input its numbers, and forget the shapes of everything else."""
    caches = {cache.past for cache in plan.caches}
    interface = plan.interface
    for value in model.graph.inputs:
        assert value.shape is not None  # the plan was made from it
        if value.name in caches:
            value.shape = ir.Shape([sizes.batch, value.shape[1], sizes.capacity, value.shape[3]])
        elif value.name == interface.attention_mask:
            value.shape = ir.Shape([sizes.batch, sizes.capacity])
        elif value.name == interface.tokens:
            value.shape = ir.Shape([sizes.batch, sizes.tokens, *value.shape[2:]])
        elif value.name == interface.position_ids:
            value.shape = ir.Shape([sizes.batch, sizes.tokens])
        else:
            raise NoMatch(f"the model has the input {value.name}, which says more about lengths")
    for node in model.graph:
        for output in node.outputs:
            output.shape = None
