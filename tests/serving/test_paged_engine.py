"""onnxruntime-genai's Engine over pages: requests join and leave at any step."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

import onnxruntime_genai as og

import tq_onnx
from tests.integrations.genai_folder import bundled_genai
from tests.serving.running import (
    Alone,
    Tokens,
    assert_near_ties_only,
    uneven_prompts,
)
from tq_onnx import Engine, Sampling
from tq_onnx.conversion.options import Options
from tq_onnx.errors import EngineError, UsageError
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.runtime.jobs import LENGTH, Step
from tq_onnx.targets.registry import target_of

REQUESTS = 64


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model."""
    return bundled_genai(tmp_path_factory.mktemp("genai") / "qwen3", "genai")


@pytest.fixture(scope="module")
def alone(original: Path) -> Alone:
    """The contiguous conversion, one prompt at a time."""
    folder = original.with_name("contiguous")
    return Alone(convert_folder(original, folder, options=CODES).output)


CODES = Options(residual_length=0, sink_tokens=0)
"""What contiguous caches and pages have in common, token for token."""


def paged(original: Path, output: Path, options: Options = CODES, **sizes: Any) -> Path:
    target = target_of("paged", **sizes)
    return convert_folder(original, output, options=options, target=target).output


class AloneInPages(Alone):
    """The same pages, one prompt at a time, by our own loop."""

    def __init__(self, folder: Path) -> None:
        self.loaded = tq_onnx.load(folder)

    def answer(self, prompt: Tokens, new: int) -> Tokens:
        answer: Tokens = []
        while len(answer) < new:
            answer.append(int(self.logits(prompt + answer).argmax()))
        return answer

    def logits(self, tokens: Tokens) -> Any:
        return self.loaded.decoder().prefill(np.array([tokens]))[0, -1]

    def noise(self, tokens: Tokens) -> float:
        decoder = self.loaded.decoder()
        decoder.prefill(np.array([tokens[:-1]]))
        apart = decoder.prefill(np.array([tokens[-1:]]))[0, -1]
        return float(np.abs(apart - self.logits(tokens)).max())


def through_pages(
    folder: Path, prompts: list[Tokens], new: int, *, shares: bool
) -> tuple[list[Tokens], list[int]]:
    """Answers of the Engine itself, and how many tokens of each prompt it had already."""
    config = og.Config(str(folder))
    config.overlay(json.dumps({"engine": {"dynamic_batching": {"prefix_caching": shares}}}))
    engine = og.Engine(og.Model(config))
    events = engine.create_event_buffer(64)
    answers: list[Tokens] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    for first in (0, 1):  # what the first one has written, the others may read
        live = {}
        for number in range(first, len(prompts) if first else 1):
            request = engine.create_request()
            turn = og.TurnOptions(request)
            turn.set_max_generated_tokens(new)
            request.begin_turn(np.array(prompts[number], np.int32), turn)
            live[request] = number
        while live:
            for event in engine.run(events):
                number = live[event.request]
                if event.flags.value & og.EngineEventFlags.TOKEN.value:
                    answers[number].append(int(event.token))
                if event.flags.value & og.EngineEventFlags.TURN_FINISHED.value:
                    cached[number] = event.usage.cached_prompt_tokens
                    live.pop(event.request)
                    event.request.close()
    return answers, cached


def joining(engine: Engine, prompts: list[Tokens], new: list[int], at_once: int) -> list[Tokens]:
    """Answers of requests that begin while others are being answered.

    So many are asked at once; each of the others as soon as any request has a certain number of
    tokens, which is another for each.
    """
    answers: list[Tokens] = [[] for _ in prompts]
    ended: queue.SimpleQueue[Step] = queue.SimpleQueue()
    left = iter(range(len(prompts)))
    lock = threading.Lock()
    draws = np.random.default_rng(3)

    def ask() -> None:
        with lock:
            number = next(left, None)
        if number is None:
            return
        marks = set(draws.integers(1, new[number] + 1, 2).tolist())

        def deliver(step: Step) -> None:
            if step.token is not None:
                answers[number].append(step.token)
                if len(answers[number]) in marks:
                    ask()
            if step.is_last:
                ended.put(step)
                ask()

        sampling = Sampling()
        engine.submit(prompts[number], deliver, max_new_tokens=new[number], sampling=sampling)

    for _ in range(at_once):
        ask()
    for _ in prompts:
        step = ended.get(timeout=120)
        assert step.error is None
        assert step.finish == LENGTH
    return answers


