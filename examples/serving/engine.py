"""Answer many prompts on onnxruntime-genai's Engine, which computes up to four together.

The Engine wants all its calls from one thread. ``EngineThread`` is that thread: any other hands it
prompts as token ids, and gets tokens back one by one. As a program it answers the lines of a file:

    python examples/serving/engine.py qwen3-genai-int4 prompts.txt --max-tokens 32

Needs onnxruntime-genai 0.18 and tq-onnx.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

import tq_onnx

EVENTS = 64
UNEVEN = (
    "one request at a time: the Engine would answer prompts of different lengths in one batch "
    "wrongly with this graph"
)
UNKNOWN = "one request at a time: tq-onnx did not convert this folder, so its graph is not known"
ASKED = "one request at a time, as asked for"


class RefusedError(Exception):
    """A request that the Engine does not take; it may take others."""


class BrokenError(Exception):
    """A failure after which this Engine answers nothing any more."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; None for what ``genai_config.json`` says.

    Attributes:
        temperature: 0 for the best token every time.
        top_p: probability of the tokens that are drawn from.
        top_k: number of those tokens; 0 for all.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def tell(self, turn: Any) -> None:
        """Set the options of a turn, which takes none of the others with the best token."""
        if self.temperature == 0 or self.top_k == 1:
            turn.set_do_sample(False)
            return
        given = (
            (self.temperature, turn.set_temperature),
            (self.top_p, turn.set_top_p),
            (self.top_k, turn.set_top_k),
        )
        for value, give in given:
            if value is not None:
                turn.set_do_sample(True)
                give(value)


