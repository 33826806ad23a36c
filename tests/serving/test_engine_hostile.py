"""Whatever one caller does, the Engine answers the others, and everybody learns how it ended."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.consumers import SECONDS, Consumer, begin_together
from tq_onnx import Engine, Sampling
from tq_onnx.errors import EngineError, TqOnnxError, UsageError
from tq_onnx.runtime.engine import EngineThread
from tq_onnx.runtime.jobs import CANCELLED, LENGTH, STOP, Choice, Step

PROMPT = list(b"Call me Ishmael.")
LONGEST = 320 - len(PROMPT)
"""Tokens of an answer that takes all pages."""
GREEDY = Sampling()


@pytest.fixture(scope="module", params=["paged", "static"])
def engine(request: pytest.FixtureRequest, exact_folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(exact_folders[request.param], threads=1, max_length=320) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    """Of the prompt, eight tokens."""
    consumer = Consumer()
    engine.submit(PROMPT, consumer, max_new_tokens=8, sampling=GREEDY)
    assert consumer.last().finish == LENGTH
    return consumer.tokens


@pytest.fixture
def survives(engine: Engine, answer: list[int]) -> Iterator[None]:
    """Afterwards all pages are free, and the Engine answers as before."""
    yield
    consumer = Consumer()
    engine.submit(PROMPT, consumer, max_new_tokens=8, sampling=GREEDY)
    assert consumer.last().finish == LENGTH
    assert consumer.tokens == answer
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Once nobody waits for anything."""
    thread = engine._thread
    list(engine.stream(PROMPT, max_new_tokens=0))  # after all orders that were given before
    while thread._running or thread._waiting:
        list(engine.stream(PROMPT, max_new_tokens=1))  # what was cancelled ends in a step
    list(engine.stream(PROMPT, max_new_tokens=0))
    assert engine.occupancy.free_pages == engine.batching.num_blocks


async def awaited(step: Step) -> None:
    del step


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([1, -1], {}, r"prompt\[1\] is -1, and the model knows the ids 0 to 259"),
        ([1, 260], {}, r"prompt\[1\] is 260, and the model knows the ids 0 to 259"),
        (
            [{"role": "user", "content": "hello"}],
            {},
            r"prompt\[0\] must be a token id, got type dict",
        ),
        ("\ud800", {}, "not valid Unicode"),
        ([1] * 320, {}, "320 tokens, and this model takes 320"),
        ([1] * 321, {"max_new_tokens": 0}, "321 tokens, and this model takes 320"),
        (np.ones(10**6, np.int64), {}, "1000000 tokens, and this model takes 320"),
        (PROMPT, {"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        (PROMPT, {"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, got 1.5"),
        (PROMPT, {"sampling": 0.5}, "sampling must be a Sampling, got 0.5"),
        (PROMPT, {"sampling": {"temperature": 0}}, "sampling must be a Sampling, got type dict"),
        (PROMPT, {"deliver": None}, "deliver must be a function, got None"),
        (PROMPT, {"deliver": awaited}, "deliver must be a function, got a coroutine function"),
    ],
)
@pytest.mark.usefixtures("survives")
def test_arguments_are_refused_where_they_are_given(
    engine: Engine, prompt: Any, options: dict[str, Any], message: str
) -> None:
    consumer = Consumer()
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt, **{"deliver": consumer, **options})
    if "deliver" not in options:
        with pytest.raises(UsageError, match=message):
            engine.stream(prompt, **options)
    assert not consumer.steps


@pytest.mark.parametrize("stop", [[""], ["a", ""], 5, [5], [b"a"], None, ["\ud800"]])
def test_stop_strings_are_refused(engine: Engine, stop: Any) -> None:
    with pytest.raises(UsageError, match="stop"):
        engine.stream(PROMPT, stop=stop)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", -1), ("top_k", 0.5), ("top_p", 1.5), ("temperature", -1)),
        ("repetition_penalty", 0),
    ],
)
def test_choices_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be "):
        Choice(**{name: value})


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT, np.uint8),
        [np.int64(token) for token in PROMPT],
        "Call me Ishmael.",
    ],
)
def test_prompts_of_other_kinds(engine: Engine, answer: list[int], prompt: Any) -> None:
    for form in (prompt, prompt if isinstance(prompt, str) else iter(prompt)):
        consumer = Consumer()
        engine.submit(form, consumer, max_new_tokens=np.int16(8), sampling=GREEDY)
        assert consumer.last().finish == LENGTH
        assert consumer.tokens == answer


@pytest.mark.usefixtures("survives")
def test_no_tokens_are_none(engine: Engine) -> None:
    consumer = Consumer()
    engine.submit(PROMPT, consumer, max_new_tokens=0)
    consumer.last()
    assert consumer.steps == [Step(finish=LENGTH)]
    engine.submit([1] * 320, again := Consumer(), max_new_tokens=0)
    assert again.last().finish == LENGTH
    (piece,) = engine.stream(PROMPT, max_new_tokens=0)
    assert (piece.text, piece.tokens, piece.finish_reason) == ("", (), LENGTH)


