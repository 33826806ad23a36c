"""Prompts that go on behind an answer compute only what is new, and their texts are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.consumers import Consumer
from tests.serving.running import Alone, Tokens
from tq_onnx import Engine, Guidance, Sampling
from tq_onnx.integrations.bundled import heldout_text
from tq_onnx.runtime import conversations
from tq_onnx.runtime.jobs import CANCELLED, LENGTH, STOP

TEXT = list(heldout_text().encode())
TURNS, NEW = 4, 30


def said(number: int) -> Tokens:
    """What a user says in some turn, of 20 tokens and more."""
    return TEXT[3000 + 97 * number :][: 20 + number % 7]


def answer(engine: Engine, prompt: Tokens, new: int = NEW, **options: object) -> Consumer:
    consumer = Consumer()
    engine.submit(prompt, consumer, max_new_tokens=new, sampling=Sampling(), **options)
    assert consumer.last().error is None
    return consumer


def talk(engine: Engine, first: int) -> tuple[list[Tokens], list[Tokens], list[int]]:
    """The prompts and answers of a conversation, and what was known of each prompt."""
    prompt: Tokens = []
    prompts, answers, cached = [], [], []
    for turn in range(TURNS):
        prompt = prompt + said(first + turn)
        consumer = answer(engine, prompt)
        prompts.append(prompt)
        answers.append(consumer.tokens)
        cached.append(consumer.last().cached_tokens)
        prompt = prompt + consumer.tokens
    return prompts, answers, cached


@pytest.mark.parametrize("speculate", [True, False])
def test_texts_are_the_same_and_only_new_tokens_are_computed(
    raw: Path, paged: Path, speculate: bool
) -> None:
    alone = Alone(raw)
    with Engine(paged, speculate=speculate) as engine:
        prompts, answers, cached = talk(engine, 0)
    assert answers == [alone.answer(prompt, NEW) for prompt in prompts]
    # All but the last token of an answer, which was never read.
    ends = [len(prompt) + NEW - 1 for prompt in prompts]
    assert cached == [0, *ends[:-1]]
    with Engine(paged, speculate=speculate, conversations=0) as engine:
        assert talk(engine, 0)[:2] == (prompts, answers)


def test_other_ends_and_other_prompts(raw: Path, paged: Path) -> None:
    """An answer that ends by itself, one that was cancelled, and prompts that go on elsewhere."""
    alone = Alone(raw)
    with Engine(paged) as engine:

        def goes_on(prompt: Tokens, known: int) -> None:
            consumer = answer(engine, prompt)
            assert consumer.tokens == alone.answer(prompt, NEW)
            assert consumer.last().cached_tokens == known

        ended = answer(engine, said(0), guidance=Guidance.of(regex="Aye"))
        assert ended.last().finish == STOP
        before = said(0) + ended.tokens
        goes_on(before + said(1), len(before))
        # The conversation has gone on: a second one that begins alike begins anew.
        goes_on(before + said(2), 0)
        # The same prompt has nothing new, and one that is shorter neither.
        goes_on(before + said(2), 0)
        goes_on(before, 0)

        job = []
        consumer = Consumer(lambda step: len(consumer.tokens) == 5 and engine.cancel(job[0]))
        job.append(engine.submit(said(3), consumer, sampling=Sampling()))
        assert consumer.last().finish == CANCELLED
        before = said(3) + consumer.tokens
        goes_on(before + said(4), len(before) - 1)


def test_many_conversations_at_once(raw: Path, paged: Path) -> None:
    """In an order that nobody knows, so that some have lost their places; all texts are right."""
    alone = Alone(raw)
    draws = np.random.default_rng(4)
    histories: list[Tokens] = [said(10 * number) for number in range(12)]
    with Engine(paged, max_batch_size=5) as engine:
        known = 0
        for turn in range(6):
            chosen = draws.permutation(len(histories))[:8]
            consumers = [Consumer() for _ in chosen]
            for number, consumer in zip(chosen, consumers, strict=True):
                engine.submit(histories[number], consumer, max_new_tokens=12, sampling=Sampling())
            for number, consumer in zip(chosen, consumers, strict=True):
                assert consumer.last().finish == LENGTH
                known += consumer.last().cached_tokens
                assert consumer.tokens == alone.answer(histories[number], 12)
                histories[number] = [*histories[number], *consumer.tokens, *said(turn)]
        assert known > 0
        assert engine.occupancy.free_pages == engine.batching.num_blocks


def test_conversations_go_for_pages_and_after_a_time(
    exact_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 pages of 16 tokens."""
    with Engine(exact_folders["paged"]) as engine:
        kept = engine._thread._conversations
        first, second = (said(number) + answer(engine, said(number)).tokens for number in (0, 1))
        assert len(kept) == 2
        # Needs more pages than the two of them leave: the one that ended first goes.
        answer(engine, TEXT[:180], 60)
        assert kept.find([*first, 1]) is None
        assert kept.find([*second, 1]) is not None
        answer(engine, TEXT[:240], 80)
        assert kept.find([*second, 1]) is None
        monkeypatch.setattr(conversations, "IDLE_SECONDS", 0)
        answer(engine, said(2))
        assert len(kept) == 1
        assert engine.occupancy.free_pages == engine.batching.num_blocks
