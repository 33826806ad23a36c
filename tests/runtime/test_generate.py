from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.models import DYNAMO, GENAI, ids, opened
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.runtime.drafts import Drafts
from tq_onnx.runtime.generate import TokenStream, generate
from tq_onnx.runtime.sampling import Sampler, Sampling, probabilities

PROMPT = ids(10, seed=5)[0].tolist()


@pytest.mark.parametrize("kind", ["original", "kernel", "body"])
def test_greedy_takes_the_most_likely_token(kind: str) -> None:
    found = generate(opened(DYNAMO, kind).decoder(), PROMPT, max_new_tokens=6)
    text = [*PROMPT, *found.tokens]
    logits = opened(DYNAMO, kind).decoder().prefill([text])[0]
    assert found.tokens == tuple(logits[9:-1].argmax(axis=-1).tolist())
    assert (found.prompt_tokens, found.stopped) == (10, False)
    assert found.cache_bytes == 15 * opened(DYNAMO, kind).signature.bytes_per_token


def test_kernels_bodies_and_capacities_give_the_same_tokens() -> None:
    for name in (DYNAMO, GENAI):
        decoders = [
            opened(name, kind).decoder(capacity=capacity)
            for kind in ("kernel", "body")
            for capacity in (None, 40)
        ]
        found = {generate(decoder, PROMPT, max_new_tokens=20).tokens for decoder in decoders}
        assert len(found) == 1


def test_a_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(opened(DYNAMO, "kernel").decoder(), PROMPT, max_new_tokens=6)
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", 4)
    decoder, calls = opened(DYNAMO, "kernel").decoder(), []
    run = decoder._run
    monkeypatch.setattr(
        decoder, "_run", lambda ids, mask: calls.append(ids.shape[1]) or run(ids, mask)
    )
    assert generate(decoder, PROMPT, max_new_tokens=6).tokens == whole.tokens
    assert calls == [4, 4, 2, *[1] * 5]


def test_a_stream_computes_a_token_when_it_is_asked_for() -> None:
    decoder = opened(DYNAMO, "kernel").decoder()
    tokens = TokenStream(decoder, PROMPT, max_new_tokens=4)
    assert decoder.length == 0
    assert [decoder.length for _ in tokens] == [10, 11, 12, 13]
    assert list(tokens) == []
    assert len(tokens.result.tokens) == 4
    assert tokens.result.cache_bytes == decoder.cache_bytes


def test_no_new_tokens_only_read_the_prompt() -> None:
    decoder = opened(DYNAMO, "kernel").decoder()
    assert list(TokenStream(decoder, PROMPT, max_new_tokens=0)) == []
    assert decoder.length == len(PROMPT)


def test_a_penalty_keeps_a_text_from_repeating_itself() -> None:
    def most_frequent(penalty: float) -> int:
        decoder = opened(DYNAMO, "kernel").decoder()
        sampling = Sampling(repetition_penalty=penalty)
        tokens = generate(decoder, PROMPT, max_new_tokens=30, sampling=sampling).tokens
        return max(map(tokens.count, tokens))

    assert most_frequent(1e6) == 1
    assert most_frequent(1.0) > 1


@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=30, unique=True),
    st.floats(0.01, 1),
    st.floats(0, 1, width=32, allow_subnormal=False),
)
def test_candidates_hold_their_share_of_the_probability(
    scores: list[float], top_p: float, min_p: float
) -> None:
    given_scores = np.array(scores)
    plain = np.exp(given_scores - given_scores.max())
    plain /= plain.sum()
    found = probabilities(given_scores, Sampling(1.0, top_p=top_p))
    kept = found > 0
    assert plain[kept].sum() >= top_p - 1e-9
    assert kept[plain.argmax()]
    assert plain[kept].sum() - plain[kept].min() < top_p + 1e-9  # the fewest
    likely = probabilities(given_scores, Sampling(1.0, min_p=min_p)) > 0
    np.testing.assert_array_equal(likely, (plain >= min_p * plain.max()) & (plain > 0))
    np.testing.assert_allclose(found.sum(), 1)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    tokens = generate(opened(DYNAMO, "kernel").decoder(), PROMPT, max_new_tokens=8).tokens
    stop = tokens[3]
    found = generate(opened(DYNAMO, "kernel").decoder(), PROMPT, max_new_tokens=8, stop_ids={stop})
    assert found.stopped
    assert found.tokens == tokens[: tokens.index(stop)]


def test_a_second_prompt_goes_on_where_the_first_ended() -> None:
    decoder = opened(DYNAMO, "kernel").decoder()
    first = generate(decoder, PROMPT, max_new_tokens=3)
    second = generate(decoder, [first.tokens[-1], 1, 2], max_new_tokens=3)
    whole = opened(DYNAMO, "kernel").decoder()
    text = [*PROMPT, *first.tokens, 1, 2]
    assert second.tokens == generate(whole, text, max_new_tokens=3).tokens


