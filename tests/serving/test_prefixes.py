"""Requests that begin alike read their common beginning once, and what was saved is told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.consumers import Consumer
from tests.serving.running import Alone, Tokens
from tq_onnx import Engine, Sampling
from tq_onnx.errors import UsageError
from tq_onnx.integrations.bundled import heldout_text

SHARED = 1024
"""Tokens, eight pages."""
COUNT = 16
NEW = 12
TEXT = list(heldout_text().encode())


def prompts_with(prefix: Tokens) -> list[Tokens]:
    return [prefix + TEXT[5000 + 90 * number :][: 20 + number] for number in range(COUNT)]


def burst(engine: Engine, prompts: list[Tokens]) -> list[Consumer]:
    """All at once, and their ends."""
    consumers = [Consumer() for _ in prompts]
    for prompt, consumer in zip(prompts, consumers, strict=True):
        engine.submit(prompt, consumer, max_new_tokens=NEW, sampling=Sampling())
    assert {consumer.last().finish for consumer in consumers} == {"length"}
    return consumers


def cached(consumers: list[Consumer]) -> list[int]:
    return [consumer.last().cached_tokens for consumer in consumers]


def test_a_cold_burst_reads_its_beginning_once(raw: Path, paged: Path) -> None:
    prompts = prompts_with(TEXT[:SHARED])
    alone = Alone(raw)
    expected = [alone.answer(prompt, NEW) for prompt in prompts]
    with Engine(paged) as engine:
        cold, warm = burst(engine, prompts), burst(engine, prompts)
        assert cached(cold) == [0] + [SHARED] * (COUNT - 1)
        assert cached(warm) == [SHARED] * COUNT
        for consumers in (cold, warm):
            assert [consumer.tokens for consumer in consumers] == expected
        # A beginning that was read for nobody, and prompts that share nothing.
        prefix = TEXT[200 : 200 + SHARED]
        assert engine.warm(prefix + [1] * 7) == SHARED
        assert cached(burst(engine, prompts_with(prefix))) == [SHARED] * COUNT
        others = [TEXT[9000 + 300 * number :][:150] for number in range(COUNT)]
        assert cached(burst(engine, others)) == [0] * COUNT


def test_a_first_request_that_is_cancelled_lets_others_go(paged: Path) -> None:
    prompts = prompts_with(TEXT[:SHARED])
    with Engine(paged) as engine:
        first = Consumer()
        engine.cancel(engine.submit(prompts[0], first))
        consumers = burst(engine, prompts[1:])
        assert first.last().finish == "cancelled"
        assert cached(consumers)[1:] == [SHARED] * (COUNT - 2)


def test_streams_tell_their_usage(paged: Path) -> None:
    with Engine(paged) as engine:
        text = bytes(TEXT[:300]).decode()
        stream = engine.stream(text, max_new_tokens=NEW)
        before = stream.usage
        assert before is None
        whole = "".join(piece.text for piece in stream)
        usage = stream.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (300, 0, NEW)
        stopped = engine.stream(text, max_new_tokens=NEW, stop=[whole[4:6]])
        list(stopped)
        assert stopped.usage is not None
        assert stopped.usage.cached_tokens == 256
        closed = engine.stream(text)
        next(closed)
        closed.close()
        assert closed.usage is not None
        assert (closed.usage.cached_tokens, closed.usage.completion_tokens) == (256, 1)


def test_without_pages_nothing_is_kept(int4: Path) -> None:
    with Engine(int4) as engine, pytest.raises(UsageError, match="keeps nothing of a prompt"):
        engine.warm([1, 2, 3])
