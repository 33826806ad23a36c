"""Guessed tokens save passes, and leave greedy texts as they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.running import Alone, Tokens, example, uneven_prompts
from tq_onnx import Engine, Sampling
from tq_onnx.runtime import engine as engine_module
from tq_onnx.runtime.jobs import Choice

REQUESTS = 64


def answers_of(
    engine: Engine, prompts: list[Tokens], sampling: Sampling | Choice, new: int = 48
) -> tuple[list[Tokens], int]:
    """Answers, and the passes that they took."""
    before = engine._thread.passes
    found = example("engine").answer_all(engine, prompts, max_new_tokens=new, sampling=sampling)
    return found, engine._thread.passes - before


def mixed_prompts() -> list[Tokens]:
    """Prompts that repeat themselves, and others."""
    prompts = uneven_prompts(REQUESTS, 3, 160)
    return [prompt * (1 + number % 3) for number, prompt in enumerate(prompts)]


@pytest.fixture
def many_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each request as if it were alone."""
    monkeypatch.setattr(engine_module, "_ROWS", 10**6)


def test_requests_share_the_guesses_of_a_pass(paged: Path) -> None:
    """One has all, sixteen have one each; the texts are the same."""
    prompt = uneven_prompts(1, 60, 61)[0] * 3
    with Engine(paged) as engine, Engine(paged, speculate=False) as plain:
        (alone,), few = answers_of(engine, [prompt], Sampling(), 120)
        (slowly,), most = answers_of(plain, [prompt], Sampling(), 120)
        together, more = answers_of(engine, [prompt] * 16, Sampling(), 120)
    assert alone == slowly
    assert together == [alone] * 16
    assert few < more < most


@pytest.mark.usefixtures("many_guesses")
def test_greedy_texts_are_the_same(raw: Path, paged: Path) -> None:
    prompts = mixed_prompts()
    alone = Alone(raw)
    expected = [alone.answer(prompt, 48) for prompt in prompts]
    with Engine(paged) as engine, Engine(paged, speculate=False) as plain:
        guessed, plainly = (
            answers_of(engine, prompts, Sampling()),
            answers_of(plain, prompts, Sampling()),
        )
        assert guessed[0] == plainly[0] == expected
        assert guessed[1] < plainly[1]  # of the slowest of each sixteen
        repeated = [prompts[11][:40] * 4]
        guessed, plainly = (answers_of(each, repeated, Sampling(), 200) for each in (engine, plain))
        assert guessed[0] == plainly[0]
        assert guessed[1] < 0.6 * plainly[1]
        # Lengths of any number, of which the last guesses have no room.
        for new in (1, 2, 3, 5, 9):
            assert answers_of(engine, repeated, Sampling(), new)[0] == [guessed[0][0][:new]]


def test_penalties_and_draws_are_the_same(paged: Path) -> None:
    prompts = mixed_prompts()[:16]
    with Engine(paged) as engine, Engine(paged, speculate=False) as plain:
        for sampling in (
            Sampling(repetition_penalty=1.2),
            Sampling(temperature=1.0, seed=5),
            Choice(temperature=0.8, top_k=20, seed=9),
            Choice(top_k=1),
        ):
            assert (
                answers_of(engine, prompts, sampling)[0] == answers_of(plain, prompts, sampling)[0]
            )


@pytest.mark.usefixtures("many_guesses")
def test_drawn_texts_are_as_frequent(paged: Path) -> None:
    """Of 800 with guesses and 800 without, by the sum of squares of their differences."""
    prompts = [uneven_prompts(1, 60, 61)[0] * 3] * 800
    found = []
    for speculate in (True, False):
        with Engine(paged, speculate=speculate) as engine:
            texts, passes = answers_of(engine, prompts, Choice(temperature=1.2, top_k=4), new=5)
        found.append((Counter(map(tuple, texts)), passes))
    (guessed, fewer), (plain, more) = found
    assert fewer < more
    common = [text for text, _ in (guessed + plain).most_common(30)]
    pairs = [(guessed[text], plain[text]) for text in common]
    first, second = (len(prompts) - sum(pair[side] for pair in pairs) for side in (0, 1))
    pairs.append((first, second))
    squares = sum((one - two) ** 2 / (one + two) for one, two in pairs if one + two)
    assert squares < 31 + 5 * (2 * 31) ** 0.5