def test_more_candidates_than_tokens_are_all(engine: Engine) -> None:
    engine.submit(PROMPT, consumer := Consumer(), max_new_tokens=2, sampling=Choice(top_k=2**40))
    assert consumer.last().finish in (LENGTH, STOP)  # any token may be drawn, the last one, too


def test_a_seed_that_is_not_taken_is_refused(engine: Engine) -> None:
    choice = Choice(temperature=0.5, seed=2**64 - 1)
    consumer = Consumer()
    if engine.batching.joins:
        engine.submit(PROMPT, consumer, max_new_tokens=2, sampling=choice)
        assert consumer.last().finish == LENGTH
    else:
        with pytest.raises(UsageError, match=r'seed is .*; convert with `target="paged"`'):
            engine.submit(PROMPT, consumer, sampling=choice)


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("top_k", 2**31), ("top_p", "x")])
@pytest.mark.usefixtures("survives")
def test_what_cannot_be_handed_over_ends_its_own_job(
    engine: Engine, answer: list[int], name: str, value: object
) -> None:
    """What no check has seen, and onnxruntime-genai cannot convert."""

    class Careless(Choice):
        def within(self, batching: object) -> Choice:
            del batching
            object.__setattr__(self, name, value)
            return self

    refused, others = Consumer(), [Consumer() for _ in range(3)]
    for place, other in enumerate(others):
        if place == 1:
            engine.submit(PROMPT, refused, sampling=Careless(temperature=0.5))
        engine.submit(PROMPT, other, max_new_tokens=8, sampling=GREEDY)
    error = refused.last().error
    assert isinstance(error, UsageError)
    assert f"set_{name}" in str(error)
    for other in others:
        assert other.last().finish == LENGTH
        assert other.tokens == answer


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 3, "last", "every"])
@pytest.mark.usefixtures("survives")
def test_a_consumer_that_raises_ends_its_own_answer(
    engine: Engine, answer: list[int], kind: type[BaseException], place: int | str
) -> None:
    def act(step: Step) -> None:
        number = len(careless.steps) - 1
        if place in ("every", number) or (place == "last" and step.is_last):
            raise kind("no fault of the Engine's")

    careless, other = Consumer(act), Consumer()
    engine.submit(PROMPT, careless, max_new_tokens=8, sampling=GREEDY)
    engine.submit(PROMPT, other, max_new_tokens=8, sampling=GREEDY)
    assert other.last().finish == LENGTH
    assert other.tokens == answer
    last = careless.last()
    if place == "last":
        assert last.finish == LENGTH
    else:
        assert f"deliver raised {kind.__name__}" in str(last.error)
        assert careless.tokens == answer[: 1 if place == "every" else int(place) + 1]


@pytest.mark.parametrize("read", [0, 1, 4])
@pytest.mark.parametrize("how", ["dropped", "in a circle", "closed"])
@pytest.mark.usefixtures("survives")
def test_a_stream_that_nobody_reads_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, read: int, how: str
) -> None:
    cancelled = []
    gc.collect()  # streams of tests before

    def cancel(thread: EngineThread, job: Any) -> None:
        cancelled.append(job)
        original(thread, job)

    original = EngineThread.cancel
    monkeypatch.setattr(EngineThread, "cancel", cancel)
    stream = engine.stream(PROMPT, max_new_tokens=LONGEST)
    waiting = engine.stream(PROMPT, max_new_tokens=LONGEST)
    for _ in range(read):
        next(stream)
    assert not cancelled
    if how == "closed":
        stream.close()
        waiting.close()
        assert not list(stream)
    elif how == "in a circle":
        circle: list[object] = [stream, waiting]
        circle.append(circle)
        del circle
    del stream, waiting
    gc.collect()
    assert len(cancelled) == 2


def test_a_stream_that_fails_to_make_text_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=LONGEST)

    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream._transcript, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not list(stream)
    assert_idle(engine)


@pytest.mark.usefixtures("survives")
def test_cancelling_twice_late_and_from_a_consumer(engine: Engine) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hold(_: Step) -> None:
        begun.set()
        assert goes_on.wait(SECONDS)

    running = Consumer(hold)
    job = engine.submit(PROMPT, running, max_new_tokens=LONGEST, sampling=GREEDY)
    assert begun.wait(SECONDS)
    waiting = Consumer()
    other = engine.submit(PROMPT, waiting, max_new_tokens=LONGEST, sampling=GREEDY)
    for _ in range(2):
        engine.cancel(other)
        engine.cancel(job)
    goes_on.set()
    assert running.last().finish == waiting.last().finish == CANCELLED
    engine.cancel(job)
    engine.cancel(other)
    jobs: queue.Queue[Any] = queue.Queue(1)

    def cancel(_: Step) -> None:
        if len(by_itself.steps) == 1:
            engine.cancel(jobs.get(timeout=SECONDS))

    by_itself = Consumer(cancel)
    jobs.put(engine.submit(PROMPT, by_itself, max_new_tokens=LONGEST, sampling=GREEDY))
    assert by_itself.last().finish == CANCELLED
    assert len(by_itself.tokens) < LONGEST


