"""onnxruntime-genai's Engine, which computes many texts at a time, in a thread of its own.

The Engine wants all its calls from one thread. ``EngineThread`` is that thread: any other hands it
prompts as token ids, and gets tokens back one by one. What the Engine batches depends on the
folder, see ``tq_onnx.runtime.batching``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_onnx.errors import EngineError, UsageError
from tq_onnx.runtime import arguments
from tq_onnx.runtime.batching import Batching
from tq_onnx.runtime.conversations import Conversation, Conversations
from tq_onnx.runtime.drafts import Drafts
from tq_onnx.runtime.guidance import Guidance
from tq_onnx.runtime.jobs import CANCELLED, LENGTH, STOP, Choice, Job, Step
from tq_onnx.runtime.prefixes import Prefixes, page_hashes

_EVENTS: Final = 1024
"""That a pass may have, with draft tokens."""
_ROWS: Final = 32
"""Tokens of a pass up to which more guesses pay. Beyond, each costs as much as it may save."""
_NO_TOKEN: Final = "onnxruntime-genai finds no token for a character that the guidance asks for"
_BESIDE: Final = "onnxruntime-genai failed at the guidance of one of its requests; send it again"
_MOST_IDLE_PASSES: Final = 64
"""Without a token for a request whose prompt was read: it would get one in each."""
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Occupancy:
    """What an Engine has at a moment."""

    running: int  #: answers that are being computed
    waiting: int  #: answers that wait for pages or for others
    free_pages: int  #: that no answer has reserved. A conversation that is kept gives its pages up.
    passes: int  #: calls of the model since the start


class _GuidanceError(Exception):
    """An Engine without pages has failed, as it does where a guidance leaves no token."""


class EngineThread:
    """A thread with an Engine, which outlives everything that a job does.

    Attributes:
        batching: what the Engine makes of the folder.
        model: the ``onnxruntime_genai.Model``, for tokenizers.
        passes: calls of the model so far.
    """

    def __init__(
        self,
        folder: Path,
        batching: Batching,
        *,
        threads: int | None = None,
        speculates: bool = True,
        conversations: int | None = None,
    ) -> None:
        """Open a folder and start the thread.

        Args:
            speculates: whether to guess tokens, see ``tq_onnx.runtime.drafts``, where the Engine
                checks guesses.
            conversations: most requests that are kept after their end, see
                ``tq_onnx.runtime.conversations``; None for as many as there are places.
        """
        self._genai = _import_genai()
        self.batching = batching
        with _telling(folder):
            configuration = self._genai.Config(str(folder))
            if threads is not None:
                options = {"session_options": {"intra_op_num_threads": threads}}
                configuration.overlay(json.dumps({"model": {"decoder": options}}))
            if batching.joins:
                pages = {"dynamic_batching": {"max_batch_size": batching.places}}
                configuration.overlay(json.dumps({"engine": pages}))
            self.model = self._genai.Model(configuration)
        self._reason: str | None = None
        self._takes_orders = True
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}
        self._free = batching.num_blocks
        self._prefixes = Prefixes(batching.num_blocks)
        self._conversations = Conversations()
        most = batching.places if conversations is None else conversations
        self._most_conversations = most if batching.joins else 0
        self._speculates = speculates and batching.joins
        self._most_drafts = 0
        self.passes = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> EngineError | None:
        """The reason why the Engine has stopped, or None."""
        # A new one each time: an error that is raised again keeps all frames that it passed.
        return None if self._reason is None else EngineError(self._reason)

    @property
    def occupancy(self) -> Occupancy:
        """What the Engine has at this moment; any thread may ask."""
        free = self._free + self._conversations.pages
        return Occupancy(len(self._running), len(self._waiting), free, self.passes)

    @property
    def is_current(self) -> bool:
        """True in the thread of the Engine."""
        return threading.current_thread() is self._thread

    def submit(
        self,
        prompt: Iterable[int],
        deliver: Callable[[Step], None],
        *,
        max_new_tokens: int | None = None,
        choice: Choice | None = None,
        guidance: Guidance | None = None,
    ) -> Job:
        """Have a prompt answered.

        Args:
            deliver: called with every step, in the thread of the Engine: it must not wait. If it
                raises, its answer ends with an error, and others go on.
            guidance: what the answer has to look like; None for anything. If onnxruntime-genai
                cannot read it, the answer ends with an error.
        """
        if (broken := self.broken) is not None:
            raise broken
        job = self._job(prompt, deliver, max_new_tokens, choice or Choice())
        if guidance is not None:
            job.guidance, job.drafts = guidance, None  # the Engine takes one of them
        self._orders.put(lambda: self._take(job))
        # Whoever sets the mark of the end first tells of it: the thread, or this.
        if not self._takes_orders and job.end():
            raise EngineError(str(self._reason))
        return job

    def cancel(self, job: Job) -> None:
        """End an answer early; does nothing if it has ended.

        Takes no lock, so that a finalizer may call it at any moment.
        """
        if not isinstance(job, Job) or job.engine is not self:
            raise UsageError("job is not a job of this Engine", fix="give what its submit returned")
        if self._reason is None:
            self._orders.put(lambda: self._cancel_turn(job))

    def close(self) -> None:
        """End the thread; answers that are not complete end with an error.

        Waits until all are told, unless it is called by one of them, in the thread itself.
        """
        if self._reason is None:
            self._reason = "the Engine was closed"
        self._orders.put(None)
        if not self.is_current:
            self._thread.join()

    def _job(self, prompt: object, deliver: object, max_new_tokens: object, choice: Choice) -> Job:
        """Check everything that a job is made of: nothing else looks at it again."""
        batching = self.batching
        tokens = arguments.token_ids(prompt, batching.vocabulary)
        consumer = arguments.function(deliver, "deliver")
        if inspect.iscoroutinefunction(consumer):
            raise UsageError("deliver must be a function, got a coroutine function")
        room = batching.longest - len(tokens)
        most = max(room, 1)
        if max_new_tokens is not None:
            most = min(most, arguments.count(max_new_tokens, "max_new_tokens"))
        if most > room:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, and this model takes {batching.longest} "
                "with the answer"
            )
        pages = batching.pages(len(tokens) + most)
        hashes = page_hashes(tokens, batching.block_size) if batching.shares_prefixes else ()
        job = Job(self, tokens, most, choice.within(batching), consumer, pages, hashes)
        if self._speculates and choice.takes_drafts:
            job.drafts = Drafts(tokens)
        return job

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._reason = self._reason or f"the Engine failed: {error}"
        self._takes_orders = False
        # What was ordered before anybody could see that.
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                order()
        for job in (*self._running.values(), *self._waiting):
            self._end(job, Step(error=self.broken))
        self._waiting.clear()

    def _work(self) -> None:
        while not self._obey_all(self._genai.Engine(self.model)):
            pass

    def _obey_all(self, engine: Any) -> bool:
        """Answer until the end is ordered; False if another Engine has to go on."""
        events = engine.create_event_buffer(_EVENTS)
        self._most_drafts = engine.max_draft_tokens_per_proposal()
        while self._obey():
            self._begin(engine)
            if engine.has_pending_requests():
                try:
                    self._run_once(engine, events)
                except _GuidanceError:
                    while (oldest := self._conversations.oldest()) is not None:
                        self._drop(oldest)
                    return False
        return True

    def _run_once(self, engine: Any, events: Any) -> None:
        """Compute a pass, hand over what it gives, and guess what comes next."""
        self.passes += 1
        tokens_by_job: dict[Job, list[int]] = {}
        for event in engine.run(events):
            job = self._running.get(event.request)
            if job is not None:
                token = self._deliver(job, event)
                if token is not None and job.drafts is not None:
                    tokens_by_job.setdefault(job, []).append(token)
        for job, tokens in tokens_by_job.items():
            if job.request is None or job.drafts is None:
                continue
            job.drafts.take(tokens)
            # The pass gives one more token than it confirms.
            room = job.max_new_tokens - job.drafts.new_tokens - 1
            share = _ROWS // len(self._running) - 1
            guess = job.drafts.propose(max(min(self._most_drafts, room, share), 0))
            if guess:
                try:
                    job.request.set_draft_tokens(np.asarray(guess, np.int32))
                except RuntimeError:  # the configuration has a penalty, for example
                    job.drafts = None
        self._end_stuck()

    def _end_stuck(self) -> None:
        """End the answers whose guidance leaves no token; an Engine of pages tells nothing of it.

        It knows a token that is a part of a character by its text only, which is U+FFFD for each of
        them. Where the guidance asks for such a character, no pass gives a token any more.
        """
        for job in [job for job in self._running.values() if job.guidance is not None]:
            job.idle_passes += 1
            if job.idle_passes > _MOST_IDLE_PASSES:
                self._end(job, Step(error=UsageError(_NO_TOKEN)))

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

    def _take(self, job: Job) -> None:
        if job.max_new_tokens:
            self._waiting.append(job)
        else:  # the Engine takes 0 for no limit
            self._end(job, Step(finish=LENGTH))

    def _begin(self, engine: Any) -> None:
        """Hand over what waits: everything that there are pages for, or one prompt at a time.

        Requests that all lack a page would wait for each other for ever: the Engine takes no page
        back. So a request begins when there are pages for its longest answer. Those that share a
        beginning with one that is being read are passed over until it is read.
        """
        for conversation in self._conversations.expired():
            self._drop(conversation)
        for job in tuple(self._waiting):
            if self._running and not self.batching.together:
                return
            former = self._conversations.find(job.tokens)
            if former is None and self._prefixes.holds(job):
                continue
            if not self._make_room(job, former):
                return
            self._waiting.remove(job)
            try:
                self._begin_turn(engine, job, former)
            except Exception as error:
                refusal = f"onnxruntime-genai does not take it: {error}"
                self._end(job, Step(error=UsageError(refusal)))

    def _make_room(self, job: Job, former: Conversation | None) -> bool:
        """Drop conversations until there are pages and a place; False if there are none then.

        A conversation has a place of the Engine, which would wait for it for ever.
        """
        if not self.batching.joins:
            return True
        held = 0 if former is None else former.pages
        while True:
            places = len(self._running) + len(self._conversations) + (former is None)
            if job.pages - held <= self._free and places <= self.batching.places:
                return True
            oldest = self._conversations.oldest(spared=former)
            if oldest is None:
                return False
            self._drop(oldest)

    def _drop(self, conversation: Conversation) -> None:
        self._conversations.take(conversation)
        self._free += conversation.pages
        with suppress(RuntimeError):  # of an Engine that has failed
            conversation.request.close()

    def _begin_turn(self, engine: Any, job: Job, former: Conversation | None) -> None:
        if former is None:
            options = self._genai.RequestOptions()
            # Pages come as they are needed; other caches get rows for that many tokens.
            tokens = len(job.tokens) + job.max_new_tokens
            tokens = self.batching.longest if self.batching.joins else tokens
            options.set_max_session_tokens(self.batching.rows(tokens))
            job.request = engine.create_request(options=options)
        else:
            self._conversations.take(former)
            self._free += former.pages
            job.request, job.resumed = former.request, former.computed
        self._running[job.request] = job
        self._free -= job.pages
        self._prefixes.begin(job)
        turn = self._genai.TurnOptions(job.request)
        turn.set_max_generated_tokens(job.max_new_tokens)
        job.choice.tell(turn)
        if job.guidance is not None:
            turn.set_guidance(job.guidance.kind, job.guidance.text)
            # A pass reads at least one token of some prompt until all are read.
            job.idle_passes = -sum(len(each.tokens) for each in self._running.values())
        new = job.tokens if former is None else job.tokens[len(former.tokens) :]
        job.turn = job.request.begin_turn(np.asarray(new, np.int32), turn)

    def _deliver(self, job: Job, event: Any) -> int | None:
        """Hand over what an event says, and return its token."""
        flags, kinds = event.flags.value, self._genai.EngineEventFlags
        token = int(event.token) if flags & kinds.TOKEN.value else None
        if token is not None:
            job.answer.append(token)
            job.idle_passes = 0
            self._prefixes.end(job, is_read=True)
        if not flags & (kinds.TURN_FINISHED.value | kinds.FAILED.value):
            if token is not None:
                self._tell(job, Step(token))
            return token
        reasons, codes = self._genai.FinishReason, self._genai.EngineErrorCode
        if event.finish_reason != reasons.FAILED:
            words = {reasons.EOS: STOP, reasons.STOP_STRING: STOP, reasons.CANCELLED: CANCELLED}
            finish = words.get(event.finish_reason, LENGTH)
            cached = job.resumed + int(event.usage.cached_prompt_tokens)
            # The Engine has exactly the tokens that it gave, or it is not known what it has.
            if 0 < len(job.answer) == int(event.usage.generated_tokens):
                job.computed = len(job.tokens) + len(job.answer)
                job.computed -= event.finish_reason != reasons.EOS  # the last was never read
            self._end(job, Step(token, finish, cached_tokens=cached))
            return token
        if event.error_code in (codes.ENGINE_CONTRACT_FAILURE, codes.ENGINE_EXECUTION_FAILURE):
            guided = [each for each in self._running.values() if each.guidance is not None]
            if guided:
                for each in tuple(self._running.values()):
                    is_reason = guided == [each]
                    error = UsageError(_NO_TOKEN) if is_reason else EngineError(_BESIDE)
                    self._end(each, Step(error=error))
                raise _GuidanceError
            raise RuntimeError(event.error_code.name)  # which ends all jobs
        self._end(job, Step(error=UsageError(f"the Engine failed: {event.error_code.name}")))
        return None

    def _cancel_turn(self, job: Job) -> None:
        """End an answer early; with pages the Engine tells the end, and what it has taken."""
        if job.request is None or not self.batching.joins:
            self._cancel(job, Step(finish=CANCELLED))
        else:
            job.request.cancel_turn(job.turn)

    def _cancel(self, job: Job, last: Step) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        self._end(job, last)

    def _end(self, job: Job, last: Step) -> None:
        """Give back what a job has, and tell it how it ended; does nothing if it has ended."""
        if job.request is not None:
            del self._running[job.request]
            self._free += job.pages
            self._prefixes.end(job, is_read=False)
            if job.computed and self._most_conversations:
                self._keep(job)
            else:
                with suppress(RuntimeError):  # of an Engine that has failed
                    job.request.close()
            job.request = None
        if job.end():
            self._tell(job, last)

    def _keep(self, job: Job) -> None:
        """Keep the request of a job that has ended, in place of the one that ended first."""
        tokens = job.tokens + job.answer
        # Draft tokens that failed may have taken one more.
        pages = min(self.batching.pages(len(tokens) + self._most_drafts), job.pages)
        oldest = self._conversations.oldest()
        if oldest is not None and len(self._conversations) >= self._most_conversations:
            self._drop(oldest)
        self._free -= pages
        self._conversations.keep(
            Conversation(job.request, tokens, job.computed, pages, time.monotonic())
        )

    def _tell(self, job: Job, step: Step) -> None:
        """Hand over a step; a consumer that raises ends its own answer."""
        try:
            job.deliver(step)
        except BaseException as error:
            _LOG.exception("deliver raised, which ends its answer")
            failure = UsageError(f"deliver raised {type(error).__name__}")
            self._cancel(job, Step(error=failure))


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
