from __future__ import annotations

import pytest

from tests.runtime.models import DYNAMO, ids, opened
from tq_onnx.measure.greedy import NEAR_TIE, GreedyFigures, compare_greedy
from tq_onnx.runtime.generate import generate

PROMPT = ids(12, seed=6)[0].tolist()


def test_equal_continuations() -> None:
    decoder = opened(DYNAMO, "original").decoder()
    found = compare_greedy(decoder, PROMPT, (1, 2, 3), (1, 2, 3), 0.1)
    assert (found.first_difference, found.gap, found.near_tie) == (None, None, False)
    assert str(found) == "the same 3 tokens"


def test_the_gap_is_the_originals_own() -> None:
    original = opened(DYNAMO, "original")
    own = generate(original.decoder(), PROMPT, max_new_tokens=6).tokens
    logits = original.decoder().prefill([[*PROMPT, *own[:4]]])[0, -1]
    other = int(logits.argsort()[-2])
    found = compare_greedy(original.decoder(), PROMPT, own, (*own[:4], other, 0), 0.1)
    assert found.first_difference == 4
    assert found.gap == pytest.approx(float(logits[own[4]] - logits[other]), abs=1e-4)
    assert found.gap is not None and found.gap > 0
    assert "the same 4 of 6 tokens" in str(found)


@pytest.mark.parametrize(("factor", "tie"), [(0.99, True), (1.01, False)])
def test_near_ties_are_measured_in_noise(factor: float, tie: bool) -> None:
    figures = GreedyFigures(1, (1,), (2,), 0, factor * NEAR_TIE * 0.05, 0.05)
    assert figures.near_tie is tie
    assert ("not a near-tie" in str(figures)) is not tie
