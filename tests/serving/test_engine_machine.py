"""An Engine beside a model of what must be true, whatever its callers do, in whatever order.

Every answer ends once; greedy answers are what they are alone; what was refused is never heard of
again; and when nobody waits all pages are free.

A normal run takes few steps. With ``TQ_ENGINE_STEPS=100000`` it takes as many, from another seed
each time, and prints its memory by tenths of the run (``pytest -s``).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.serving.consumers import SECONDS, Consumer
from tests.serving.running import uneven_prompts
from tq_onnx import Engine, Sampling
from tq_onnx.errors import EngineError, UsageError
from tq_onnx.language import engine as language_engine
from tq_onnx.language.stream import Stream
from tq_onnx.runtime.jobs import CANCELLED, LENGTH, Choice, Job, Step

STEPS = int(os.environ.get("TQ_ENGINE_STEPS", "0"))
EXAMPLE = 50
"""Steps after which the answers of a machine are all waited for."""
PROMPTS = uneven_prompts(6, 3, 90)
NEW = 24
GREEDY = Sampling()


@dataclass(eq=False)
class Answer:
    """What a caller knows of its answer.

    Attributes:
        consumer: takes its steps.
        engine: that computes it.
        whole: the answer if nobody ends it early.
        stopped: how it may end early, by what was done so far: the finish, or a part of the error.
        job: for ``cancel``.
    """

    consumer: Consumer
    engine: Engine
    whole: list[int]
    stopped: set[str]
    job: Job | None = None

    def check(self) -> None:
        """Look at an answer that may still be computed."""
        steps = list(self.consumer.steps)
        assert sum(step.is_last for step in steps) <= 1
        assert not any(step.is_last for step in steps[:-1])
        tokens = [step.token for step in steps if step.token is not None]
        assert tokens == self.whole[: len(tokens)]

    def check_end(self) -> None:
        """Wait for the end, and look at it."""
        last = self.consumer.last()
        self.check()
        if last.error is None and last.finish != CANCELLED:
            assert last.finish == LENGTH
            assert self.consumer.tokens == self.whole
            return
        ending = last.finish or str(last.error)
        reasons = [*self.stopped, *(["was closed"] if self.engine.broken else [])]
        assert any(reason in ending for reason in reasons), (ending, reasons)


class Machine(RuleBasedStateMachine):
    """Does to an Engine what callers can do.

    Attributes:
        folder: that is served.
        engine: that serves it, until a machine closes it: opening takes as long as many answers.
        alone: the longest answer to each prompt.
        steps: of all machines.
        megabytes: of memory that the process had after each machine.
    """

    folder: ClassVar[Path]
    engine: ClassVar[Engine]
    alone: ClassVar[list[list[int]]]
    steps: ClassVar[int] = 0
    megabytes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.was_closed = False
        self.answers: list[Answer] = []
        self.streams: list[tuple[Stream, list[int], int]] = []
        self.ended: list[Answer] = []

    @invariant()
    def answers_are_beginnings_of_the_right_ones(self) -> None:
        Machine.steps += 1
        for answer in self.answers:
            answer.check()

    def ask(
        self,
        number: int,
        new: int,
        act: Callable[[Answer, Step], object] = lambda _answer, _step: None,
        sampling: Sampling | Choice = GREEDY,
    ) -> Answer:
        """Ask for an answer that is known, of a consumer that does something with each step."""
        consumer = Consumer(lambda step: act(answer, step))
        answer = Answer(consumer, self.engine, self.alone[number][:new], set())
        try:
            answer.job = self.engine.submit(
                PROMPTS[number], consumer, max_new_tokens=new, sampling=sampling
            )
        except EngineError:
            assert not consumer.steps
            raise
        self.answers.append(answer)
        return answer

    numbers = st.integers(0, len(PROMPTS) - 1)
    lengths = st.integers(0, NEW)

    @rule(number=numbers, new=lengths)
    def submit(self, number: int, new: int) -> None:
        self.ask(number, new)

    @rule(number=numbers, new=lengths, count=st.integers(2, 4))
    def submit_from_threads(self, number: int, new: int, count: int) -> None:
        in_threads([lambda: self.ask(number, new)] * count)

    @rule(
        number=numbers,
        place=st.integers(0, NEW),
        kind=st.sampled_from([ValueError, SystemExit, KeyboardInterrupt, MemoryError]),
        always=st.booleans(),
    )
    def submit_with_a_consumer_that_raises(
        self, number: int, place: int, kind: type[BaseException], always: bool
    ) -> None:
        def act(answer: Answer, _: Step) -> None:
            if always or len(answer.consumer.steps) == place:
                answer.stopped.add(f"deliver raised {kind.__name__}")
                raise kind

        self.ask(number, NEW, act)

    @rule(number=numbers, place=st.integers(1, NEW))
    def submit_with_a_consumer_that_cancels_itself(self, number: int, place: int) -> None:
        def act(answer: Answer, step: Step) -> None:
            if len(answer.consumer.steps) == place and answer.job is not None:
                answer.stopped.add(CANCELLED)
                answer.engine.cancel(answer.job)

        self.ask(number, NEW, act)

    @rule(number=numbers, place=st.integers(1, NEW), new=lengths)
    def submit_with_a_consumer_that_submits(self, number: int, place: int, new: int) -> None:
        def act(answer: Answer, step: Step) -> None:
            if len(answer.consumer.steps) == place:
                with suppress(EngineError):  # closed meanwhile
                    self.ask(number, new)

        self.ask(number, NEW, act)

    @precondition(lambda self: self.answers)
    @rule(place=st.integers(0, 10**6), times=st.integers(1, 3), apart=st.booleans())
    def cancel(self, place: int, times: int, apart: bool) -> None:
        answer = self.answers[place % len(self.answers)]
        answer.stopped.add(CANCELLED)
        job = answer.job
        assert job is not None
        cancels: list[Callable[[], object]] = [lambda: self.engine.cancel(job)] * times
        if apart:
            in_threads(cancels)
        else:
            for cancel in cancels:
                cancel()

    @precondition(lambda self: self.ended)
    @rule(place=st.integers(0, 10**6))
    def cancel_what_has_ended(self, place: int) -> None:
        answer = self.ended[place % len(self.ended)]
        assert answer.job is not None
        if answer.engine is self.engine:
            self.engine.cancel(answer.job)
            return
        with pytest.raises(UsageError, match="not a job of this Engine"):
            self.engine.cancel(answer.job)

    @rule(number=numbers, new=lengths)
    def stream(self, number: int, new: int) -> None:
        stream = self.engine.stream(PROMPTS[number], max_new_tokens=new)
        self.streams.append((stream, self.alone[number][:new], 0))

    @precondition(lambda self: self.streams)
    @rule(place=st.integers(0, 10**6), pieces=st.integers(1, 8))
    def read(self, place: int, pieces: int) -> None:
        stream, whole, read = self.streams.pop(place % len(self.streams))
        for _ in range(pieces):
            piece = next(stream, None)
            if piece is None:
                return
            assert list(piece.tokens) == whole[read : read + len(piece.tokens)]
            read += len(piece.tokens)
            if piece.finish_reason is not None:
                assert piece.finish_reason == LENGTH
                assert read == len(whole)
        self.streams.append((stream, whole, read))

    @precondition(lambda self: self.streams)
    @rule(place=st.integers(0, 10**6), how=st.sampled_from(["drop", "close", "circle", "thread"]))
    def leave(self, place: int, how: str) -> None:
        stream = self.streams.pop(place % len(self.streams))[0]
        if how == "close":
            stream.close()
            assert next(stream, None) is None
        elif how == "circle":
            circle: list[object] = [stream]
            circle.append(circle)
            del circle
        elif how == "thread":
            in_threads([stream.close] * 2)

    @precondition(lambda self: not self.was_closed)
    @rule(by=st.sampled_from(["one", "threads", "consumer"]), number=numbers)
    def close_and_reopen(self, by: str, number: int) -> None:
        if by == "consumer":
            self.ask(number, NEW, lambda answer, _: answer.engine.close()).consumer.last()
        elif by == "threads":

            def ask() -> None:
                with suppress(EngineError):
                    self.ask(number, NEW)

            in_threads([self.engine.close, ask, self.engine.close, ask])
        self.engine.close()
        with pytest.raises(EngineError, match="was closed"):
            self.engine.submit(PROMPTS[number], print)
        with suppress(StopIteration, EngineError):
            for stream, *_ in self.streams:
                next(stream)
        self.streams.clear()
        self.check_ends()
        assert not self.engine._thread._thread.is_alive()
        self.was_closed = True
        Machine.engine = opened()

    @rule()
    def wait(self) -> None:
        self.check_ends()

    def check_ends(self) -> None:
        """Wait until all answers have ended; then nothing is held."""
        while self.answers:
            answer = self.answers.pop()
            answer.check_end()
            self.ended = [answer, *self.ended[:4]]

    def teardown(self) -> None:
        self.streams.clear()
        self.check_ends()
        gc.collect()
        thread = self.engine._thread
        while thread._running or thread._waiting:  # streams that were left
            list(self.engine.stream(PROMPTS[0], max_new_tokens=1))
        (piece,) = self.engine.stream(PROMPTS[0], max_new_tokens=0)
        assert piece.finish_reason == LENGTH
        assert self.engine.occupancy.free_pages == self.engine.batching.num_blocks
        if STEPS:
            self.megabytes.append(resident())


def opened() -> Engine:
    return Engine(Machine.folder, threads=1, max_length=320)


def in_threads(functions: list[Callable[[], object]]) -> None:
    """Call functions at the same time, and wait for them."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def resident() -> int:
    """Megabytes of memory that the process has, without what glibc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Consumers raise on purpose here, and the folder is looked into once."""
    logging.disable(logging.ERROR)
    batchings: dict[Path, Any] = {}

    def batching_of(folder: Path, **options: Any) -> Any:
        if folder not in batchings:
            batchings[folder] = original(folder, **options)
        return batchings[folder]

    original = language_engine.batching_of
    monkeypatch.setattr(language_engine, "batching_of", batching_of)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", ["paged", "static"])
@pytest.mark.usefixtures("quiet")
def test_an_engine_keeps_its_promises(exact_folders: dict[str, Path], kind: str) -> None:
    Machine.folder, Machine.steps, Machine.megabytes = exact_folders[kind], 0, []
    Machine.engine = opened()
    consumers = [Consumer() for _ in PROMPTS]
    for prompt, consumer in zip(PROMPTS, consumers, strict=True):
        Machine.engine.submit(prompt, consumer, max_new_tokens=NEW, sampling=GREEDY)
        consumer.last()
    Machine.alone = [consumer.tokens for consumer in consumers]
    options = settings(
        max_examples=max(STEPS // EXAMPLE, 3),
        stateful_step_count=EXAMPLE,
        derandomize=not STEPS,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(Machine, settings=options)
    finally:
        Machine.engine.close()
    tenths = Machine.megabytes[:: len(Machine.megabytes) // 10 or 1]
    print(f"{kind}: {Machine.steps} steps, megabytes {tenths}")
