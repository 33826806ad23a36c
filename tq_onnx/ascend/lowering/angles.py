"""The tables of a rotary embedding, and the positions by which a graph looks into them.

However an exporter computes the cosines and sines of its angles, they are functions of positions:
of integers, the only numbers of a call that reach them. So the graph's own nodes are evaluated for
the positions 0 .. P - 1, which gives the tables, and for a few others in several sequences, which
shows that nothing else has a say, and along which axes tokens and sequences lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.ops.domain import DOMAIN, GATHER

_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)
_VIEWS: Final = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Expand", "Identity", "Cast"})
_LOOKUPS: Final = ("Gather", f"{DOMAIN}.{GATHER}")
_MAX_STEPS: Final = 16
_CALLS: Final = (((5, 0, 3), (1, 6, 2)), ((1, 0), (0, 1)), ((1 << 30,), (0,)))
"""Positions of two sequences: some that do not follow each other, the first two, the last.

Angles may depend on how long a text is, by the largest of its positions.
"""
_CLOSE: Final = 1e-6


@dataclass(frozen=True, eq=False)
class Angles:
    """Cosines and sines by position."""

    cosines: Array  #: float32 ``[P, width]``
    sines: Array  #: likewise
    #: what the graph computes them from, int64 or int32 ``[B, T]``, ``[1, T]`` or ``[T]``
    positions: ir.Value


def read_angles(
    cosines: ir.Value, sines: ir.Value, shape: Sequence[str | int], positions: int
) -> Angles:
    """Return two values as functions of positions.

    Args:
        cosines: a value that broadcasts to ``shape``.
        shape: its dimensions: "B", "T", 1, and the width of the tables at last.
        positions: rows of the tables; of the graph's own tables where it looks into some.
    """
    ids, lookups = _source(cosines, sines)
    limits = [rows for gather in lookups if (rows := _rows(gather)) is not None]
    rows = min(limits, default=positions)
    values, width = [cosines, sines], shape[-1]
    assert isinstance(width, int)
    tables = []
    for numbers in _evaluated(values, ids, np.arange(rows)[None], lookups):
        table = _broadcast(numbers, [1 if dim == "B" else dim for dim in shape], (1, rows))
        tables.append(np.ascontiguousarray(table.reshape(rows, width), np.float32))
    single = rank(ids) == 1 or static_dim(ids, 0) == 1
    for calls in _CALLS:
        places = np.minimum(np.array(calls[:1] if single else calls), rows - 1)
        samples = _evaluated(values, ids, places, lookups)
        for numbers, table in zip(samples, tables, strict=True):
            angles = _broadcast(numbers, shape, places.shape)
            if not np.allclose(angles.reshape(*places.shape, width), table[places], 0, _CLOSE):
                raise NoMatch(f"{cosines.name} depends on more than positions")
    return Angles(tables[0], tables[1], ids)


def read_table(value: ir.Value) -> Array:
    """Return a constant table, float32 ``[P, width]``."""
    (table,) = evaluate([value], {})
    if table.ndim != 2 or table.dtype not in (np.float32, np.float16):
        raise NoMatch(f"{value.name} is no table")
    return np.ascontiguousarray(table, np.float32)


def position_ids(build: Builder, ids: ir.Value) -> ir.Value:
    """Make positions, int64 ``[B, T]`` or ``[1, T]``, before the node that ``build`` is at."""

    def make() -> ir.Value:
        positions = ids
        if ids.dtype is not ir.DataType.INT64:
            positions = build.op(
                "Cast", [ids], "position_ids", dtype=ir.DataType.INT64, shape=sizes(ids), to=7
            )
        if rank(ids) == 2:
            return positions
        shape = [1, *(sizes(ids) or (None,))]
        return build.op(
            "Unsqueeze",
            [positions, build.integers(0)],
            "position_ids",
            dtype=ir.DataType.INT64,
            shape=shape,
        )

    return build.once(("position_ids", ids), make)


def table(build: Builder, name: str, numbers: Array) -> ir.Value:
    """Return a table as a constant; the same numbers give the same one."""
    digest = hashlib.sha256(numbers.tobytes()).hexdigest()[:8]
    return build.constant(f"tq.{name}.{len(numbers)}x{numbers.shape[1]}.{digest}", numbers)


def _evaluated(
    values: Sequence[ir.Value], ids: ir.Value, numbers: Array, lookups: Sequence[ir.Node]
) -> list[Array]:
    """Return values for given positions, ``[B, T]``."""
    dtype = np.int64 if ids.dtype is None else ids.dtype.numpy()
    inputs = {ids: (numbers[0] if rank(ids) == 1 else numbers).astype(dtype)}
    for gather in lookups:
        table, indices = gather.inputs
        # The evaluator does not know the TurboQuant operators.
        if gather.domain == DOMAIN and table is not None and indices is not None:
            (rows,), (places,) = evaluate([table], {}), evaluate([indices], inputs)
            if places.size and not -len(rows) <= places.min() <= places.max() < len(rows):
                raise NoMatch(f"{table.name} has {len(rows)} rows, and others are looked up")
            inputs[gather.outputs[0]] = rows[places]
    return evaluate(values, inputs)


def _broadcast(numbers: Array, shape: Sequence[str | int], sizes: tuple[int, ...]) -> Array:
    named = dict(zip("BT", sizes, strict=True))
    expected = [dim if isinstance(dim, int) else named[dim] for dim in shape]
    try:
        return np.broadcast_to(numbers, expected)
    except ValueError as error:
        raise NoMatch(f"cosines of the shape {numbers.shape}, expected {expected}") from error


def _source(*values: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the positions that numbers are computed from, and the nodes that look up by them."""
    roots: set[ir.Value] = set()
    lookups: list[ir.Node] = []
    visited: set[ir.Node] = set()
    pending: list[ir.Value | None] = list(values)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in visited:
            continue
        visited.add(node)
        for index, operand in enumerate(node.inputs):
            if operand is None or operand.const_value is not None:
                continue
            if operand.dtype not in _INTEGERS:
                pending.append(operand)
            elif kind(node) == "Cast":
                roots.add(_before_views(operand))
            elif kind(node) in _LOOKUPS and index == 1:
                roots.add(_before_views(operand))
                lookups.append(node)
    if len(roots) != 1:
        raise NoMatch(f"{values[0].name} is computed from {len(roots)} values of integers")
    return roots.pop(), lookups


def _rows(gather: ir.Node) -> int | None:
    source = gather.inputs[0]
    return None if source is None else static_dim(source, 0)


def _before_views(value: ir.Value) -> ir.Value:
    """Return the positions that a value is a view of: the first with at most two axes."""
    positions = value
    for _ in range(_MAX_STEPS):
        if value.dtype in _INTEGERS and rank(value) in (1, 2):
            positions = value
        node = value.producer()
        if node is None or kind(node) not in _VIEWS or node.inputs[0] is None:
            break
        value = node.inputs[0]
    if rank(positions) not in (1, 2):
        raise NoMatch(f"{positions.name} is no list of positions")
    return positions