@pytest.mark.parametrize(("block_size", "threads"), [(16, 2), (128, 1), (256, 2)])
def test_requests_that_join_and_leave_get_what_they_get_alone(
    original: Path, alone: Alone, block_size: int, threads: int
) -> None:
    prompts = uneven_prompts(REQUESTS, 3, 160)
    new = np.random.default_rng(2).integers(1, 24, REQUESTS).tolist()
    output = original.with_name(f"pages-{block_size}")
    folder = paged(original, output, block_size=block_size, num_blocks=3000 // block_size)
    with Engine(folder, threads=threads) as engine:
        assert (engine.batching.joins, engine.batching.reason) == (True, "")
        answers = joining(engine, prompts, new, at_once=5)
    assert_near_ties_only(alone, prompts, answers, new)


def test_exact_tokens_in_pages_are_those_of_a_request_alone(original: Path) -> None:
    prompts = uneven_prompts(24, 3, 160)
    new = np.random.default_rng(2).integers(1, 24, len(prompts)).tolist()
    folder = paged(original, original.with_name("exact"), Options(), block_size=32, num_blocks=90)
    # A guess that fails has taken the places of exact tokens.
    with Engine(folder, threads=2, speculate=False) as engine:
        answers = joining(engine, prompts, new, at_once=5)
    assert_near_ties_only(AloneInPages(folder), prompts, answers, new)


def test_pages_with_exact_tokens_are_shared(original: Path) -> None:
    whole = uneven_prompts(8, 200, 201)
    prompts = [whole[0][: 70 + 9 * number] + whole[number][:40] for number in range(8)]
    answers, counts = [], []
    for name, options in (("shared", Options()), ("shared-codes", CODES)):
        folder = paged(original, original.with_name(name), options, block_size=32, num_blocks=90)
        for shares in (True, False):
            texts, cached = through_pages(folder, prompts, 12, shares=shares)
            answers.append(texts)
            counts.append(cached)
    assert counts[0] == counts[2]
    assert counts[1] == counts[3] == [0] * 8
    assert sum(counts[0]) >= 7 * 64
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_pages_run_out_and_nothing_is_lost(original: Path, alone: Alone) -> None:
    """Room for three requests or so: others wait until there are pages for all of their tokens."""
    folder = paged(original, original.with_name("few"), block_size=16, num_blocks=20)
    prompts, new = uneven_prompts(24, 40, 90), [20] * 24
    with Engine(folder) as engine:
        answers = joining(engine, prompts, new, at_once=24)
        assert_near_ties_only(alone, prompts, answers, new)
        assert engine.batching.tokens == 320
        with pytest.raises(UsageError, match="320 tokens, and this model takes 320"):
            engine.submit([1] * 320, print)
        # As many tokens as there are pages, and after that again.
        for _ in range(2):
            (whole,) = joining(engine, [prompts[0]], [320 - len(prompts[0])], at_once=1)
            assert len(prompts[0]) + len(whole) == 320


def test_streams_are_cancelled_and_seeded(original: Path) -> None:
    folder = paged(original, original.with_name("streams"), block_size=16, num_blocks=100)
    with Engine(folder) as engine:
        text = "Call me Ishmael. Some years ago"
        stream = engine.stream(text, max_new_tokens=40)
        first = next(stream)
        stream.close()  # cancels the rest
        assert first.finish_reason is None
        pieces = list(engine.stream(text, max_new_tokens=12))
        assert pieces[-1].finish_reason == LENGTH
        whole = "".join(piece.text for piece in pieces)
        assert whole.startswith(first.text)
        stopped = list(engine.stream(text, max_new_tokens=12, stop=[whole[4:7]]))
        assert "".join(piece.text for piece in stopped) == whole[:4]
        assert stopped[-1].finish_reason == "stop"
        warm = Sampling(temperature=1.5, seed=7)
        drawn = ["".join(p.text for p in engine.stream(text, sampling=warm, max_new_tokens=12))]
        drawn += ["".join(p.text for p in engine.stream(text, sampling=warm, max_new_tokens=12))]
        assert drawn[0] == drawn[1] != whole
        with pytest.raises(UsageError, match="knows no min-p"):
            engine.stream(text, sampling=Sampling(temperature=1.0, min_p=0.1))
    with pytest.raises(EngineError, match="was closed"):
        engine.stream(text)
    model = tq_onnx.load(folder)
    with model.engine(max_length=100) as engine:
        assert engine.batching.tokens == 100
        assert "".join(p.text for p in engine.stream(text, max_new_tokens=12)) == whole
    assert model.generate(text, max_new_tokens=12).text == whole
