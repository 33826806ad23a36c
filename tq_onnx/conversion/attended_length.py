"""Let attention read rows after those just written, where the graph makes them visible.

The operator reads the slots up to the last new row. A cache of a fixed size may hold later rows,
written by an earlier call, for example before a rewind in speculative decoding. If the graph makes
them visible, attention gets a larger past length, such that its last slot is the last visible one.
The bias hides the slots that do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.past_length import steps
from tq_onnx.graph.builder import Builder
from tq_onnx.recognise.site import Site

_AXES = (0, 1, 2)
_AXES_ARE_AN_INPUT = 18
"""The opset from which on ReduceMax takes its axes as an input."""
_I64, _F32 = ir.DataType.INT64, ir.DataType.FLOAT


def attended_length(
    build: Builder, site: Site, past_length: ir.Value, bias: ir.Value | None
) -> ir.Value:
    """Return the tokens before the new ones that attention has to know, int64 ``[B]`` or ``[1]``.

    Args:
        past_length: tokens before the rows that are written, int64 ``[B]`` or ``[1]``.
        bias: what hides keys, ``[B or 1, H or 1, T or 1, slots]``; None if nothing does.
    """
    if site.valid_keys is not None:
        end = site.valid_keys
    elif bias is None or not site.writes_in_place:
        return past_length
    else:
        graph = site.node.graph
        end = visible_end(build, bias, 0 if graph is None else graph.opset_imports.get("", 0))
    query = site.query

    def make() -> ir.Value:
        new = build.dim(query.value, query.token_axis, "asking_tokens")
        before = build.op("Sub", [end, new], "visible_before", dtype=_I64, shape=[None])
        return build.op("Max", [past_length, before], "attended", dtype=_I64, shape=[None])

    return build.once(("attended", past_length, end), make)


def visible_end(build: Builder, bias: ir.Value, opset: int) -> ir.Value:
    """Return the slot behind the last one that a bias shows to any query, int64 ``[1]``.

    Args:
        bias: ``[B or 1, H or 1, T or 1, slots]``; what is at most half of the lowest value hides.
    """

    def make() -> ir.Value:
        dtype = bias.dtype
        assert dtype is not None  # a bias has the type of the query
        wide = bias
        if dtype is not _F32:
            wide = build.op("Cast", [bias], "wide_bias", dtype=_F32, shape=[None] * 4, to=1)
        axes: list[ir.Value] = []
        options: dict[str, Sequence[int]] = {"axes": _AXES}
        if opset >= _AXES_ARE_AN_INPUT:
            axes, options = [build.integers(*_AXES)], {}
        (best,) = build.ops(
            "ReduceMax",
            [wide, *axes],
            "best_bias",
            dtype=_F32,
            shapes=[[None]],
            attributes={"keepdims": 0, **options},
        )
        half = build.constant(f"tq.{dtype.name}.hides", np.float32(float(dtype.min) / 2))
        shown = build.op("Greater", [best, half], "shown", dtype=ir.DataType.BOOL, shape=[None])
        columns = build.dim(bias, 3, "columns")
        slots = steps(build, columns, "columns_scalar", "columns_numbers")
        slot_ends = build.op("Add", [slots, build.integers(1)], "ends", dtype=_I64, shape=[None])
        ends = build.op(
            "Where", [shown, slot_ends, build.integers(0)], "shown_ends", dtype=_I64, shape=[None]
        )
        return build.op("ReduceMax", [ends], "last_end", dtype=_I64, shape=[1], keepdims=1)

    return build.once(("visible_end", bias), make)
