from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, ids, opened
from tq_onnx.codec import reference
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import CODECS, Codec
from tq_onnx.codec.unrotated import RAW, UNIFORM
from tq_onnx.measure.greedy import NEAR_TIE, GreedyFigures, compare_greedy
from tq_onnx.measure.reconstruction import largest_error, theory
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


# Errors of rows against theory, and against what their steps allow.


D = 80
STEPPED = [codec for codec in CODECS if not (codec.is_rotated or codec.is_raw)]


@pytest.mark.parametrize("codec", STEPPED, ids=str)
def test_no_row_errs_by_more_than_its_steps_allow(codec: Codec) -> None:
    x = np.random.default_rng(1).standard_normal((2000, D)) * 2.0 ** np.arange(-3, 5)[
        :, None
    ].repeat(250, axis=0)
    decoded = reference.decode(
        reference.encode(x, codec, None, None), codec, None, None, head_size=D
    )
    shares = ((x - decoded) ** 2).sum(axis=-1) / largest_error(x, codec)
    assert shares.max() <= 1
    assert shares.mean() > 0.1
    worse = decoded + 2 * (decoded - x)
    assert (((x - worse) ** 2).sum(axis=-1) / largest_error(x, codec)).max() > 1


def test_what_theory_says() -> None:
    assert theory(Codec(UNIFORM, 4), D, True) is None
    assert theory(Codec(RAW, 16), D, True) == 0
    # One bit less, and the residual estimated without bias: pi / 2 of what it was.
    three = theory(Codec("lloyd_max", 3), D, False)
    found = theory(Codec(PROD, 4), D, False)
    assert three is not None and found is not None
    assert found == pytest.approx(three * (np.pi / 2 + 1 / D), rel=0.03)
