"""What ``report`` judges besides prefill: passages that come again, and decoding token by token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, VOCABULARY, ids, opened
from tq_onnx.progress import Progress
from tq_onnx.quality import drift as drift_module
from tq_onnx.quality.copy_test import DISTANCES, PIECE, CopyTest, _sequences
from tq_onnx.quality.drift import DriftFigures, DriftTest
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_conversion, open_original

WORDS = 500
TEXT = np.random.default_rng(3).integers(0, WORDS, 3 * 51 * PIECE)


class Copier:
    """Says what followed the last tokens before, with a logit of its own; else anything."""

    size = 3
    last_only = False
    signature = SimpleNamespace(first_only=False)

    def __init__(self, logit: Callable[[int], float]) -> None:
        """``logit`` is that of what followed so many tokens before."""
        self.logit = logit
        self.seen: list[int] = []

    def reset(self) -> None:
        self.seen = []
        self.followers: dict[tuple[int, ...], int] = {}

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        logits = np.zeros((1, tokens.shape[1], WORDS))
        for row, token in enumerate(tokens[0]):
            self.seen.append(int(token))
            before = self.followers.get(tuple(self.seen[-self.size :]))
            if before is not None:
                logits[0, row, self.seen[before]] = self.logit(len(self.seen) - before)
            self.followers[tuple(self.seen[-self.size :])] = len(self.seen)
        return logits


class WholePrompts(Copier):
    """Reads a window in one call."""

    signature = SimpleNamespace(first_only=True)


def copier(logit: Callable[[int], float], kind: type[Copier] = Copier) -> Decoder:
    return cast(Any, kind(logit))


def loss(logit: float) -> float:
    return float(np.log(np.exp(logit) + WORDS - 1) - logit)


@pytest.mark.parametrize("room", [None, 2040, 1024, 240, 239])
def test_copies_are_as_far_apart_as_they_say(room: int | None) -> None:
    made, windows, pairs = _sequences(TEXT, room)
    size = len(made) // 2
    assert size <= (room or size)
    assert [(one.start, one.stop, one.scored) for one in windows] == (
        [(0, size, 0), (size, 2 * size, size)] if size else []
    )
    for pair in pairs:
        assert pair.second.start - pair.first.start == pair.distance
        np.testing.assert_array_equal(made[pair.first], made[pair.second])
        assert pair.first.start // size == (pair.second.stop - 1) // size
    far = {None: 3, 2040: 3, 1024: 1, 240: 0, 239: 0}[room]
    kinds = {(pair.kind, pair.distance) for pair in pairs}
    assert {distance for _, distance in kinds} == {*DISTANCES[:far]}
    assert len(kinds) == 2 * far


def test_the_first_copies_are_of_the_text_or_random() -> None:
    made, _, pairs = _sequences(TEXT, None)
    text = TEXT.tolist()
    for pair in pairs:
        first = made[pair.first].tolist()
        at = pair.first.start % (len(made) // 2)
        start = at if pair.first.start < len(made) // 2 else at + len(made) // 2
        assert (text[start : start + len(first)] == first) is (pair.kind == "natural")


@pytest.mark.parametrize("kind", [Copier, WholePrompts])
def test_rise_is_that_of_the_definition(kind: type[Copier]) -> None:
    def weaker(distance: int) -> float:
        return 8.0 if distance == 200 else 5.0

    test = CopyTest(copier(lambda _: 8.0, kind), TEXT, vocabulary=WORDS)
    found = test.compare(copier(weaker, kind), name="other")
    assert [(one.kind, one.distance) for one in found] == [
        (kind, distance) for kind in ("natural", "random") for distance in DISTANCES
    ]
    for one in found:
        assert one.tokens == {200: 10, 1000: 10, 2000: 5}[one.distance] * (PIECE - 8)
        assert one.gain == pytest.approx(np.log(WORDS) - loss(8), rel=1e-2)
        wanted = 0 if one.distance == 200 else loss(5) - loss(8)
        assert one.rise == pytest.approx(wanted, rel=1e-2, abs=1e-9)
        assert one.relative_rise == pytest.approx(one.rise / one.gain)
        assert one.rise_error < 0.05


def test_a_model_that_does_not_copy_tells_nothing() -> None:
    nothing = copier(lambda _: 0.0)
    found = CopyTest(nothing, TEXT, vocabulary=WORDS).compare(nothing, name="other")
    assert [one.relative_rise for one in found] == [None] * 6
    assert CopyTest(nothing, TEXT[:100], vocabulary=WORDS).compare(nothing, name="") == ()


@pytest.fixture(scope="module")
def drifts() -> dict[str, DriftFigures]:
    """Figures of conversions, by preset."""
    text = ids(200, seed=7)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift_module, "PROMPT_TOKENS", 30)
        patch.setattr(drift_module, "NEW_TOKENS", 21)
        before = opened(DYNAMO, "original")
        seen: list[Progress] = []
        test = DriftTest(lambda _: before.decoder(), text, on_progress=seen.append)
        assert seen == [Progress("Generating with the original", n, 4) for n in (1, 2, 3, 4)]
        found = {}
        for preset in ("raw", "int4", "int2"):
            model = open_conversion(before.path, preset=preset, threads=1)
            decoders = [lambda tokens, model=model: model.decoder(capacity=tokens)]
            found[preset] = test.compare(decoders[0], name=preset)
        found["definition"] = by_definition(test)
    return found


def by_definition(test: DriftTest) -> DriftFigures:
    """The figures of int2, from prompts and tokens that are read at once."""
    own = open_original(opened(DYNAMO, "original").path, threads=1).decoder()
    other = open_conversion(opened(DYNAMO, "original").path, preset="int2", threads=1).decoder()
    kl, same = [], []
    for prompt, tokens in zip(test._prompts, test._tokens, strict=True):
        assert (len(prompt), len(tokens)) == (30, 20)
        logs = []
        for decoder in (own, other):
            decoder.reset()
            logits = decoder.prefill(np.concatenate([prompt, tokens])[None])[0, 29:]
            wide = logits.astype(np.float64)
            logs.append(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
        kl.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1))
        same.append(logs[0].argmax(-1) == logs[1].argmax(-1))
    spread = float(np.std(kl) / np.sqrt(84))
    halves = [float(np.mean([one[part] for one in kl])) for part in (slice(11), slice(11, None))]
    return DriftFigures(4, 30, 21, float(np.mean(kl)), spread, *halves, float(np.mean(same)), 0.0)


def test_drift_is_that_of_the_definition(drifts: dict[str, DriftFigures]) -> None:
    found, wanted = drifts["int2"], drifts["definition"]
    assert (found.prompts, found.prompt_tokens, found.new_tokens) == (4, 30, 21)
    for name in ("kl_mean", "kl_error", "kl_first_half", "kl_second_half"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-2)
    assert found.same_token == pytest.approx(wanted.same_token, abs=0.02)
    assert 0 <= found.near_ties <= 1 - found.same_token + 1e-12


def test_coarser_codes_drift_more(drifts: dict[str, DriftFigures]) -> None:
    assert drifts["raw"].kl_mean < 1e-9 < drifts["int4"].kl_mean < drifts["int2"].kl_mean
    assert drifts["raw"].same_token == 1
    assert drifts["raw"].near_ties == 0


def test_tokens_that_are_drawn_are_always_the_same() -> None:
    before = opened(DYNAMO, "original")
    text = ids(16, seed=7)[0]
    made = [DriftTest(lambda _: before.decoder(), text, room=12) for _ in range(2)]
    assert all(len(prompt) == 6 for prompt in made[0]._prompts)
    for one, other in zip(made[0]._tokens, made[1]._tokens, strict=True):
        assert len(one) == 5
        assert one.max() < VOCABULARY
        np.testing.assert_array_equal(one, other)
