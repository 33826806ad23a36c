"""Guessed tokens change how many calls a text takes, and nothing of the text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.recognise.test_passthrough import recurrent
from tests.runtime.models import DYNAMO, opened, original
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import TokenStream
from tq_onnx.runtime.opening import open_original
from tq_onnx.runtime.sampling import Sampling, probabilities

VOCABULARY = 5
LOGITS = np.random.default_rng(3).normal(0, 1.2, (VOCABULARY, VOCABULARY))
CYCLE = np.full((VOCABULARY, VOCABULARY), -5.0)
CYCLE[np.arange(VOCABULARY), (np.arange(VOCABULARY) + 1) % VOCABULARY] = 5


class Chain(Decoder):
    """A decoder of a Markov chain: the logits of a token depend on the token before it."""

    def __init__(self, logits: np.ndarray) -> None:
        self.table, self.held = logits, []
        self.batch = 1
        self.signature = SimpleNamespace(interface=SimpleNamespace(states=()))  # type: ignore

    length = property(lambda self: len(self.held))  # type: ignore[assignment]
    cache_bytes = 0  # type: ignore[assignment]

    def prefill(self, tokens: Any, *_: object, **__: object) -> Any:
        self.held += tokens[0]
        return self.table[np.asarray(tokens)]

    def read(self, tokens: Any, *_: object, **__: object) -> Any:
        return self.prefill(tokens)[:, -1]

    def rewind(self, length: int) -> None:
        del self.held[length:]


def stream(
    logits: np.ndarray, prompt: list[int], *, guesses: bool = True, **options: Any
) -> tuple[TokenStream, Chain, list[int]]:
    decoder, text = Chain(logits), list(prompt)
    options = {"max_new_tokens": 60, **options}
    return TokenStream(decoder, prompt, text=text, guesses=guesses, **options), decoder, text


def expect_alike(tokens: TokenStream, decoder: Chain, text: list[int], prompt: list[int]) -> None:
    """Whatever was given out, the text is what the decoder holds."""
    for _ in tokens:
        assert decoder.held == text
        assert text[: len(prompt) + len(tokens.tokens) - 1] == [*prompt, *tokens.tokens[:-1]]
    assert text == [*prompt, *tokens.tokens[: len(text) - len(prompt)]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_guesses_give_the_same_tokens_in_fewer_steps(temperature: float, penalty: float) -> None:
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, seed=1)
    for table, prompt in ((CYCLE, [0, 1, 2, 3, 4, 0]), (LOGITS, [4, 2, 0, 4, 2, 0, 4])):
        plain, *_ = stream(table, prompt, guesses=False, sampling=sampling)
        guessed, decoder, text = stream(table, prompt, sampling=sampling)
        expect_alike(guessed, decoder, text, prompt)
        assert guessed.tokens == list(plain)
        assert decoder.length == len(prompt) + 59
        if table is CYCLE and penalty == 1:
            assert guessed.result.steps < 60 / 5


def test_the_distribution_of_draws_is_that_of_the_model() -> None:
    """A chi-square test of pairs of tokens, drawn behind right and wrong guesses."""
    pairs, tokens_count, steps = np.zeros((VOCABULARY, VOCABULARY)), 0, 0
    for seed in range(4000):
        prompt = np.random.default_rng(seed % 50).integers(0, VOCABULARY, 4).tolist() * 3
        sampling = Sampling(temperature=0.8, top_k=4, seed=seed)
        tokens, *_ = stream(LOGITS, prompt, sampling=sampling, max_new_tokens=10)
        drawn = [prompt[-1], *tokens]
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
        tokens_count += len(drawn) - 2
        steps += tokens.result.steps
    assert 0.6 < steps / tokens_count < 0.95  # so guesses are right and wrong
    statistic, freedom = 0.0, 0
    for before in range(VOCABULARY):
        counts = pairs[before]
        expected = probabilities(LOGITS[before].copy(), sampling) * counts.sum()
        assert counts[expected == 0].sum() == 0
        used = expected > 0
        statistic += ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
        freedom += used.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # a chance of about 1 in 5,000


def test_a_stop_token_among_right_guesses_ends_the_text() -> None:
    prompt = [0, 1, 2, 3, 4, 0, 1]
    for stop in range(VOCABULARY):
        plain, by_one, _ = stream(CYCLE, prompt, guesses=False, stop_ids={stop})
        guessed, decoder, text = stream(CYCLE, prompt, stop_ids={stop})
        assert list(guessed) == list(plain)
        assert guessed.result.stopped
        assert decoder.held == by_one.held == text


@pytest.mark.parametrize("count", range(12))
def test_what_was_not_given_out_is_taken_back(count: int) -> None:
    prompt = [0, 1, 2, 3, 4, 0, 1]
    guessed, decoder, text = stream(CYCLE, prompt)
    tokens = [next(guessed) for _ in range(count)]
    guessed.close()
    assert decoder.held == [*prompt, *tokens[:-1]][: decoder.length]
    assert decoder.length == (len(prompt) + count - 1 if count else 0)
    assert text[: decoder.length] == decoder.held


@pytest.mark.parametrize("count", range(9))
def test_no_more_is_read_than_plainly(count: int) -> None:
    guessed, decoder, _ = stream(CYCLE, [0, 1, 2, 3, 4, 0, 1], max_new_tokens=count)
    assert len(list(guessed)) == count
    assert decoder.length == 7 + max(count - 1, 0)


def test_which_graphs_check_no_guesses(tmp_path: Any) -> None:
    ir.save(recurrent(), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"recurrent layers.*leave `speculate` out"):
        open_original(tmp_path / "model.onnx").decoder().refuse_guesses()
    decoder = opened(DYNAMO, "kernel").decoder()
    decoder.refuse_guesses()
    decoder.last_only = True
    with pytest.raises(UnsupportedModelError, match="the logits of its last token only"):
        decoder.refuse_guesses()
    with pytest.raises(UnsupportedModelError, match="a call takes 1 tokens"):
        open_original(original("legacy-one-token")).decoder().refuse_guesses()
