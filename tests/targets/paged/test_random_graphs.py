"""Random graphs with pages: packed requests compute what the graph computes, or it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoders.onelayer import TOKENS
from tests.decoders.random_attention import concatenated
from tests.decoders.random_graphs import RandomGraph
from tests.decoders.random_operators import fused
from tests.decoders.running import convert, session
from tests.recognise.test_random_graphs import EXACT, NOTHING, RELAXED, RUN_ERRORS, Calls, Feeding
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.lower import lowering_of
from tq_onnx.verification.pages import PagedDecoder

#: Of two requests; each call of the paged model has one of either.
REQUESTS: tuple[Calls, Calls] = (
    ((0, 6), (6, 7), (7, 10), (10, 11)),
    ((0, 1), (1, 9), (9, 10), (10, 12)),
)


class Request(Feeding):
    """A caller with tokens of its own."""

    @property
    def text(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.calls[0][1]).integers(3, TOKENS, 12)

    def feeds(self, number: int) -> dict[str, Any]:
        start, stop = self.calls[number]
        return {**super().feeds(number), "input_ids": self.text[None, start:stop]}


def paged(graph: RandomGraph) -> tuple[ir.Model, Plan] | None:
    """The conversion; None if it is refused."""
    model = graph.model()
    try:
        lowering = lowering_of(convert(model, "raw"), 16)
        for step in lowering.passes:
            step(model)
    except UnsupportedModelError:
        return None
    except ir.passes.PassError as error:
        if isinstance(error.__cause__, UnsupportedModelError):
            return None
        raise
    return model, lowering.plan_behind


def check(graph: RandomGraph) -> str:
    """Compares a graph with its conversion; tells what came of it."""
    if graph.prefix:
        return "begins with rows in its caches, which no engine gives"
    requests = [Request(graph, calls, 1, 0) for calls in REQUESTS]
    try:
        original = session(graph.model(floor=True))
        wanted = [one.run(original) for one in requests]
    except (*RUN_ERRORS, UnsupportedModelError):
        return "does not run"
    made = paged(graph)
    if made is None:
        return "refused"
    model, plan = made
    decoder = PagedDecoder(session(model, library=True), plan, blocks=4)
    for number in range(len(REQUESTS[0])):
        fed = {}
        for name, one in enumerate(requests):
            start, stop = one.calls[number]
            fed[name] = one.text[start:stop]
        answers = decoder.run(fed)
        for answer, results in zip(answers, wanted, strict=True):
            expected = results[number]
            if graph.floor and not (expected[graph.floor][:, :, -1] > NOTHING).all():
                continue
            logits = expected["logits"][0, -1]
            error = np.abs(answer - logits).max() / np.abs(logits).max()
            assert error <= EXACT, (graph, number, error)
    return "paged"


@settings(max_examples=25, suppress_health_check=RELAXED)
@given(graph=st.one_of(concatenated(), concatenated(), fused()))
def test_a_conversion_computes_what_the_graph_computes(graph: RandomGraph) -> None:
    check(graph)


@pytest.mark.parametrize("kind", [concatenated, fused], ids=lambda kind: kind.__name__)
def test_some_graphs_convert(kind: Any) -> None:
    found: list[str] = []

    @settings(max_examples=60, database=None, suppress_health_check=RELAXED)
    @given(graph=kind())
    def collect(graph: RandomGraph) -> None:
        if "paged" not in found:
            found.append(check(graph))

    collect()
    assert "paged" in found