def test_jobs_of_another_engine_are_refused(
    engine: Engine, exact_folders: dict[str, Path], answer: list[int]
) -> None:
    consumer = Consumer()
    job = engine.submit(PROMPT, consumer, max_new_tokens=8, sampling=GREEDY)
    with Engine(exact_folders["static"], threads=1) as another:
        for stranger in (job, None, 5):
            with pytest.raises(UsageError, match="job is not a job of this Engine"):
                another.cancel(stranger)  # type: ignore[arg-type]
    assert consumer.last().finish == LENGTH
    assert consumer.tokens == answer


def test_a_consumer_that_reads_a_stream_is_refused(engine: Engine) -> None:
    refusals = []

    def act(step: Step) -> None:
        if step.is_last:
            stream = engine.stream(PROMPT, max_new_tokens=4)
            with pytest.raises(UsageError, match="cannot be read in deliver") as refusal:
                next(stream)
            refusals.append(refusal)

    engine.submit(PROMPT, consumer := Consumer(act), max_new_tokens=1)
    assert consumer.last().finish == LENGTH
    assert_idle(engine)
    assert len(refusals) == 1


@pytest.mark.parametrize("kind", ["paged", "static"])
def test_closing_from_a_consumer(exact_folders: dict[str, Path], kind: str) -> None:
    errors: list[TqOnnxError] = []

    def act(step: Step) -> None:
        if step.token is not None:
            opened.close()
            with pytest.raises(EngineError, match="was closed") as refusal:
                opened.submit(PROMPT, print)
            errors.append(refusal.value)

    opened = Engine(exact_folders[kind], threads=1, max_length=320)
    consumers = [Consumer(act), *(Consumer() for _ in range(20))]
    begin_together(opened, len(consumers))
    for consumer in consumers:
        opened.submit(PROMPT, consumer, max_new_tokens=LONGEST)
    assert all("was closed" in str(consumer.last().error) for consumer in consumers)
    assert errors
    opened.close()
    opened.close()


def test_closing_while_others_submit(exact_folders: dict[str, Path]) -> None:
    """Whoever was not refused is told of the end."""
    engine = Engine(exact_folders["paged"], threads=1)
    consumers: list[Consumer] = []
    refused: list[Consumer] = []

    def ask() -> None:
        while not refused:
            consumer = Consumer()
            try:
                engine.submit(PROMPT, consumer, max_new_tokens=4)
            except EngineError:
                refused.append(consumer)
            else:
                consumers.append(consumer)
                if len(consumers) == 30:
                    begun.set()

    begun = threading.Event()
    threads = in_threads(4, ask)
    assert begun.wait(SECONDS)
    closing = in_threads(2, engine.close)
    for thread in (*threads, *closing):
        thread.join(SECONDS)
        assert not thread.is_alive()
    for consumer in consumers:
        last = consumer.last()
        assert last.finish == LENGTH or "was closed" in str(last.error)
    assert not any(consumer.steps for consumer in refused)


@pytest.mark.parametrize("ends_first", [True, False])
def test_closing_between_the_check_and_the_order(
    exact_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, ends_first: bool
) -> None:
    """An order that comes behind the last one is told of the end by one of two, and only once."""
    opened = Engine(exact_folders["paged"], threads=1)
    thread = opened._thread
    arrived, goes_on = threading.Event(), threading.Event()

    def hold(_: Step) -> None:
        arrived.set()
        goes_on.wait(SECONDS)

    opened.submit(PROMPT, Consumer(hold), max_new_tokens=1)
    assert arrived.wait(SECONDS)  # the thread takes no order until it goes on
    if ends_first:
        goes_on.set()

    def close_before_the_order(*arguments: Any) -> Any:
        job = original(*arguments)
        closing.extend(in_threads(1, opened.close))
        while thread.broken is None or (ends_first and thread._thread.is_alive()):
            threading.Event().wait(0.001)
        return job

    original, closing = thread._job, list[threading.Thread]()
    monkeypatch.setattr(thread, "_job", close_before_the_order)
    consumer = Consumer()
    if ends_first:
        with pytest.raises(EngineError, match="was closed"):
            opened.submit(PROMPT, consumer)
        assert not consumer.steps
    else:
        opened.submit(PROMPT, consumer)
        goes_on.set()
        assert "was closed" in str(consumer.last().error)
    closing[0].join(SECONDS)
    assert not closing[0].is_alive()


def in_threads(count: int, function: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"max_length": 1.5}, "max_length must be a whole number, got 1.5"),
        ({"threads": -1}, "threads must be at least 1, got -1"),
        ({"threads": 10**5}, "threads must be at most 1024, got 100000"),
        ({"threads": "two"}, "threads must be a whole number, got 'two'"),
        ({"folder": ""}, "folder is empty"),
        ({"folder": 5}, "folder must be a path, got 5"),
        ({"tokenizer": ""}, "tokenizer is empty"),
    ],
)
def test_an_engine_is_not_opened_with_other_arguments(
    exact_folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(**{"folder": exact_folders["static"], **options})
