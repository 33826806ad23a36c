"""Make the additive bias of a site: of its masks, and of the number of keys that are valid."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from tq_onnx.conversion.attended_length import attended_length
from tq_onnx.conversion.past_length import stated_length, steps
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.values import rank
from tq_onnx.recognise.operands import Mask
from tq_onnx.recognise.site import Site

_I64 = ir.DataType.INT64


def make_bias(build: Builder, site: Site) -> ir.Value | None:
    """Return the bias, ``[B or 1, H or 1, T or 1, S]`` in the query's type; None without masks."""
    masks = [_by_heads(build, mask, site) for mask in site.masks]
    if site.valid_keys is not None:
        masks = [_valid(build, site, site.valid_keys, next(iter(masks), None)), *masks[1:]]
    bias: ir.Value | None = None
    for mask in masks:
        term = _term(build, mask, site.dtype)
        bias = term if bias is None else _sum(build, bias, term, site.dtype)
    return bias


def _sum(build: Builder, left: ir.Value, right: ir.Value, dtype: ir.DataType) -> ir.Value:
    def make() -> ir.Value:
        return build.op("Add", [left, right], "bias_sum", dtype=dtype, shape=[None] * 4)

    return build.once(("sum", left, right), make)


def _term(build: Builder, mask: Mask, dtype: ir.DataType) -> ir.Value:
    """Return a mask as a bias of rank 4 and of the query's type; made once per model."""
    value, keeps = mask.value, mask.keeps
    if keeps is not None:
        key = ("bias", value, keeps, dtype)
        value = build.once(key, lambda: _selected(build, mask, dtype))
    elif value.dtype not in (dtype, None):
        source, shape = value, _dims(value)
        value = build.once(
            ("cast", source, dtype),
            lambda: build.op(
                "Cast", [source], "bias_cast", dtype=dtype, shape=shape, to=int(dtype)
            ),
        )
    if mask.factor != 1.0 and keeps is None:
        value = _times(build, value, mask, dtype)
    missing = 4 - (rank(mask.value) or 4)
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


def _times(build: Builder, value: ir.Value, mask: Mask, dtype: ir.DataType) -> ir.Value:
    factor = mask.factor

    def make() -> ir.Value:
        number = build.constant(f"tq.{dtype.name}.{factor!r}", dtype.numpy().type(factor))
        shape = _dims(mask.value)
        return build.op("Mul", [value, number], "bias_scaled", dtype=dtype, shape=shape)

    return build.once(("scaled", value, factor), make)


def _selected(build: Builder, mask: Mask, dtype: ir.DataType) -> ir.Value:
    zero = build.constant(f"tq.{dtype.name}.zero", dtype.numpy().type(0))
    lowest = _lowest(build, dtype)
    choices = [zero, lowest] if mask.keeps else [lowest, zero]
    return build.op("Where", [mask.value, *choices], "bias", dtype=dtype, shape=_dims(mask.value))


def _lowest(build: Builder, dtype: ir.DataType) -> ir.Value:
    return build.constant(f"tq.{dtype.name}.lowest", dtype.numpy().type(dtype.min))


def _dims(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def _by_heads(build: Builder, mask: Mask, site: Site) -> Mask:
    """Return a mask ``[B, H, T, S]`` of one ``[B * H, T, S]``, and any other as it is."""
    if not mask.merged:
        return mask
    value, heads = mask.value, site.num_heads

    def op(kind: str, inputs: list[ir.Value], label: str, shape: list[int | None]) -> ir.Value:
        return build.op(kind, inputs, label, dtype=value.dtype, shape=shape)

    def make() -> ir.Value:
        batch = [build.dim(site.query.value, 0, "batch"), build.integers(heads)]
        rows = build.op("Mul", batch, "batch_of_heads", dtype=_I64, shape=[1])
        # One row may stand for all of them.
        sizes = [rows, build.integers(1, 1)]
        target = build.op("Concat", sizes, "all_heads", dtype=_I64, shape=[3], axis=0)
        wide = op("Expand", [value, target], "mask_of_each_head", [None] * 3)
        apart = op("Unsqueeze", [wide, build.integers(1)], "mask_rank_4", [None, 1, None, None])
        split = build.integers(-1, heads, 0, 0)
        return op("Reshape", [apart, split], "mask_by_heads", [None, heads, None, None])

    return replace(mask, value=build.once(("by heads", value), make), merged=False)


def _valid(build: Builder, site: Site, valid: ir.Value, mask: Mask | None) -> Mask:
    """Make a mask that hides the slots from ``valid`` on, and what another mask hides.

    Query ``t`` of a causal site sees no slot behind ``valid - T + t`` either. Made once per model.
    """
    stated = stated_length(build, site)
    assert stated is not None  # only caches of a fixed size have valid keys
    past_length = attended_length(build, site, stated, None)
    hiding = None if mask is None else mask.value
    key = (valid, hiding, site.causal)
    visible = build.once(
        ("visible", *key), lambda: _visible(build, site, valid, hiding, past_length)
    )
    if mask is None or hiding is None:
        return Mask(visible, keeps=True)
    if mask.keeps is not None:
        intersection = build.once(
            ("visible and", *key),
            lambda: build.op(
                "And",
                [visible, hiding],
                "visible_and_kept",
                dtype=ir.DataType.BOOL,
                shape=[None] * 4,
            ),
        )
        return Mask(intersection, keeps=True)
    dtype = hiding.dtype
    assert dtype is not None  # the dialect has looked at it
    lowest = _lowest(build, dtype)
    bias = build.once(
        ("visible or", *key),
        lambda: build.op(
            "Where", [visible, hiding, lowest], "visible_bias", dtype=dtype, shape=[None] * 4
        ),
    )
    return Mask(bias)


def _visible(
    build: Builder, site: Site, valid: ir.Value, mask: ir.Value | None, past_length: ir.Value
) -> ir.Value:
    """Make ``slot < valid``, or ``slot < valid - T + 1 + t``: bool ``[B, 1, T or 1, S]``."""

    def op(kind: str, inputs: list[ir.Value], label: str, shape: list[int | None]) -> ir.Value:
        return build.op(kind, inputs, label, dtype=_I64, shape=shape)

    axis = build.integers(0)
    tokens = build.dim(site.query.value, site.query.token_axis, "new_tokens")
    end = op("Reshape", [valid, build.integers(-1, 1, 1, 1)], "valid_keys", [None, 1, 1, 1])
    if site.causal:
        rows = steps(build, tokens, "new_tokens_scalar", "steps")
        column = op("Unsqueeze", [rows, build.integers(1)], "steps_column", [None, 1])
        before = op("Sub", [end, tokens], "keys_before", [None, 1, 1, 1])
        last = op("Add", [before, column], "last_visible_key", [None, 1, None, 1])
        end = op("Add", [last, build.integers(1)], "visible_keys_end", [None, 1, None, 1])
    size = None if mask is None else rank(mask)
    if mask is None or size is None:
        longest = op("ReduceMax", [past_length, axis], "longest_past", [1])
        slots = op("Add", [longest, tokens], "slots", [1])
    else:
        slots = build.dim(mask, size - 1, "slots")
    numbers = steps(build, slots, "slots_scalar", "slot_numbers")
    return build.op(
        "Less", [numbers, end], "visible", dtype=ir.DataType.BOOL, shape=[None, 1, None, None]
    )