@dataclass(frozen=True)
class Step:
    """A token, the end, or both.

    Attributes:
        token: None if there is none in this step.
        finish: at the end ``stop`` (the model's end of text), ``length`` or ``cancelled``.
        error: at the end, what went wrong.
    """

    token: int | None = None
    finish: str | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """True if no other step follows."""
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """A prompt that waits or is being answered.

    Attributes:
        tokens: the prompt.
        max_tokens: most tokens of the answer.
        sampling: how they are chosen.
        deliver: called with every step, in the thread of the Engine.
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    deliver: Callable[[Step], None]
    _request: Any = field(default=None, repr=False)
    _turn: int = 0
    _cancelled: bool = False


@dataclass(frozen=True)
class Limits:
    """What a folder allows.

    Attributes:
        together: whether requests are computed in batches.
        reason: why not.
        tokens: most tokens of a prompt and its answer.
        window_rows: rows of a cache in front of those of the tokens.
    """

    together: bool
    reason: str
    tokens: int
    window_rows: int


def limits_of(folder: Path, max_length: int | None = None, alone: bool = False) -> Limits:
    """Read what a folder allows out of its models and its configuration.

    Args:
        folder: of onnxruntime-genai.
        max_length: most tokens of a prompt and its answer, if fewer than the configuration allows.
        alone: whether to compute one request at a time in any case. In a batch products of matrices
            round differently, and a quantised cache makes more of that, so that a token may change
            where two are nearly as good.
    """
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    models = tq_onnx.inspect(folder).of_role("converted")
    plans = [model.report.plan for model in models if model.report.plan is not None]
    rows = max((plan.overlay_rows for plan in plans), default=0)
    even_only = not all(plan.interface.right_padding for plan in plans)
    reason = UNKNOWN if not plans else UNEVEN if even_only else ASKED if alone else ""
    most = config.get("search", {}).get("max_length", config["model"]["context_length"]) - rows
    return Limits(not reason, reason, min(most, max_length or most), rows)


class EngineThread:
    """A thread with an Engine.

    The Engine computes a batch of four requests at most, and takes no other before the last of them
    has ended. What waits meanwhile becomes the next batch.

    Attributes:
        limits: what the folder allows.
        model: for tokenizers.
        broken: why it answers nothing any more, or None.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_length: int | None = None,
        alone: bool = False,
        threads: int | None = None,
    ) -> None:
        """Open a folder and start the thread.

        Args:
            folder: of onnxruntime-genai.
            max_length: see ``limits_of``.
            alone: likewise.
            threads: of ONNX Runtime; None for what the configuration says, or all cores.
        """
        self.limits = limits_of(folder, max_length, alone)
        config = og.Config(str(folder))
        if threads is not None:
            options = {"intra_op_num_threads": threads}
            config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.broken: BrokenError | None = None
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        tokens: list[int],
        deliver: Callable[[Step], None],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> Job:
        """Have a prompt answered.

        Args:
            tokens: the prompt.
            deliver: called with every step, in the thread of the Engine: it must not wait.
            max_tokens: most tokens of the answer; None for as many as there is room for.
            sampling: how they are chosen.

        Raises:
            RefusedError: the prompt is empty or too long.
            BrokenError: the Engine answers nothing any more.
        """
        room = self.limits.tokens - len(tokens)
        if not tokens:
            raise RefusedError("the prompt has no tokens")
        if room < 1:
            raise RefusedError(
                f"the prompt has {len(tokens)} tokens, and this model takes {self.limits.tokens} "
                "with the answer"
            )
        job = Job(tokens, min(max_tokens or room, room), sampling or Sampling(), deliver)
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self._orders.put(lambda: self._waiting.append(job))
        return job

    def cancel(self, job: Job) -> None:
        """End an answer early; does nothing if it has ended."""
        self._orders.put(lambda: self._cancel(job))

    def close(self) -> None:
        """End the thread; answers that are not complete end with an error."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        broken = BrokenError("the Engine was closed")
        try:
            self._work()
        except Exception as error:
            broken = BrokenError(f"the Engine failed: {error}")
        with self._lock:
            self.broken = broken
        # What was ordered before anybody could see that.
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                order()
        for job in (*self._running.values(), *self._waiting):
            job.deliver(Step(error=broken))

    def _work(self) -> None:
        engine = og.Engine(self.model)
        events = engine.create_event_buffer(EVENTS)
        while self._obey():
            self._begin(engine)
            if engine.has_pending_requests():
                for event in engine.run(events):
                    self._deliver(event)

    def _obey(self) -> bool:
        """Carry out orders, and wait for one if there is nothing else to do; False to end."""
        while True:
            idle = not self._running and not self._waiting
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _begin(self, engine: Any) -> None:
        """Hand over what waits: everything, or one prompt at a time."""
        while self._waiting and (self.limits.together or not self._running):
            job = self._waiting.popleft()
            try:
                self._begin_turn(engine, job)
            except RuntimeError as error:
                job.deliver(Step(error=RefusedError(str(error))))
            else:
                self._running[job._request] = job

    def _begin_turn(self, engine: Any, job: Job) -> None:
        options = og.RequestOptions()
        # Caches get rows for that many tokens, whatever the model could take.
        rows = len(job.tokens) + job.max_tokens + self.limits.window_rows
        options.set_max_session_tokens(rows)
        job._request = engine.create_request(options=options)
        turn = og.TurnOptions(job._request)
        turn.set_max_generated_tokens(job.max_tokens)
        job.sampling.tell(turn)
        job._turn = job._request.begin_turn(np.asarray(job.tokens, np.int32), turn)

    def _deliver(self, event: Any) -> None:
        flags, kinds = event.flags.value, og.EngineEventFlags
        job = self._running.get(event.request)
        if job is None:
            return
        token = int(event.token) if flags & kinds.TOKEN.value else None
        if not flags & (kinds.TURN_FINISHED.value | kinds.FAILED.value):
            if token is not None and not job._cancelled:
                job.deliver(Step(token))
            return
        del self._running[event.request]
        reasons = og.FinishReason
        ends = {reasons.EOS: "stop", reasons.STOP_STRING: "stop", reasons.CANCELLED: "cancelled"}
        if event.finish_reason != reasons.FAILED:
            job.deliver(Step(token, ends.get(event.finish_reason, "length")))
            event.request.close()
            return
        failure = f"the Engine failed: {event.error_code.name}"
        codes = og.EngineErrorCode
        lost = event.error_code in (codes.ENGINE_CONTRACT_FAILURE, codes.ENGINE_EXECUTION_FAILURE)
        job.deliver(Step(error=BrokenError(failure) if lost else RefusedError(failure)))
        if lost:
            raise BrokenError(event.error_code.name)

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.deliver(Step(finish="cancelled"))
        elif job._request in self._running:
            job._cancelled = True
            job._request.cancel_turn(job._turn)


def genai_folder(text: str) -> Path:
    """Take a folder from the command line."""
    if not (Path(text) / "genai_config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is no folder of onnxruntime-genai: it has no genai_config.json"
        )
    return Path(text)


def lines_of(text: str) -> list[str]:
    """Take the lines of a text file from the command line."""
    try:
        return Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no text file: {error}") from error


def answer_all(
    engine: EngineThread,
    prompts: list[list[int]],
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Answer prompts together, and return the tokens of each answer.

    Raises:
        RefusedError: a prompt is empty or too long.
        BrokenError: the Engine failed.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    ended: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def into(answer: list[int]) -> Callable[[Step], None]:
        def deliver(step: Step) -> None:
            if step.token is not None:
                answer.append(step.token)
            if step.is_last:
                ended.put(step)

        return deliver

    for tokens, answer in zip(prompts, answers, strict=True):
        engine.submit(tokens, into(answer), max_tokens=max_tokens, sampling=sampling)
    for _ in prompts:
        step = ended.get()
        if step.error is not None:
            raise step.error
    return answers


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=genai_folder, help="of onnxruntime-genai, converted")
    parser.add_argument("prompts", type=lines_of, help="text file, a prompt in every line")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--alone", action="store_true", help="compute one prompt at a time")
    given = parser.parse_args()
    engine = EngineThread(given.folder, alone=given.alone)
    if engine.limits.reason:
        print(engine.limits.reason, file=sys.stderr)
    tokenizer = og.Tokenizer(engine.model)
    prompts = [[int(token) for token in tokenizer.encode(line)] for line in given.prompts]
    answers = answer_all(
        engine, prompts, max_tokens=given.max_tokens, sampling=Sampling(temperature=0)
    )
    for line, answer in zip(given.prompts, answers, strict=True):
        print(line + tokenizer.decode(np.asarray(answer, np.int32)))
    engine.close()


if __name__ == "__main__":
    main()
