from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.models import DYNAMO, GENAI, VOCABULARY, ids, opened
from tq_onnx.errors import UsageError
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import compare, log_softmax, perplexity
from tq_onnx.measure.windows import windows
from tq_onnx.progress import Progress

TEXT = ids(150, seed=5)[0]


@given(st.integers(2, 500), st.integers(2, 80), st.data())
def test_windows_score_every_position_once(tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    scored = []
    for window in windows(tokens, context, stride):
        assert 0 <= window.start <= window.scored < window.stop <= tokens
        assert window.stop - window.start <= context
        scored += range(window.scored, window.stop - 1)
    assert scored == list(range(tokens - 1))


@given(st.integers(2, 500), st.integers(2, 80), st.data())
def test_later_windows_see_context(tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    for window in windows(tokens, context, stride)[1:]:
        assert window.scored - window.start >= context - stride - 1


@pytest.mark.parametrize(
    ("tokens", "context", "stride"), [(1, 8, 4), (0, 8, 4), (9, 1, 1), (9, 8, 0), (9, 8, 8)]
)
def test_windows_that_make_no_sense(tokens: int, context: int, stride: int) -> None:
    with pytest.raises(UsageError):
        windows(tokens, context, stride)


def test_a_model_equals_itself() -> None:
    found = compare(
        opened(DYNAMO, "original").decoder(),
        opened(GENAI, "original").decoder(),  # another export of the same weights
        TEXT,
        vocabulary=VOCABULARY,
        context=64,
        stride=32,
    )
    assert found.positions == len(TEXT) - 1
    assert found.original_perplexity == pytest.approx(found.converted_perplexity, rel=1e-5)
    assert abs(found.kl_mean) < 1e-8
    assert found.top1_agreement == 1
    assert found.logit_max_difference < 1e-4
    assert found.logit_relative_error < 1e-5


def test_figures_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = opened(DYNAMO, "original"), opened(DYNAMO, "kernel")
    own, other = (
        s.decoder().prefill(TEXT[None])[0, :-1].astype(np.float64) for s in (before, after)
    )
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (own, other))
    next_ids = TEXT[1:]
    rows = np.arange(len(next_ids))
    kl = (p * np.log(p / q)).sum(-1)
    monkeypatch.setattr(divergence, "_LONGEST_CHUNK", 17)  # several chunks in the one window
    found = compare(
        before.decoder(), after.decoder(), TEXT, vocabulary=VOCABULARY, context=200, stride=100
    )
    assert found.original_perplexity == pytest.approx(
        np.exp(-np.log(p[rows, next_ids]).mean()), rel=1e-5
    )
    assert found.converted_perplexity == pytest.approx(
        np.exp(-np.log(q[rows, next_ids]).mean()), rel=1e-5
    )
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-3)
    assert found.top1_agreement == (own.argmax(-1) == other.argmax(-1)).mean()
    assert found.logit_max_difference == pytest.approx(np.abs(own - other).max(), rel=1e-3)
    centred = [x - x.mean(-1, keepdims=True) for x in (own, other)]
    wanted = np.linalg.norm(centred[0] - centred[1]) / np.linalg.norm(centred[0])
    assert found.logit_relative_error == pytest.approx(wanted, rel=1e-3)
    assert 0 < found.kl_mean < 0.1


def test_progress_counts_windows() -> None:
    seen: list[Progress] = []
    decoders = (opened(DYNAMO, "original").decoder(), opened(DYNAMO, "kernel").decoder())
    compare(
        *decoders,
        TEXT,
        vocabulary=VOCABULARY,
        context=50,
        stride=25,
        on_progress=seen.append,
    )
    doing = "Reading the text with both models"
    assert seen == [Progress(doing, done, 5) for done in range(1, 6)]


def test_one_model_alone() -> None:
    found = perplexity(
        opened(DYNAMO, "kernel").decoder(), TEXT, vocabulary=VOCABULARY, context=64, stride=32
    )
    both = compare(
        opened(DYNAMO, "original").decoder(),
        opened(DYNAMO, "kernel").decoder(),
        TEXT,
        vocabulary=VOCABULARY,
        context=64,
        stride=32,
    )
    assert found == pytest.approx(both.converted_perplexity, rel=1e-6)


def test_large_logits_do_not_overflow() -> None:
    scores = log_softmax(np.array([[1e4, 0, -1e4]], np.float32))
    np.testing.assert_allclose(scores, [[0, -1e4, -2e4]])
    assert np.isfinite(log_softmax(np.array([60000, -60000], np.float16))).all()
