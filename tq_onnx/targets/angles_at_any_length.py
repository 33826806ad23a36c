"""Show that keys turn by the same angles at any position of a text, however long it is.

They are measured on a few hundred positions (``tq_onnx.quality.rotaries``). Some graphs take other
frequencies for long texts, or positions that do not count on. Whatever a graph makes of positions
and lengths on the way to a key is therefore computed for texts of two lengths: numbers of one
position must be the same in both, in prompts and in single steps, and a column of cosines or sines
must go on as it began: u(p + 1) + u(p - 1) = c u(p).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.layers import converted_layers
from tq_onnx.graph.dependence import dependents, read_values
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.ops.domain import DOMAIN, MICROSOFT, ROTARY_EMBEDDING
from tq_onnx.plan import Plan
from tq_onnx.targets.causality import arrays_of_call

FAR: Final = 200_000
"""Tokens of the long text; longer than those at which known models change their angles."""
_NEAR: Final = 64
_STEP: Final = 2
"""Tokens of a call that continues the long text."""
_WAVE: Final = 0.1
"""Of the largest number, in columns: float32 loses 0.02 radians at the last position."""
_REPEATED: Final = 1e-4
"""Of the largest number, at one position: it is computed alike, and rounded."""
_PROJECTIONS: Final = ("MatMul", "Gemm", "Einsum", "Conv")
"""In the name of an operator that makes keys; before it, nothing turns them."""
_LOOKUPS: Final = {
    "RotaryEmbedding": (3, 1, 2),
    f"{MICROSOFT}.RotaryEmbedding": (1, 2, 3),
    f"{DOMAIN}.{ROTARY_EMBEDDING}": (3, 1, 2),
}
"""Inputs of operators that look up angles: positions, cosines and sines."""

_Source = tuple[ir.Value, ...]
"""A value; or a table, and the positions at which its rows are read."""


def length_complaints(model: ir.Model, plan: Plan, room: int | None) -> list[str]:
    """Return for each layer why its keys may turn otherwise in long texts; empty if they do not."""
    inputs = {value for value in model.graph.inputs if value.const_value is None}
    tokens = {value for value in inputs if value.name == plan.interface.tokens}
    varying = dependents(model.graph, inputs)
    contents = dependents(model.graph, tokens, by_size=False)
    last = max(2 * _STEP, min(room or FAR, FAR))
    known: dict[_Source, str] = {}
    reasons = []
    for layer in converted_layers(model, plan):
        sources = [
            source for source in _sources(layer.key.node, contents) if varying.intersection(source)
        ]
        for source in sources:
            if source not in known:
                known[source] = _complaint(source, model, plan, last)
        reasons.append(next((known[source] for source in sources if known[source]), ""))
    return reasons


def _sources(encoder: ir.Node, contents: set[ir.Value]) -> Iterator[_Source]:
    """Yield what enters keys behind their projection: the tokens, and what is not made of them."""
    seen: set[ir.Node] = set()
    pending = list(read_values(encoder))
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None:
            yield (value,)
            continue
        if node in seen or any(name in node.op_type for name in _PROJECTIONS):
            continue
        seen.add(node)
        looked_up = [
            node.inputs[slot] if slot < len(node.inputs) else None
            for slot in _LOOKUPS.get(kind(node), ())
        ]
        positions, *tables = looked_up or [None]
        if positions is not None:
            yield from ((table, positions) for table in tables if table is not None)
        for value in read_values(node):
            if value in contents:
                pending.append(value)
            elif positions is None:
                yield (_without_views(value),)


def _without_views(value: ir.Value) -> ir.Value:
    """Return what a value has its numbers of, which layers share."""
    maker = value.producer()
    while maker is not None and maker.op_type in ("Identity", "Unsqueeze") and maker.inputs[0]:
        value = maker.inputs[0]
        maker = value.producer()
    return value


def _complaint(source: _Source, model: ir.Model, plan: Plan, room: int) -> str:
    """Return why a value may turn keys otherwise in long texts; empty if it does not."""
    name = source[0].name
    if name == plan.interface.tokens:
        return f"positions or angles depend on the contents of {name}"
    try:
        near, far = (
            _numbers(source, model, plan, tokens, 0) for tokens in (min(_NEAR, room // 2), room)
        )
        has_past = any(cache.past for cache in plan.caches)
        step = _numbers(source, model, plan, _STEP, room - _STEP) if has_past else far
    except NoMatch as miss:
        return f"it is not shown that they turn alike at any length ({miss.reason})"
    if near.dtype.kind == "b":
        is_same = len({*near.flat} | {*np.unique(far)} | {*step.flat}) < 2
        return "" if is_same else f"{name} is a condition of positions or lengths"
    lengths = zip(near.shape, far.shape, strict=False)
    by_token = [axis for axis, (short, long) in enumerate(lengths) if short != long]
    if not by_token or near.ndim != far.ndim:  # sizes differ with lengths, angles must not
        is_same = near.dtype.kind == "i" or np.array_equal(near, far)
        return "" if is_same else f"{name} depends on the length of the text"
    wide = np.float64 if near.dtype.kind == "i" else np.float32
    near, far, step = (
        np.moveaxis(each, by_token[0], 0).reshape(each.shape[by_token[0]], -1).astype(wide)
        for each in (near, far, step)
    )
    largest = float(np.abs(far).max(initial=0))
    repetition, wave = (0.0, 0.5) if wide is np.float64 else (_REPEATED * largest, _WAVE * largest)
    parts = _apart(near, far[: len(near)]), _apart(step, far[-len(step) :])
    if not (np.isfinite(far).all() and all(part <= repetition for part in parts)):
        return f"{name} has other numbers for the same positions in texts of other lengths"
    return "" if _from_waves(far) <= wave else f"{name} does not go on with positions as it begins"


def _apart(left: Array, right: Array) -> float:
    if left.shape != right.shape:
        return float("inf")
    return float(np.abs(left - right).max(initial=0))


def _from_waves(rows: Array) -> float:
    """Return how far columns ``[positions, columns]`` are from waves; straight lines are some."""
    furthest = 0.0
    for column in np.ascontiguousarray(rows.T):  # each is in the processor's cache
        middle, sums = column[1:-1], column[2:] + column[:-2]
        factor = middle @ sums / (middle @ middle or 1)
        furthest = max(furthest, float(np.abs(sums - factor * middle).max(initial=0)))
    return furthest


def _numbers(source: _Source, model: ir.Model, plan: Plan, tokens: int, past: int) -> Array:
    """Compute a source in a call of one sequence."""
    numbers, *positions = evaluate(source, arrays_of_call(source, plan, model, (1, tokens, past)))
    if not positions:
        return numbers
    places = positions[0].reshape(-1)
    if len(places) == 1:  # of the first token
        places = places + np.arange(tokens)
    if places.min() < 0 or places.max() >= len(numbers):
        raise NoMatch(f"{source[0].name} has not a row for each position")
    return numbers[places]
