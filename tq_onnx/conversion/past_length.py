"""Make the nodes that count the tokens in the caches before a call."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.recognise.lengths import Lengths
from tq_onnx.recognise.site import Site

_I64 = ir.DataType.INT64


def stated_length(build: Builder, site: Site) -> ir.Value | None:
    """Return the past length as the graph states it, int64 ``[B]`` or ``[1]``; once per model.

    None unless ``site.counts_tokens``.
    """
    length = site.past_length
    if length is None:
        return None
    value = length.value
    if value is None:
        return build.integers(0)
    if length.form == "integer":
        return build.once(("past_length", value), lambda: _listed(build, value))
    if length.form == "last key":
        key = "past_length", value, site.query_lengths
        return build.once(key, lambda: _before_new(build, site, value))
    return value


def _listed(build: Builder, number: ir.Value) -> ir.Value:
    """Return one integer as int64 ``[1]``."""
    if number.dtype is not _I64:
        number = build.op("Cast", [number], "start", dtype=_I64, to=7)
    return build.op("Reshape", [number, build.integers(1)], "past_length", dtype=_I64, shape=[1])


def _before_new(build: Builder, site: Site, last_key: ir.Value) -> ir.Value:
    """Return ``max(last key + 1 - T, 0)``, with T of each sequence if the graph counts them."""

    def op(kind: str, inputs: list[ir.Value], label: str) -> ir.Value:
        return build.op(kind, inputs, label, dtype=_I64, shape=[None])

    def listed(value: ir.Value, name: str, flat: str) -> ir.Value:
        wide = build.op("Cast", [value], name, dtype=_I64, to=7)
        return op("Reshape", [wide, build.integers(-1)], flat)

    last = listed(last_key, "seqlens_k", "seqlens_flat")
    total = op("Add", [last, build.integers(1)], "total_length")
    counts = site.query_lengths
    new = (
        new_tokens(build, site)
        if counts is None
        else listed(counts, "query_seqlens", "query_seqlens_flat")
    )
    signed = op("Sub", [total, new], "past_length_signed")
    return op("Max", [signed, build.integers(0)], "past_length")


def new_tokens(build: Builder, site: Site) -> ir.Value:
    """Return T of a site that knows its last key, int64 ``[1]``."""
    query = site.query
    return build.once(
        ("new_tokens", site.last_key),
        lambda: build.dim(query.value, query.token_axis, "new_tokens"),
    )


def steps(build: Builder, count: ir.Value, scalar_label: str, label: str) -> ir.Value:
    """Return 0, 1, ..., count - 1, int64 ``[count]``, of a count ``[1]``."""
    scalar = build.op("Squeeze", [count, build.integers(0)], scalar_label, dtype=_I64, shape=[])
    numbers = [build.number(0), scalar, build.number(1)]
    return build.op("Range", numbers, label, dtype=_I64, shape=[None])


@dataclass(frozen=True, eq=False)
class LengthNodes:
    """Makes the lengths that inputs tell whatever the size of the caches."""

    lengths: Lengths  #: the inputs
    overlay_rows: int  #: rows of the caches in front of those of the tokens

    def total_length(self, build: Builder) -> ir.Value:
        """Return S, int64 ``[1]``."""

        def make() -> ir.Value:
            parts = [self.past_length(build), self._new_tokens(build)]
            return self._number(build, "Add", parts, "total_length")

        return build.once("total_length", make)

    def past_length(self, build: Builder) -> ir.Value:
        """Return P, int64 ``[1]``."""
        lengths = self.lengths

        def make() -> ir.Value:
            total = build.dim(lengths.total, 1, "mask_length")
            room = tokens_of_rows(build, build.dim(lengths.past, 2, "slots"), self.overlay_rows)
            before = self._number(build, "Sub", [total, self._new_tokens(build)], "before")
            return self._number(build, "Min", [before, room], "past_length")

        return build.once("past_length", make)

    def _new_tokens(self, build: Builder) -> ir.Value:
        return build.once("new_tokens", lambda: build.dim(self.lengths.tokens, 1, "new_tokens"))

    def _number(self, build: Builder, kind: str, parts: list[ir.Value], label: str) -> ir.Value:
        return build.op(kind, parts, label, dtype=_I64, shape=[1])


def tokens_of_rows(build: Builder, rows: ir.Value, overlay_rows: int) -> ir.Value:
    """Return the tokens that a cache of so many rows has room for, int64 ``[1]``."""
    if not overlay_rows:
        return rows

    def make() -> ir.Value:
        inputs = [rows, build.integers(overlay_rows)]
        behind = build.op("Sub", inputs, "rows_behind_window", dtype=_I64, shape=[1])
        # An empty cache may have no rows at all.
        return build.op("Max", [behind, build.integers(0)], "token_rows", dtype=_I64, shape=[1])

    return build.once(("token_rows", rows), make)
