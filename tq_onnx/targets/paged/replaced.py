"""Find the values that a decoder computes from lengths, masks and positions, and replace them.

A paged model has neither mask nor position_ids, and its caches have no lengths. Each value that is
computed from those, and that the decoder reads, must be proved to be one of three things: the
positions of the new tokens, in some shape, a list of sizes, or a condition that only padding
changes. All other values have no reader then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.ports import TOKENS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.dependence import dependents, read_values
from tq_onnx.graph.evaluate import Array, evaluate, has_numbers
from tq_onnx.graph.liveness import nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.plan import Plan
from tq_onnx.targets.causality import BY_CONTENTS, LENGTHS, Given, presents
from tq_onnx.targets.paged.packed import SCOPE, Packed

_CALLS: Final = LENGTHS
_MOST_SIZES: Final = 8
_BATCH, _TOKENS = "batch", "tokens"

Size = int | str


@dataclass(frozen=True, eq=False)
class Positions:
    """A value that is the positions of the new tokens."""

    rank: int  #: its number of dimensions
    axis: int  #: the one of the tokens; the others are 1 in a batch of one


@dataclass(frozen=True, eq=False)
class SizeList:
    """A value that says sizes: numbers, ``batch`` and ``tokens``; a scalar has one."""

    sizes: tuple[Size, ...]
    is_scalar: bool


@dataclass(frozen=True, eq=False)
class Always:
    """A condition that is the same wherever there is no padding."""

    answer: bool  #: the condition
    sizes: tuple[Size, ...]  #: of the value


Stand = Positions | SizeList | Always


def find_replaced(model: ir.Model, plan: Plan, wanted: Iterable[ir.Value]) -> dict[ir.Value, Stand]:
    """Find the values of a converted model that have to be replaced, and by what.

    Args:
        model: the converted model, as it was before anything of it was paged.
    """
    inputs = set(model.graph.inputs)
    # States hold something of earlier tokens.
    held = {plan.interface.tokens, *(pair.past for pair in plan.interface.states)}
    gone = {value for value in inputs if value.name not in held}
    # The size of a new cache is a length, too.
    touched = dependents(model.graph, gone | presents(model).keys())
    calls = [Given.of(plan, model, call) for call in _CALLS]
    contents = dependents(model.graph, inputs - gone, by_size=False)
    contents |= _without_numbers(model.graph, calls[0])
    found: dict[ir.Value, Stand] = {}
    seen: set[ir.Value] = set()
    pending = list(wanted)
    while pending:
        value = pending.pop()
        if value in seen or value not in touched:
            continue
        seen.add(value)
        stand = None if value in contents else _stand(value, calls)
        if stand is not None:
            found[value] = stand
            continue
        maker = value.producer()
        if maker is None:
            raise NoMatch(
                f"the graph makes something else of {value.name} than masks, positions and lengths"
            )
        pending.extend(read_values(maker))
    return found


def _without_numbers(graph: ir.Graph, call: Given) -> set[ir.Value]:
    """Return the values that no call tells, nor constants: also what may have sizes by contents."""
    values: set[ir.Value] = set()

    def is_one(value: ir.Value) -> bool:
        if value.producer() is not None or value in call.arrays:
            return value in values
        return not has_numbers(value)

    for node in graph:
        outputs = set(node.outputs).difference(call.arrays)
        if not outputs or call.declared_shape(node) is not None:
            continue
        items = (node, *nested_nodes(node))
        inputs = (value for item in items for value in item.inputs if value is not None)
        if any(kind(item) in BY_CONTENTS for item in items) or any(map(is_one, inputs)):
            values |= outputs
    return values


def _stand(value: ir.Value, calls: Iterable[Given]) -> Stand | None:
    """Return what a value is, shown by its numbers in calls without padding."""
    try:
        arrays = [evaluate([value], call.arrays_for([value]))[0] for call in calls]
    except NoMatch:
        return None
    return _as_positions(arrays) or _as_sizes(arrays) or _as_always(arrays)


def _as_positions(calls: list[Array]) -> Positions | None:
    rank = calls[0].ndim
    by_axis = (Positions(rank, axis) for axis in range(rank))
    return next((one for one in by_axis if _counts(one, calls)), None)


def _counts(positions: Positions, calls: list[Array]) -> bool:
    for numbers, (batch, tokens, past) in zip(calls, _CALLS, strict=True):
        if numbers.ndim != positions.rank or numbers.shape[positions.axis] != tokens:
            return False
        others = np.delete(numbers.shape, positions.axis)
        if not np.isin(others, (1, batch)).all() or numbers.dtype.kind not in "if":
            return False
        wanted = np.arange(past, past + tokens)
        if not (np.moveaxis(numbers, positions.axis, -1) == wanted).all():
            return False
    return True


def _as_sizes(calls: list[Array]) -> SizeList | None:
    first = calls[0]
    if first.ndim > 1 or first.size > _MOST_SIZES or first.dtype.kind != "i":
        return None
    if any(numbers.shape != first.shape for numbers in calls):
        return None
    columns = np.stack([numbers.reshape(-1) for numbers in calls], axis=1)
    meanings = [_meaning(column) for column in columns]
    if any(meaning is None for meaning in meanings):
        return None
    told = tuple(meaning for meaning in meanings if meaning is not None)
    return SizeList(told, first.ndim == 0)


def _as_always(calls: list[Array]) -> Always | None:
    first = calls[0]
    if first.dtype.kind != "b" or any(numbers.ndim != first.ndim for numbers in calls):
        return None
    answers = {bool(answer) for numbers in calls for answer in np.unique(numbers)}
    shapes = np.array([numbers.shape for numbers in calls], np.int64).reshape(len(calls), -1)
    sizes = [_meaning(column) for column in shapes.T]
    if len(answers) != 1 or None in sizes:
        return None
    return Always(answers.pop(), tuple(size for size in sizes if size is not None))


def _meaning(column: Array) -> Size | None:
    if (column == column[0]).all():
        return int(column[0])
    for name, index in ((_BATCH, 0), (_TOKENS, 1)):
        if (column == [call[index] for call in _CALLS]).all():
            return name
    # Of a batch of one, all tokens.
    return _TOKENS if (column == [call[0] * call[1] for call in _CALLS]).all() else None


def put_in_place(build: Builder, found: dict[ir.Value, Stand], packed: Packed) -> set[ir.Value]:
    """Put positions and sizes in the places of what was found.

    Returns:
        the values that are positions.
    """
    positions = set()
    with build.before(packed.place, SCOPE):
        for value, stand in found.items():
            if isinstance(stand, Always):
                made = _condition(build, stand, packed)
            elif isinstance(stand, SizeList):
                made = _cast(build, _sizes(build, stand.sizes, packed), value.dtype)
                if stand.is_scalar:
                    inputs = [made, build.integers(0)]
                    made = build.op("Squeeze", inputs, "size", dtype=made.dtype, shape=[])
            else:
                made = _cast(build, _shaped(build, stand, packed), value.dtype)
                positions.add(made)
            value.replace_all_uses_with(made)
    return positions


def _condition(build: Builder, stand: Always, packed: Packed) -> ir.Value:
    answer = build.constant(f"tq.bool.{stand.answer}".lower(), np.array(stand.answer))
    if not stand.sizes:
        return answer
    shape = [1 if size == _BATCH else TOKENS if size == _TOKENS else size for size in stand.sizes]
    inputs = [answer, _sizes(build, stand.sizes, packed)]
    return build.op("Expand", inputs, "condition", dtype=ir.DataType.BOOL, shape=shape)


def _sizes(build: Builder, sizes: tuple[Size, ...], packed: Packed) -> ir.Value:
    """Return a list of sizes, int64."""
    tokens = build.once(SCOPE, lambda: build.dim(packed.ids, 1, "tokens"))
    numbers = {_BATCH: build.integers(1), _TOKENS: tokens}
    parts = [numbers[size] if isinstance(size, str) else build.integers(size) for size in sizes]
    if not parts:
        return build.constant("tq.int64.none", np.zeros(0, np.int64))
    if len(parts) == 1:
        return parts[0]
    int64 = ir.DataType.INT64
    return build.op("Concat", parts, "sizes", dtype=int64, shape=[len(parts)], axis=0)


def _shaped(build: Builder, stand: Positions, packed: Packed) -> ir.Value:
    if (stand.rank, stand.axis) == (2, 1):
        return packed.positions
    dims = [-1 if axis == stand.axis else 1 for axis in range(stand.rank)]
    shape = [TOKENS if axis == stand.axis else 1 for axis in range(stand.rank)]
    inputs = [packed.positions, build.integers(*dims)]
    return build.op("Reshape", inputs, "positions", dtype=ir.DataType.INT64, shape=shape)


def _cast(build: Builder, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    if dtype is None or dtype is value.dtype:
        return value
    shape = None if value.shape is None else list(sizes(value) or ())
    return build.op("Cast", [value], "as_read", dtype=dtype, shape=shape, to=int(dtype))
