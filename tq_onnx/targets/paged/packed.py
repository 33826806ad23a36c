"""The inputs of a paged model, and what is computed of them once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.conversion.ports import PACKED_DIMS, REQUESTS, TOKENS
from tq_onnx.graph.builder import Builder, Dim
from tq_onnx.plan import Plan

SCOPE: Final = "paged"

_INT64: Final = ir.DataType.INT64
_INT32: Final = ir.DataType.INT32
_BOOL: Final = ir.DataType.BOOL


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed tokens and where they belong."""

    ids: ir.Value  #: token ids ``[1, T]``, in the type that the decoder reads
    bounds: ir.Value  #: where requests begin and end, int32 ``[R + 1]``
    past: ir.Value  #: tokens of each request in its pages, int32 ``[R]``
    table: ir.Value  #: pages of each request, int32 ``[R, C]``
    indices: ir.Value  #: of the tokens that logits are computed of, int32 ``[L]``
    positions: ir.Value  #: of the tokens in their requests, int64 ``[1, T]``
    place: ir.Node  #: the node that all of this stands before


def pack(model: ir.Model, build: Builder, plan: Plan) -> Packed:
    """Put packed tokens in the place of a batch of sequences, and count their positions.

    Args:
        model: its input of token ids ``[B, T]`` becomes one of ``[T]``.
    """
    graph = model.graph
    tokens = next(value for value in graph.inputs if value.name == plan.interface.tokens)
    packing = bounds, past, table, indices = tuple(
        ir.Value(name=name, type=ir.TensorType(_INT32), shape=ir.Shape(dims))
        for name, dims in PACKED_DIMS.items()
    )
    dtype = tokens.dtype or _INT64
    place = next(iter(graph))
    with build.before(place, SCOPE):
        # The engine gives int64, whatever the decoder reads.
        read = tokens
        tokens.type, tokens.shape = ir.TensorType(_INT64), ir.Shape([TOKENS])
        uses = list(tokens.uses())
        if dtype is not _INT64:
            read = build.op("Cast", [read], "ids", dtype=dtype, shape=[TOKENS], to=int(dtype))
        first = build.integers(0)
        ids = build.op("Unsqueeze", [read, first], "sequence", dtype=dtype, shape=[1, TOKENS])
        for use in uses:
            use.node.replace_input_with(use.idx, ids)
        positions = _positions(build, tokens, bounds, past)
    at = list(graph.inputs).index(tokens)
    for offset, value in enumerate(packing, start=1):
        graph.inputs.insert(at + offset, value)
    return Packed(ids, bounds, past, table, indices, positions, place)


def _positions(build: Builder, tokens: ir.Value, bounds: ir.Value, past: ir.Value) -> ir.Value:
    """Return positions ``[1, T]``."""
    first, second = build.integers(0), build.integers(1)
    far = build.integers((1 << 63) - 1)

    def cast(value: ir.Value, label: str, shape: Sequence[Dim]) -> ir.Value:
        return build.op("Cast", [value], label, dtype=_INT64, shape=shape, to=int(_INT64))

    wide = cast(bounds, "bounds", [f"{REQUESTS}+1"])
    ends = build.op("Slice", [wide, second, far, first], "ends", dtype=_INT64, shape=[REQUESTS])
    before_last = [wide, first, build.integers(-1), first]
    starts = build.op("Slice", before_last, "starts", dtype=_INT64, shape=[REQUESTS])
    count = build.op("Size", [tokens], "count", dtype=_INT64, shape=[])
    numbers = [build.number(0), count, build.number(1)]
    order = build.op("Range", numbers, "order", dtype=_INT64, shape=[TOKENS])
    shape: list[Dim] = [REQUESTS, 1]
    column = build.op("Unsqueeze", [ends, second], "column", dtype=_INT64, shape=shape)
    shape = [REQUESTS, TOKENS]
    behind = build.op("LessOrEqual", [column, order], "is_behind", dtype=_BOOL, shape=shape)
    ones = [cast(behind, "behind", shape), first]
    requests = build.op("ReduceSum", ones, "requests", dtype=_INT64, shape=[TOKENS], keepdims=0)
    lengths = cast(past, "past", [REQUESTS])
    moved = build.op("Sub", [lengths, starts], "moved", dtype=_INT64, shape=[REQUESTS])
    by_token = build.op("Gather", [moved, requests], "of_tokens", dtype=_INT64, shape=[TOKENS])
    row = build.op("Add", [order, by_token], "row", dtype=_INT64, shape=[TOKENS])
    return build.op("Unsqueeze", [row, first], "positions", dtype=_INT64, shape=[1, TOKENS])
