"""Make a mask of the slots that hold a key, in a cache of a fixed size."""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.values import rank
from tq_onnx.recognise.attention.masks import Mask

_I64 = ir.DataType.INT64


def valid_keys(
    build: Builder,
    valid: ir.Value,
    mask: Mask | None,
    query: ir.Value,
    past_length: ir.Value,
    *,
    causal: bool,
) -> Mask:
    """Make a mask that hides the slots from ``valid`` on, and another mask's; once per model.

    Args:
        build: makes the nodes.
        valid: int64 ``[B]``, slots of each sequence that hold a key.
        mask: the other mask, Boolean or float; None if there is none.
        query: ``[B, H, T, D]`` or ``[B, T, H * D]``.
        past_length: tokens before this call, int64 ``[B]`` or ``[1]``.
        causal: whether query ``t`` sees no slot behind ``valid - T + t`` either.
    """
    given = None if mask is None else mask.value
    key = (valid, given, causal)
    visible = build.once(
        ("visible", *key), lambda: _visible(build, valid, given, query, past_length, causal=causal)
    )
    if mask is None or given is None:
        return Mask(visible, True)
    if mask.keeps is not None:
        both = build.once(
            ("visible and", *key),
            lambda: build.op(
                "And",
                [visible, given],
                "visible_and_kept",
                dtype=ir.DataType.BOOL,
                shape=[None] * 4,
            ),
        )
        return Mask(both, True)
    dtype = given.dtype
    assert dtype is not None  # the dialect has looked at it
    lowest = build.constant(f"tq.{dtype.name}.lowest", dtype.numpy().type(dtype.min))
    bias = build.once(
        ("visible or", *key),
        lambda: build.op(
            "Where", [visible, given, lowest], "visible_bias", dtype=dtype, shape=[None] * 4
        ),
    )
    return Mask(bias, None)


def _visible(
    build: Builder,
    valid: ir.Value,
    mask: ir.Value | None,
    query: ir.Value,
    past_length: ir.Value,
    *,
    causal: bool,
) -> ir.Value:
    """Make ``slot < valid``, or ``slot < valid - T + 1 + t``: bool ``[B, 1, T or 1, S]``."""

    def op(kind: str, inputs: list[ir.Value], label: str, shape: list[int | None]) -> ir.Value:
        return build.op(kind, inputs, label, dtype=_I64, shape=shape)

    axis = build.integers(0)
    new_tokens = build.dim(query, 2 if rank(query) == 4 else 1, "new_tokens")
    end = op("Reshape", [valid, build.integers(-1, 1, 1, 1)], "valid_keys", [None, 1, 1, 1])
    if causal:
        count = op("Squeeze", [new_tokens, axis], "new_tokens_scalar", [])
        steps = op("Range", [build.number(0), count, build.number(1)], "steps", [None])
        column = op("Unsqueeze", [steps, build.integers(1)], "steps_column", [None, 1])
        before = op("Sub", [end, new_tokens], "keys_before", [None, 1, 1, 1])
        last = op("Add", [before, column], "last_visible_key", [None, 1, None, 1])
        end = op("Add", [last, build.integers(1)], "visible_keys_end", [None, 1, None, 1])
    size = None if mask is None else rank(mask)
    if mask is None or size is None:
        longest = op("ReduceMax", [past_length, axis], "longest_past", [1])
        slots = op("Add", [longest, new_tokens], "slots", [1])
    else:
        slots = build.dim(mask, size - 1, "slots")
    count = op("Squeeze", [slots, axis], "slots_scalar", [])
    numbers = op("Range", [build.number(0), count, build.number(1)], "slot_numbers", [None])
    return build.op(
        "Less",
        [numbers, end],
        "visible",
        dtype=ir.DataType.BOOL,
        shape=[None, 1, None, None],
    )