def test_one_sequence_at_a_time() -> None:
    with pytest.raises(UsageError, match="batch of 1"):
        generate(opened(DYNAMO, "kernel").decoder(batch=2), [1], max_new_tokens=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 5e-324},
        {"temperature": 10**400},
        {"temperature": True},
        {"temperature": "1"},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_p": [1.0]},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1e-300},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.0},
        {"seed": None},
    ],
)
def test_sampling_refuses_what_no_draw_can_use(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(arguments))} must be "):
        Sampling(**arguments)


def test_numbers_of_a_sampling_are_pythons() -> None:
    sampling = Sampling(np.float32(0.5), np.int64(3), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert [type(value) for value in (sampling.temperature, sampling.top_k)] == [float, int]
    assert sampling == Sampling(0.5, 3, seed=2**64 - 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1.2e-38, 3.4e38])
@pytest.mark.parametrize("penalty", [1.2e-38, 1.0, 3.4e38])
@pytest.mark.parametrize("top_p", [1.2e-38, 1.0])
def test_no_draw_overflows(temperature: float, penalty: float, top_p: float) -> None:
    largest = np.finfo(np.float32).max
    logits = np.array([largest, 1e-30, 0, -1, -largest, -np.inf], np.float32)
    sampling = Sampling(temperature, top_p=top_p, min_p=1.0, repetition_penalty=penalty)
    for seen in ([], [0, 1], range(6)):
        assert Sampler(sampling, seen).choose(logits) in range(5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(repetition_penalty=2.0)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(sampling: Sampling, wrong: float) -> None:
    logits = np.array([1, wrong, 3], np.float32)
    with pytest.raises(UnsupportedModelError, match="the logit of token 1 is"):
        Sampler(sampling).choose(logits)
    with pytest.raises(UnsupportedModelError, match="the logit of token 0 is -inf"):
        Sampler(sampling).choose(np.full(3, -np.inf, np.float32))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.floats(0.01, 10),
    st.integers(0, 50),
    st.integers(0, 2**32 - 1),
)
def test_a_draw_is_one_of_the_top_k(
    scores: list[float], temperature: float, top_k: int, seed: int
) -> None:
    logits = np.asarray(scores, np.float32)
    token = Sampler(Sampling(temperature, top_k, seed=seed)).choose(logits)
    better = int((logits > logits[token]).sum())
    assert better < (top_k or len(scores))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40, unique=True))
def test_one_candidate_is_the_greedy_one(scores: list[float]) -> None:
    logits = np.asarray(scores, np.float32)
    assert Sampler(Sampling(1.0, 1)).choose(logits) == Sampler(Sampling()).choose(logits)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    draws = Sampler(Sampling(1.0))
    counts = np.bincount([draws.choose(logits) for _ in range(4000)], minlength=3)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2], atol=0.03)
    draws = Sampler(Sampling(0.5))
    sharp = np.bincount([draws.choose(logits) for _ in range(4000)], minlength=3)
    np.testing.assert_allclose(sharp / 4000, np.array([25, 9, 4]) / 38, atol=0.03)


# Guesses of tokens from what followed the same tokens before.


MOST = 7


def passes(prompt: list[int], text: list[int]) -> tuple[int, int]:
    """Passes of an engine that writes a text, and guesses of it that were wrong."""
    drafts, place, count, wrong = Drafts(prompt), 0, 0, 0
    guess: list[int] = []
    while place < len(text):
        right = 0
        while right < len(guess) and text[place + right : place + right + 1] == [guess[right]]:
            right += 1
        wrong += len(guess) - right
        found = text[place : place + right + 1]
        drafts.take(found)
        place += len(found)
        count += 1
        guess = drafts.propose(MOST)
    return count, wrong


def test_nothing_is_guessed_of_new_tokens() -> None:
    assert Drafts([]).propose(MOST) == []
    assert Drafts(range(50)).propose(MOST) == []
    assert passes(list(range(50)), list(range(50, 90))) == (40, 0)


def test_more_is_guessed_the_longer_a_part_is_followed() -> None:
    prompt = [*range(100), *range(3)]
    drafts = Drafts(prompt)
    assert drafts.propose(MOST) == [3, 4]
    assert drafts.propose(1) == [3]
    assert drafts.propose(0) == []
    drafts.take([3, 4, 5])
    assert drafts.propose(MOST) == [6, 7, 8, 9]
    count, wrong = passes(prompt, list(range(3, 100)))
    assert (count, wrong) == (14, 1)  # the end is not foreseen


def test_a_part_that_ends_at_the_end_goes_on_as_it_began() -> None:
    drafts = Drafts([1, 2] * 8)
    assert drafts.propose(MOST) == [1, 2, 1, 2, 1, 2, 1]


def test_a_text_whose_guesses_fail_is_left_alone() -> None:
    """Three tokens are often the same here, and what follows never is."""
    text = [token for number in range(200) for token in (1, 2, 3, 10 + number)]
    count, wrong = passes([], text)
    assert count == len(text)
    assert wrong <= 2
    # It is guessed again once a part is followed for long enough.
    count, _ = passes(text, text)
    assert count < len(text) // 4
