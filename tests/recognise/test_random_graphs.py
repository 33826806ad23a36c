"""Random graphs: a conversion computes what the graph computes, or the graph is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from tests.decoders.onelayer import TOKENS
from tests.decoders.random_attention import concatenated
from tests.decoders.random_graphs import CAPACITY, RandomGraph
from tests.decoders.random_operators import fused
from tests.decoders.running import NUMPY, Array, convert, session
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import Plan

EXACT = 1e-5
SPARE = 5
"""Slots behind the rows of a cache that is updated in place."""
NOTHING = -1e8
"""The best score of a query that sees no key: a conversion answers zeros, see docs/operators.md."""
CALLS = ((0, 6), (6, 7), (7, 10), (10, 11), (6, 8), (8, 9))
"""Beginning and end of each call; after four the text is rewound and goes on otherwise."""
PAIRED = ((0, 6), (6, 8), (8, 12), (12, 14), (8, 10), (10, 12))
"""The same for graphs that take two ids at a time."""
STEPS = ((0, 6), (6, 7), (7, 8), (8, 9), (6, 7), (7, 8))
"""The same for operators that append to several sequences one by one only."""
RUN_ERRORS = (
    onnxruntime.capi.onnxruntime_pybind11_state.Fail,
    onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
    onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
    onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph,
)
RELAXED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

Calls = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Feeding:
    """A caller: its texts, and how it calls.

    Attributes:
        graph: what is called.
        calls: beginning and end of each call.
        batch: B.
        padding: tokens on the left of the first sequence that do not count.
        later: whether masks show rows behind those that a call writes.
        longer: whether the mask of the tokens is longer than they are; caches grow then.
    """

    graph: RandomGraph
    calls: Calls
    batch: int
    padding: int
    later: bool = False
    longer: bool = False

    def rows(self, tokens: int) -> int:
        """Rows of a cache for so many tokens."""
        return self.graph.prefix + tokens * self.graph.rate // 2

    def kept(self, stop: int) -> Array:
        """The mask of the first tokens: the first sequence is padded on the left."""
        kept = np.ones((self.batch, stop), np.int64)
        kept[0, : self.padding] = 0
        return kept

    def feeds(self, number: int) -> dict[str, Array]:
        """Whatever a graph may take but its caches."""
        start, stop = self.calls[number]
        rng = np.random.default_rng(100 + number)
        kept = self.kept(stop)
        before, rows = self.rows(start), self.rows(stop)
        columns = CAPACITY if self.graph.static else rows
        visible = np.arange(columns) <= np.arange(before, rows)[:, None]
        if self.graph.static and self.later:
            # Rows of an earlier call, behind those that this one writes.
            visible |= np.arange(columns) < self.rows(
                max(end for _, end in self.calls[: number + 1])
            )
        visible = np.tile(visible, (self.batch, 1, 1, 1))
        some = visible & (rng.random(visible.shape) < 0.8)
        some[..., 0] = True
        draws = rng.normal(size=visible.shape)
        segments = np.random.default_rng(5).integers(0, 2, (self.batch, 99))
        return {
            "input_ids": rng.integers(3, TOKENS, (self.batch, stop - start)),
            "attention_mask": np.pad(kept, ((0, 0), (0, 3 * self.longer)), constant_values=1),
            "position_ids": np.maximum(np.cumsum(kept, axis=1) - 1, 0)[:, start:],
            "cache_position": np.arange(start, stop),
            "past_length": np.array(before),
            "begin": np.array(before),
            "segments": segments[:, :stop],
            "hidden": np.tile([0, 3], (self.batch, 1)),
            "visible": some,
            "given_bias": np.where(visible, draws, np.finfo(np.float32).min).astype(np.float32),
            "seqlens_k": np.full(self.batch, stop - 1),
            "total_length": np.array(stop),
            "write_indices": np.full(self.batch, before),
            "valid": np.full(self.batch, rows),
        }

    def run(self, model: onnxruntime.InferenceSession, capacity: int = 0) -> list[dict[str, Array]]:
        """The outputs of each call.

        Args:
            model: original or converted.
            capacity: slots of the caches; 0 lets them grow.
        """
        types = {entry.name: NUMPY[entry.type] for entry in model.get_inputs()}
        widths = {entry.name: entry.shape for entry in model.get_inputs()}
        names = [entry.name for entry in model.get_outputs()]
        caches = {
            name: self._first(types[name], widths[name], capacity, seed)
            for seed, name in enumerate(sorted(name for name in types if name.startswith("past_")))
            if len(widths[name]) == 4
        }
        results = []
        for number, (start, _) in enumerate(self.calls):
            held = self.rows(start)
            if not capacity:
                caches = {name: rows[:, :, :held] for name, rows in caches.items()}
            given = {
                name: np.asarray(array).astype(types[name])
                for name, array in self.feeds(number).items()
                if name in types
            }
            found = dict(zip(names, model.run(names, given | caches), strict=True))
            caches = {name: found[name.replace("past", "present")] for name in caches}
            results.append(found)
        return results

    def _first(self, dtype: Any, shape: list[Any], capacity: int, seed: int) -> Array:
        """A cache before the first call: learned rows, and garbage behind them.

        In a cache of fixed size a graph may see all slots, so both models find the same there.
        """
        rng = np.random.default_rng(seed)
        # Rows of a conversion with the preset ``raw`` are the same numbers, as bytes.
        rows = np.random.default_rng(seed).standard_normal((self.batch, shape[1], 99, 16))
        held = CAPACITY if self.graph.static else self.rows(0)
        floats = rows.astype(np.float32)[:, :, :held]
        head = floats if dtype is np.float32 else np.ascontiguousarray(floats).view(np.uint8)
        slots = max(capacity, held)
        garbage = rng.integers(0, 99, (self.batch, shape[1], slots, head.shape[3])).astype(dtype)
        garbage[:, :, :held] = head
        return garbage


def feedings(graph: RandomGraph) -> list[Feeding]:
    """Callers of a graph: one alone, and several of different lengths."""
    calls = PAIRED if graph.rate == 1 or graph.coarse else CALLS
    several = STEPS if graph.choices.get("operator") == "GroupQueryAttention" else calls
    # GroupQueryAttention takes padding on the right.
    padding = 2 if graph.masked and several is not STEPS else 0
    found = [Feeding(graph, calls, 1, 0), Feeding(graph, several, 2, padding)]
    if graph.static:
        found.append(Feeding(graph, calls, 1, 0, later=True))
    if graph.cut:
        found.append(Feeding(graph, calls, 2, padding, longer=True))
    return found


def converted(graph: RandomGraph) -> tuple[onnxruntime.InferenceSession, Plan] | None:
    """The conversion; None if it is refused."""
    model = graph.model()
    try:
        plan = convert(model, "raw")
    except UnsupportedModelError:
        return None
    return session(model, library=True), plan


def check(graph: RandomGraph) -> str:
    """Compares a graph with its conversion; tells what came of it."""
    try:
        original = session(graph.model(floor=True))
        wanted = [(feeding, _original(feeding, original)) for feeding in feedings(graph)]
    except (*RUN_ERRORS, UnsupportedModelError):
        return "does not run"
    wanted = [(feeding, results) for feeding, results in wanted if results]
    if not wanted:
        return "does not run"
    made = converted(graph)
    if made is None:
        return "refused"
    model, plan = made
    for feeding, results in wanted:
        _compare(graph, feeding, results, feeding.run(model, CAPACITY if graph.static else 0))
        if plan.fixed_capacity and not graph.static and not feeding.longer:
            capacity = max(feeding.rows(stop) for _, stop in feeding.calls) + SPARE
            _compare(graph, feeding, results, feeding.run(model, capacity))
    return "in place" if plan.fixed_capacity else "grows"


def _original(
    feeding: Feeding, model: onnxruntime.InferenceSession
) -> list[dict[str, Array]] | None:
    """What the original answers; None if it does not take such calls."""
    try:
        return feeding.run(model, CAPACITY if feeding.graph.static else 0)
    except RUN_ERRORS:
        return None


def _compare(
    graph: RandomGraph,
    feeding: Feeding,
    wanted: list[dict[str, Array]],
    found: list[dict[str, Array]],
) -> None:
    for number, (expected, answers) in enumerate(zip(wanted, found, strict=True)):
        start, stop = feeding.calls[number]
        counted = feeding.kept(stop)[:, start:].astype(bool)
        if graph.floor:
            seen = (expected[graph.floor] > NOTHING).all(axis=(1, 3))
            counted &= _of_ids(seen, counted.shape[1])
        logits = expected["logits"][counted]
        if not logits.size:
            continue
        error = np.abs(answers["logits"][counted] - logits).max() / np.abs(logits).max()
        assert error <= EXACT, f"call {number} of {feeding.batch} is {error:.1%} off"


def _of_ids(seen: Array, ids: int) -> Array:
    """What queries saw ``[B, n]``, for each id ``[B, ids]``."""
    rows = seen.shape[1]
    if rows > ids:
        return seen.reshape(len(seen), ids, rows // ids).all(axis=2)
    return np.repeat(seen, ids // rows, axis=1)


@settings(max_examples=130, suppress_health_check=RELAXED)
@given(graph=concatenated())
def test_what_is_spelled_out(graph: RandomGraph) -> None:
    check(graph)


@settings(max_examples=70, suppress_health_check=RELAXED)
@given(graph=fused())
def test_what_is_one_operator(graph: RandomGraph) -> None:
    check(graph)


@pytest.mark.parametrize("strategy", [concatenated, fused])
def test_the_usual_graph_converts_and_mistakes_show(
    strategy: Callable[[], st.SearchStrategy[RandomGraph]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: nothing above passes because all is refused, or because nothing is compared."""
    usual = find(
        strategy(),
        lambda graph: graph.masked and {*graph.choices} <= {"attention", "operator"},
        settings=settings(database=None, max_examples=2000, suppress_health_check=RELAXED),
    )
    assert check(usual) == "in place"
    right = convert

    def mistaken(model: ir.Model, preset: str) -> Plan:
        plan = right(model, preset)
        for node in model.graph:
            if "scale" in node.attributes:
                scale = node.attributes.get_float("scale") * 1.01
                node.attributes["scale"] = ir.AttrFloat32("scale", scale)
        return plan

    monkeypatch.setattr(sys.modules[__name__], "convert", mistaken)
    with pytest.raises(AssertionError, match="off"):
        check(usual)
