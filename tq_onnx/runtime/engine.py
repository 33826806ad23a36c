"""onnxruntime-genai's Engine, which computes many texts at a time, in a thread of its own.

The Engine wants all its calls from one thread. ``EngineThread`` is that thread: any other hands it
prompts as token ids, and gets tokens back one by one. What the Engine batches depends on the
folder, see ``tq_onnx.runtime.batching``.
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_onnx.errors import EngineError, UsageError
from tq_onnx.runtime.batching import Batching
from tq_onnx.runtime.jobs import CANCELLED, LENGTH, STOP, Choice, Job, Step

_EVENTS: Final = 64


class EngineThread:
    """A thread with an Engine.

    Attributes:
        batching: what the Engine makes of the folder.
        model: the ``onnxruntime_genai.Model``, for tokenizers.
        broken: why it answers nothing any more, or None.
    """

    def __init__(self, folder: Path, batching: Batching, *, threads: int | None = None) -> None:
        """Open a folder and start the thread.

        Args:
            folder: of onnxruntime-genai.
            batching: what the Engine makes of it.
            threads: of ONNX Runtime; None for what the configuration says, or all cores.

        Raises:
            EngineError: onnxruntime-genai is not installed, or does not open the folder.
        """
        self._genai = _import_genai()
        self.batching = batching
        with _telling(folder):
            configuration = self._genai.Config(str(folder))
            if threads is not None:
                options = {"session_options": {"intra_op_num_threads": threads}}
                configuration.overlay(json.dumps({"model": {"decoder": options}}))
            self.model = self._genai.Model(configuration)
        self.broken: EngineError | None = None
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}
        self._free = batching.num_blocks
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        tokens: Sequence[int],
        deliver: Callable[[Step], None],
        *,
        max_tokens: int | None = None,
        choice: Choice | None = None,
    ) -> Job:
        """Have a prompt answered.

        Args:
            tokens: the prompt.
            deliver: called with every step, in the thread of the Engine: it must not wait.
            max_tokens: most tokens of the answer; None for as many as there is room for.
            choice: how they are chosen; None for what the configuration says.

        Raises:
            UsageError: the prompt is empty or too long.
            EngineError: the Engine answers nothing any more.
        """
        room = self.batching.tokens - len(tokens)
        if not tokens:
            raise UsageError("the prompt is empty", fix="give at least one token")
        if room < 1:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, and this model takes {self.batching.tokens} "
                "with the answer"
            )
        most = min(max_tokens or room, room)
        pages = self.batching.pages(len(tokens) + most)
        job = Job(tokens, most, choice or Choice(), deliver, pages)
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
        broken = EngineError("the Engine was closed")
        try:
            self._work()
        except Exception as error:
            broken = EngineError(f"the Engine failed: {error}")
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
        engine = self._genai.Engine(self.model)
        events = engine.create_event_buffer(_EVENTS)
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
        """Hand over what waits: everything that there are pages for, or one prompt at a time.

        Requests that all lack a page would wait for each other for ever: the Engine takes no page
        back. So a request begins when there are pages for its longest answer.
        """
        while self._waiting and (self.batching.together or not self._running):
            job = self._waiting[0]
            if job.pages > self._free:
                return
            self._waiting.popleft()
            try:
                self._begin_turn(engine, job)
            except RuntimeError as error:
                job.deliver(Step(error=UsageError(str(error))))
            else:
                self._running[job.request] = job
                self._free -= job.pages

    def _begin_turn(self, engine: Any, job: Job) -> None:
        options = self._genai.RequestOptions()
        # Caches get rows for that many tokens, whatever the model could take.
        rows = len(job.tokens) + job.max_tokens + self.batching.window_rows
        options.set_max_session_tokens(rows)
        job.request = engine.create_request(options=options)
        turn = self._genai.TurnOptions(job.request)
        turn.set_max_generated_tokens(job.max_tokens)
        job.choice.tell(turn)
        job.turn = job.request.begin_turn(np.asarray(job.tokens, np.int32), turn)

    def _deliver(self, event: Any) -> None:
        flags, kinds = event.flags.value, self._genai.EngineEventFlags
        job = self._running.get(event.request)
        if job is None:
            return
        token = int(event.token) if flags & kinds.TOKEN.value else None
        if not flags & (kinds.TURN_FINISHED.value | kinds.FAILED.value):
            if token is not None and not job.is_cancelled:
                job.deliver(Step(token))
            return
        del self._running[event.request]
        self._free += job.pages
        reasons = self._genai.FinishReason
        ends = {reasons.EOS: STOP, reasons.STOP_STRING: STOP, reasons.CANCELLED: CANCELLED}
        if event.finish_reason != reasons.FAILED:
            job.deliver(Step(token, ends.get(event.finish_reason, LENGTH)))
            event.request.close()
            return
        failure = f"the Engine failed: {event.error_code.name}"
        codes = self._genai.EngineErrorCode
        lost = event.error_code in (codes.ENGINE_CONTRACT_FAILURE, codes.ENGINE_EXECUTION_FAILURE)
        job.deliver(Step(error=EngineError(failure) if lost else UsageError(failure)))
        if lost:
            raise EngineError(event.error_code.name)

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.deliver(Step(finish=CANCELLED))
        elif job.request in self._running:
            job.is_cancelled = True
            job.request.cancel_turn(job.turn)


def _import_genai() -> Any:
    try:
        return importlib.import_module("onnxruntime_genai")
    except ImportError as error:
        raise EngineError(
            "onnxruntime-genai is not installed, whose Engine computes many texts at a time",
            fix="pip install onnxruntime-genai",
        ) from error


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Tell what onnxruntime-genai has against a folder as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            f"onnxruntime-genai does not open it: {error}", where=str(folder)
        ) from error
