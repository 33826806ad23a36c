"""Answers that are being computed: the steps of the Engine become pieces of text and calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tq_onnx.errors import UsageError
from tq_onnx.language.engine import Engine
from tq_onnx.language.text import Transcript
from tq_onnx.runtime.guidance import Guidance
from tq_onnx.runtime.jobs import Choice, Job, Step
from tq_onnx.serving.calls import CallReader, schema_of
from tq_onnx.serving.metrics import Record
from tq_onnx.serving.protocol import ChatRequest, GenerationRequest, RequestError

REASON: Final = 120
"""Characters of what onnxruntime-genai says of a schema."""


@dataclass(frozen=True)
class Piece:
    """A piece of an answer."""

    index: int  #: of the choice
    text: str  #: that follows
    finish: str | None = None  #: at the end why it ended: ``stop``, ``length`` or ``tool_calls``
    #: of tools, as OpenAI's clients read them, in the order of the answer
    calls: Sequence[dict[str, Any]] = ()
    first_call: int = 0  #: the number of calls before these


class _Choice:
    """One choice of a completion."""

    def __init__(self, index: int, text: Transcript, reader: CallReader) -> None:
        self.index = index
        self.is_complete = False
        self._text = text
        self._reader = reader
        self._sent_calls = 0

    @property
    def has_stopped(self) -> bool:
        """True once a stop string was there, so that nothing of the rest is read."""
        return self._text.stopped

    def take(self, step: Step) -> Piece | None:
        """Return the piece that a step gives, if it gives any."""
        text = ""
        if step.token is not None and not self.has_stopped:
            text = self._text.take(step.token)
        if not step.is_last:
            piece = self._piece(self._reader.take(text))
            return piece if piece.text or piece.calls else None
        self.is_complete = True
        finish = "stop" if self.has_stopped else step.finish
        text = self._reader.take(text + self._text.rest()) + self._reader.rest()
        calls_end_it = finish == "stop" and self._reader.calls
        return self._piece(text, "tool_calls" if calls_end_it else finish)

    def _piece(self, text: str, finish: str | None = None) -> Piece:
        first, calls = self._sent_calls, self._reader.calls
        self._sent_calls = len(calls)
        return Piece(self.index, text, finish, calls[first:], first)


class Answers:
    """The choices of a completion: an asynchronous iterator of pieces, each of some choice."""

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        record: Record,
        seconds: float | None = None,
    ) -> None:
        """Hand prompts to the Engine, each as often as the request has choices."""
        self._engine = engine
        self._record = record
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._field, guidance = guidance_of(request)
        tools = request.usable_tools if isinstance(request, ChatRequest) else []
        names = [tool.function.name for tool in tools]
        self._steps: asyncio.Queue[tuple[int, Step]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._choices: list[_Choice] = []
        self._jobs: list[Job] = []
        record.prompt_tokens = sum(map(len, prompts))
        self._copies = copies = request.n or 1
        try:
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(copies)):
                text = Transcript(engine.tokenizer, request.stops)
                self._choices.append(_Choice(index, text, CallReader(names)))
                # The same draws for each would be the same text.
                seed = None if request.seed is None else (request.seed + index % copies) % 2**63
                choice = Choice(
                    request.temperature,
                    request.top_p,
                    request.top_k,
                    request.repetition_penalty,
                    seed,
                )
                job = engine.submit(
                    prompt,
                    self._deliver(index),
                    max_new_tokens=request.most,
                    sampling=choice,
                    guidance=guidance,
                )
                self._jobs.append(job)
        except BaseException:
            self.cancel()
            raise

    def _deliver(self, index: int) -> Callable[[Step], None]:
        def deliver(step: Step) -> None:
            self._loop.call_soon_threadsafe(self._steps.put_nowait, (index, step))

        return deliver

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over pieces."""
        record, running = self._record, len(self._choices)
        while running:
            index, step = await self._next()
            if isinstance(step.error, UsageError) and self._field:
                raise unreadable(self._field, step.error)
            if step.error is not None:
                raise step.error
            choice = self._choices[index]
            if step.token is not None and not choice.has_stopped:
                record.note_token()
            piece = choice.take(step)
            if choice.has_stopped:
                self._engine.cancel(self._jobs[index])
            if step.is_last:
                running -= 1
                # A prompt with several choices counts once.
                record.cached_tokens += 0 if index % self._copies else step.cached_tokens
            if piece is not None:
                record.finish = piece.finish
                yield piece

    async def _next(self) -> tuple[int, Step]:
        seconds = None if self._end is None else max(self._end - time.monotonic(), 0)
        try:
            return await asyncio.wait_for(self._steps.get(), seconds)
        except asyncio.TimeoutError as error:
            raise RequestError(
                f"the answer took more than {self._seconds:g} seconds; ask for fewer tokens, or "
                "later",
                status=503,
            ) from error

    def cancel(self) -> None:
        """Compute no more of them; does nothing to those that have ended."""
        for job in self._jobs:
            self._engine.cancel(job)

    @property
    def count(self) -> int:
        """The number of choices."""
        return len(self._choices)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI's clients count them."""
        record = self._record
        counts = {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.new_tokens}
        details = {"cached_tokens": record.cached_tokens}
        return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": details}


def guidance_of(request: GenerationRequest) -> tuple[str, Guidance | None]:
    """Return what an answer has to look like, and the field that says so."""
    values = request.text_fields
    if isinstance(request, ChatRequest) and request.has_to_call:
        if not request.usable_tools:
            raise RequestError(
                "tool_choice asks for a tool that tools does not have; change it or leave it out",
                param="tool_choice",
            )
        values["tool_choice"] = schema_of(request.usable_tools)
    if len(values) > 1:
        raise RequestError(
            f"{' and '.join(values)} exclude each other; leave one out", param=next(iter(values))
        )
    for name, value in values.items():
        kind = "regex" if name == "regex" else "schema"
        try:
            return name, Guidance.of(**{kind: value})
        except UsageError as error:
            raise unreadable(name, error) from error
    return "", None


def unreadable(field: str, error: UsageError) -> RequestError:
    """Return the error of what says how an answer has to look, and cannot be read."""
    lines = error.what.rpartition("grammar: ")[2].splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])[:REASON]
    sentence = f"{field} cannot be used ({ascii(reason)[1:-1]}); change it or leave it out"
    return RequestError(sentence, param=field)
