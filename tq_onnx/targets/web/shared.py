"""Make once what all layers of a model share: lengths, indices of new rows, masks.

All caches of a call have the same number of rows, and all layers see the same new tokens; where
layers count their tokens by different values, each of those has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnxscript import OnnxFunction

from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.bodies import attention
from tq_onnx.ops.bodies.composing import operator_style
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import Attention
from tq_onnx.targets.web import bodies

_FLOAT: Final = ir.DataType.FLOAT
_BYTES: Final = ir.DataType.UINT8
_INT64: Final = ir.DataType.INT64
_BOOL: Final = ir.DataType.BOOL

Piece = OnnxFunction[..., Any]


class Calls:
    """Makes calls of functions, and remembers which.

    Attributes:
        build: inserts them.
        called: the functions, by the names that their nodes have.
    """

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.called: dict[tuple[str, str], Piece] = {}

    def call(
        self,
        piece: Piece,
        *inputs: ir.Value,
        dtype: ir.DataType = _FLOAT,
        domain: str = bodies.WEB_DOMAIN,
        **attributes: int,
    ) -> ir.Value:
        """Return the result of a piece."""
        name = operator_style(piece.name)
        self.called[domain, name] = piece
        outputs = self.build.ops(
            name,
            inputs,
            name,
            dtype=dtype,
            shapes=[None],
            domain=domain,
            attributes=attributes,
        )
        return outputs[0]

    def wide(self, value: ir.Value) -> ir.Value:
        """Return floats in float32."""
        if value.dtype is _FLOAT:
            return value
        return self.build.op("Cast", [value], "wide", dtype=_FLOAT, to=int(_FLOAT))


class Shared:
    """Makes what layers share: lengths, places, masks."""

    def __init__(self, calls: Calls, first: ConvertedLayer) -> None:
        self._calls = calls
        self._build = calls.build
        self._first = first

    def once(self, *key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """Return the value that was made for the key."""
        return self._build.once((Shared, *key), make)

    def batch(self) -> ir.Value:
        """Return the number of sequences ``[1]``."""
        return self.once("batch", make=lambda: self._build.dim(self._first.key.vectors, 0, "batch"))

    def new(self) -> ir.Value:
        """Return the number of new tokens ``[1]``."""
        return self.once("new", make=lambda: self._build.dim(self._first.key.vectors, 2, "new"))

    def total(self, past_length: ir.Value) -> ir.Value:
        """Return the number of tokens after the call ``[1]``."""

        def make() -> ir.Value:
            longest = self._build.op(
                "ReduceMax", [past_length], "longest", dtype=_INT64, shape=[1], keepdims=1
            )
            return self._build.op("Add", [longest, self.new()], "total", dtype=_INT64, shape=[1])

        return self.once("total", past_length, make=make)

    def slots(self, past_length: ir.Value, heads: int, width: int) -> ir.Value:
        """Return the slots ``[B, N, T, W]`` of the bytes of new rows."""

        def make() -> ir.Value:
            build = self._build
            zero, unit = build.number(0), build.number(1)
            new = build.op("Squeeze", [self.new()], "new_tokens", dtype=_INT64, shape=[])
            steps = build.op("Range", [zero, new, unit], "steps", dtype=_INT64)
            past = build.op(
                "Reshape", [past_length, build.integers(-1, 1, 1, 1)], "past", dtype=_INT64
            )
            column = build.op("Unsqueeze", [steps, build.integers(1)], "column", dtype=_INT64)
            places = build.op("Add", [past, column], "places", dtype=_INT64)
            return build.op(
                "Expand", [places, self._row_shape(heads, width)], "slots", dtype=_INT64
            )

        return self.once("slots", past_length, heads, width, make=make)

    def room(self, past: ir.Value, past_length: ir.Value, heads: int, width: int) -> ir.Value:
        """Return zero bytes ``[B, N, missing, W]``: what caches are too short for the new rows."""

        def make() -> ir.Value:
            build = self._build
            rows = build.dim(past, 2, "rows")
            shortage = build.op("Sub", [self.total(past_length), rows], "more", dtype=_INT64)
            missing = build.op(
                "Max", [shortage, build.integers(0)], "missing", dtype=_INT64, shape=[1]
            )
            sizes = [self.batch(), build.integers(heads), missing, build.integers(width)]
            shape = build.op("Concat", sizes, "room_shape", dtype=_INT64, axis=0)
            return build.op("Expand", [self._zero_byte(), shape], "room", dtype=_BYTES)

        return self.once("room", past_length, heads, width, make=make)

    def fill(self, heads: int, width: int) -> ir.Value:
        """Return zero bytes ``[B, N, T, W]``, for rows that are wider than their codec needs."""

        def make() -> ir.Value:
            shape = self._row_shape(heads, width)
            return self._build.op("Expand", [self._zero_byte(), shape], "fill", dtype=_BYTES)

        return self.once("fill", heads, width, make=make)

    def ends(self, past_length: ir.Value, column: int) -> ir.Value:
        """Return the last live row and a column: the ends of a Slice."""

        def make() -> ir.Value:
            parts = [self.total(past_length), self._build.integers(column)]
            return self._build.op("Concat", parts, "ends", dtype=_INT64, shape=[2], axis=0)

        return self.once("ends", past_length, column, make=make)

    def visible(self, attention_node: AttentionNode, bias: ir.Value | None) -> ir.Value:
        """Return which keys each query sees: ``[B or 1, 1 or H, T, S]``."""
        node, past_length = attention_node.node, attention_node.past_length
        causal = node.attributes.get_int(Attention.causal.name)
        reach = node.attributes.get_int(Attention.sliding_window.name)

        def by_position() -> ir.Value:
            return self._calls.call(
                attention.visible_keys,
                attention_node.query,
                past_length,
                self.total(past_length),
                dtype=_BOOL,
                domain=DOMAIN,
                causal=causal or 0,
                sliding_window=reach or 0,
            )

        visible = self.once("by_position", past_length, causal, reach, make=by_position)
        if bias is None:
            return visible

        def by_bias() -> ir.Value:
            hidden = self._calls.call(attention.hidden_by_bias, bias, dtype=_BOOL, domain=DOMAIN)
            shown = self._build.op("Not", [hidden], "shown", dtype=_BOOL)
            return self._build.op("And", [visible, shown], "visible", dtype=_BOOL)

        return self.once("visible", past_length, causal, reach, bias, make=by_bias)

    def live_bias(self, bias: ir.Value, past_length: ir.Value) -> ir.Value:
        """Return the columns of a bias that belong to tokens."""
        return self.once(
            "bias",
            bias,
            past_length,
            make=lambda: self._calls.call(
                attention.live_bias,
                bias,
                self.total(past_length),
                dtype=bias.dtype or _FLOAT,
                domain=DOMAIN,
            ),
        )

    def mask(self, visible: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Return what is added to scores."""
        if bias is None:
            return self.once("mask", visible, make=lambda: self._calls.call(bodies.hiding, visible))
        return self.once(
            "mask", visible, bias, make=lambda: self._calls.call(bodies.biased, visible, bias)
        )

    def sees_any(self, visible: ir.Value) -> ir.Value:
        """Return which queries see a key."""
        return self.once(
            "any",
            visible,
            make=lambda: self._calls.call(bodies.sees_any, visible, dtype=_BOOL),
        )

    def heads_shape(self, heads: int) -> ir.Value:
        """Return the shape ``[B, H, T, -1]`` of what there is for each query head."""

        def make() -> ir.Value:
            sizes = [
                self.batch(),
                self._build.integers(heads),
                self.new(),
                self._build.integers(-1),
            ]
            return self._build.op("Concat", sizes, "heads_shape", dtype=_INT64, axis=0)

        return self.once("heads_shape", heads, make=make)

    def grouped_shape(self, last: ir.Value, heads: int) -> ir.Value:
        """Return the shape ``[B, N, -1, last]``: the query heads of a KV head in one matrix."""

        def make() -> ir.Value:
            inner = [self._build.integers(heads), self._build.integers(-1), last]
            sizes = [self.batch(), *inner]
            return self._build.op("Concat", sizes, "grouped_shape", dtype=_INT64, axis=0)

        return self.once("grouped_shape", last, heads, make=make)

    def _row_shape(self, heads: int, width: int) -> ir.Value:
        def make() -> ir.Value:
            build = self._build
            sizes = [self.batch(), build.integers(heads), self.new(), build.integers(width)]
            return build.op("Concat", sizes, "row_shape", dtype=_INT64, axis=0)

        return self.once("row_shape", heads, width, make=make)

    def _zero_byte(self) -> ir.Value:
        return self._build.constant("tq.zero_byte", np.zeros(1, np.uint8))
