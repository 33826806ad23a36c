"""Serve a converted folder to OpenAI clients: completions of chats and texts, streamed or whole.

    python examples/serving/server.py qwen3-genai-int4 --port 8000

Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health. Requests are
computed on onnxruntime-genai's Engine; see engine.py for what it batches, protocol.py for the
fields of a request, calls.py for calls of tools, and limits.py for what is taken at most.

Needs onnxruntime-genai 0.18, fastapi, uvicorn and tq-onnx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from calls import CallReader, described, instructions, schema_of
from engine import genai_folder
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from limits import Gate, Limits, connections
from protocol import (
    BODY,
    Asked,
    ChatRequest,
    CompletionRequest,
    Document,
    RequestError,
    explained,
    failure,
    refusal,
    shown,
)
from starlette.exceptions import HTTPException

from tq_onnx import Engine, Guidance
from tq_onnx.errors import EngineError, TqOnnxError, UsageError
from tq_onnx.language.templates import find_template, read_template
from tq_onnx.language.text import Transcript
from tq_onnx.runtime.jobs import Choice, Step

CHARACTERS = 16
"""Of a prompt, for each token that the model takes: no language has tokens of so many."""
ROUTES = (
    "there is no such route; ask for /v1/chat/completions, /v1/completions, /v1/models or /health"
)
REASON = 120
"""Characters of what onnxruntime-genai says of a schema."""
ENDING_SECONDS = 5
"""For the Engine's last step, which nothing interrupts."""


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: more of it.
        finish: at the end why it ended: ``stop``, ``length`` or ``tool_calls``.
        calls: of tools, as OpenAI's clients read them, in the order of the answer.
        first_call: the number of calls before these.
    """

    text: str
    finish: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    first_call: int = 0


class Answer:
    """An answer that is being computed: an asynchronous iterator of pieces.

    Attributes:
        prompt_tokens: tokens of the prompt.
        tokens: tokens of the answer so far.
        cached_tokens: at the end, tokens of the prompt that did not have to be computed.
    """

    def __init__(self, engine: Engine, asked: Asked, prompt: list[int]) -> None:
        """Hand a prompt to the Engine.

        Raises:
            RequestError: two fields say what the answer looks like, or a tool that is not there.
            UsageError: the Engine does not take this prompt, or such a choice of tokens.
            EngineError: it answers nothing any more.
        """
        self.prompt_tokens = len(prompt)
        self.tokens = 0
        self.cached_tokens = 0
        self._engine = engine
        self._text = Transcript(engine.tokenizer, asked.stops)
        self._field, guidance = guidance_of(asked)
        tools = asked.usable_tools if isinstance(asked, ChatRequest) else []
        self._reader = CallReader([tool.function.name for tool in tools])
        self._told = 0
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._job = engine.submit(
            prompt,
            lambda step: loop.call_soon_threadsafe(self._steps.put_nowait, step),
            max_new_tokens=asked.most,
            sampling=Choice(asked.temperature, asked.top_p, asked.top_k, seed=asked.seed),
            guidance=guidance,
        )

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over pieces.

        Raises:
            RequestError: the Engine cannot read what the answer has to look like.
            UsageError: it does not take this request.
            EngineError: it failed.
        """
        while True:
            step = await self._steps.get()
            if isinstance(step.error, UsageError) and self._field:
                raise unreadable(self._field, step.error)
            if step.error is not None:
                raise step.error
            text = ""
            if step.token is not None:
                self.tokens += 1
                text = self._text.take(step.token)
            if self._text.stopped:
                self.cancel()
                while not step.is_last:
                    step = await self._steps.get()
            if step.is_last:
                self.cached_tokens = step.cached_tokens
                finish = "stop" if self._text.stopped else step.finish
                text = self._reader.take(text + self._text.rest()) + self._reader.rest()
                by_itself = finish == "stop" and self._reader.calls
                yield self._piece(text, "tool_calls" if by_itself else finish)
                return
            piece = self._piece(self._reader.take(text))
            if piece.text or piece.calls:
                yield piece

    def _piece(self, text: str, finish: str | None = None) -> Piece:
        first, calls = self._told, self._reader.calls
        self._told = len(calls)
        return Piece(text, finish, calls[first:], first)

    def cancel(self) -> None:
        """Compute no more of it; does nothing if it has ended."""
        self._engine.cancel(self._job)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI's clients count them."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        details = {"cached_tokens": self.cached_tokens}
        return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": details}


class Chat:
    """A model that is served.

    Attributes:
        name: by which clients ask for it.
        engine: what computes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str | None = None,
        chat_template: Path | None = None,
        warm: Sequence[Path] = (),
        max_length: int | None = None,
        max_characters: int | None = None,
        alone: bool = False,
        threads: int | None = None,
    ) -> None:
        """Open a folder.

        Args:
            folder: of onnxruntime-genai.
            name: the folder's own by default.
            chat_template: a Jinja template instead of the folder's.
            warm: text files, each with a system prompt that is read before any request.
            max_length: see ``tq_onnx.Engine``.
            max_characters: of a prompt; more are not made tokens of.
            alone: see ``tq_onnx.Engine``.
            threads: likewise.

        Raises:
            TqOnnxError: the folder cannot be served.
        """
        self.name = name or folder.resolve().name
        template = read_template(chat_template, folder) if chat_template else find_template(folder)
        if template is None:
            raise UsageError(
                "there is no chat template", where=str(folder), fix="give --chat-template FILE"
            )
        self._template = template
        self._created = int(time.time())
        self.engine = Engine(folder, max_length=max_length, alone=alone, threads=threads)
        self._tokenizer = self.engine.tokenizer
        self._characters = max_characters or CHARACTERS * self.engine.batching.longest
        for path in warm:
            self._warm(path)

    def _warm(self, path: Path) -> None:
        try:
            system = {"role": "system", "content": path.read_text(encoding="utf-8").strip()}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is no text file: {error}") from error
        # What the template writes in front of any message of a user.
        texts = (
            self._template.render([system, {"role": "user", "content": said}]) for said in "ab"
        )
        one, other = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        self.engine.warm([token for token, _ in pairs])

    def describe(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "tq-onnx"}

    async def begin(self, asked: Asked) -> Answer:
        """Begin an answer.

        Raises:
            RequestError: a field asks for what there is not.
            EngineError: the Engine answers nothing any more.
        """
        if asked.model != self.name:
            raise RequestError(
                f"there is no model '{shown(asked.model)}'; ask for {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        # Others are answered meanwhile.
        prompt = await asyncio.to_thread(self._prompt, asked)
        try:
            return Answer(self.engine, asked, prompt)
        except UsageError as error:
            first = str(error).partition(" ")[0]
            if first in type(asked).model_fields:
                raise RequestError(str(error), param=first) from error
            code = "context_length_exceeded" if prompt else None
            raise RequestError(str(error), param=field_of_prompt(asked), code=code) from error

    def _prompt(self, asked: Asked) -> list[int]:
        try:
            if isinstance(asked, CompletionRequest):
                parts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
                ids = [part for part in parts if isinstance(part, int)]
                if len(ids) == len(parts):
                    return ids
                text = "".join(part for part in parts if isinstance(part, str))
            else:
                text = self._chat(asked)
            if len(text) > self._characters:
                raise RequestError(
                    f"the prompt has {len(text):,} characters, and this server takes "
                    f"{self._characters:,}; send less",
                    param=field_of_prompt(asked),
                    code="context_length_exceeded",
                )
            # Templates write special tokens themselves.
            special = isinstance(asked, CompletionRequest)
            return self._tokenizer.encode(text, add_special_tokens=special)
        except UsageError as error:  # without the place of the template, which is nobody's business
            sentence = f"{error.what}; {error.fix}"
            raise RequestError(sentence, param=field_of_prompt(asked)) from error

    def _chat(self, asked: ChatRequest) -> str:
        """Return the text of the messages and of what tools there are."""
        messages = [message.for_template() for message in asked.messages]
        tools = asked.usable_tools
        if not tools or self._template.takes_tools:
            return self._template.render(messages, tools=described(tools) or None)
        texts = [instructions(tools)]
        if messages[0]["role"] == "system":
            texts.insert(0, messages.pop(0)["content"])
        system = {"role": "system", "content": "\n\n".join(texts)}
        return self._template.render([system, *messages])


def field_of_prompt(asked: Asked) -> str:
    """Return the field that has the prompt."""
    return "prompt" if isinstance(asked, CompletionRequest) else "messages"


def guidance_of(asked: Asked) -> tuple[str, Guidance | None]:
    """Return what an answer has to look like, and the field that says so.

    Raises:
        RequestError: two fields say so, or there is no tool that has to be called.
    """
    values = asked.text_fields
    if isinstance(asked, ChatRequest) and asked.has_to_call:
        if not asked.usable_tools:
            raise RequestError(
                "tool_choice asks for a tool that tools does not have; change it or leave it out",
                param="tool_choice",
            )
        values["tool_choice"] = schema_of(asked.usable_tools)
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


class Form:
    """How the answer to a request is written.

    Attributes:
        prefix: of its id.
        kind: of a whole answer.
        chunk: of a part of one.
        opening: what a stream begins with, if anything.
    """

    prefix: str
    kind: str
    chunk: str
    opening: dict[str, Any] | None = None

    def __init__(self, model: str) -> None:
        """Begin an answer of a model."""
        self._model = model
        self._ident = f"{self.prefix}-{uuid.uuid4().hex}"

    def document(self, kind: str, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """Return a completion, or a chunk of one."""
        choices = [] if choice is None else [{"index": 0, "logprobs": None, **choice}]
        names = {"id": self._ident, "object": kind, "model": self._model}
        return {**names, "created": int(time.time()), "choices": choices, **more}

    def whole(self, text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what a choice has besides its finish."""
        raise NotImplementedError

    def part(self, piece: Piece) -> dict[str, Any]:
        """Likewise, of a chunk."""
        raise NotImplementedError


class ChatForm(Form):
    """A completion of a chat."""

    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar = {"delta": {"role": "assistant", "content": ""}}

    def whole(self, text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a message."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message}

    def part(self, piece: Piece) -> dict[str, Any]:
        """Return what a message has more."""
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            numbered = enumerate(piece.calls, start=piece.first_call)
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        return {"delta": delta}


class TextForm(Form):
    """A completion of a text, which calls nothing."""

    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"

    def whole(self, text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the text."""
        del calls
        return {"text": text}

    def part(self, piece: Piece) -> dict[str, Any]:
        """Return more text."""
        return {"text": piece.text}


async def completed(answer: Answer, form: Form) -> Document:
    """Return a completion once it is complete."""
    pieces = [piece async for piece in answer]
    text = "".join(piece.text for piece in pieces)
    choice = form.whole(text, [call for piece in pieces for call in piece.calls])
    choice["finish_reason"] = pieces[-1].finish
    return Document(form.document(form.kind, choice, usage=answer.usage))


async def streamed(
    answer: Answer, pieces: AsyncIterator[Piece], form: Form, usage: bool
) -> AsyncIterator[str]:
    """Return server-sent events: a chunk for every piece of text, and an end."""

    def event(choice: dict[str, Any] | None, **more: Any) -> str:
        return f"data: {json.dumps(form.document(form.chunk, choice, **more))}\n\n"

    if form.opening is not None:
        yield event({**form.opening, "finish_reason": None})
    try:
        async for piece in pieces:
            yield event({**form.part(piece), "finish_reason": piece.finish})
    except (TqOnnxError, RequestError) as error:
        # The status was sent long ago. No [DONE] follows, and clients raise the error.
        status = error.status if isinstance(error, RequestError) else 503
        yield f"data: {json.dumps(failure(str(error), status))}\n\n"
        return
    if usage:
        yield event(None, usage=answer.usage)
    yield "data: [DONE]\n\n"


async def first_of(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Wait for the first piece, so that what fails before it has a status of its own."""
    first = await anext(pieces)

    async def all_of() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    return all_of()


async def refuse(_: Request, error: Exception) -> Document:
    """Return the response to an error of any kind."""
    if isinstance(error, RequestValidationError):
        error = explained(error.errors())
    elif isinstance(error, HTTPException):
        headers = error.headers or {}
        sentences = {400: BODY, 404: ROUTES, 405: f"this route takes {headers.get('Allow')}"}
        sentence = sentences.get(error.status_code, error.detail)
        error = RequestError(sentence, status=error.status_code, headers=headers)
    elif isinstance(error, TqOnnxError):
        statuses = {UsageError: 400, EngineError: 503}
        error = RequestError(str(error), status=statuses.get(type(error), 500))
    elif not isinstance(error, RequestError):
        error = RequestError("this is a defect of the server, whose log has more", status=500)
    return refusal(error)


def make_app(chat: Chat, limits: Limits | None = None) -> FastAPI:
    """Make the application that serves a model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        # The process ends, whatever the Engine is at.
        closing = threading.Thread(target=chat.engine.close, daemon=True)
        closing.start()
        end = time.monotonic() + ENDING_SECONDS
        while closing.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.05)

    app = FastAPI(
        title="tq-onnx", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Gate, limits=limits or Limits(), tokens=chat.engine.batching.longest)
    for kind in (RequestValidationError, HTTPException, RequestError, TqOnnxError, Exception):
        app.add_exception_handler(kind, refuse)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if chat.engine.broken is not None:
            raise chat.engine.broken
        batches = chat.engine.batching.reason or "yes"
        return {"status": "ok", "batches": batches, "process": os.getpid()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [chat.describe()]}

    async def complete(asked: Asked, request: Request, form: Form) -> Response:
        answer = await chat.begin(asked)
        request.state.ends.callback(answer.cancel)
        if not asked.stream:
            return await completed(answer, form)
        pieces = await first_of(aiter(answer))
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(
            streamed(answer, pieces, form, usage), media_type="text/event-stream"
        )

    @app.post("/v1/chat/completions", response_model=None)
    async def complete_chat(asked: ChatRequest, request: Request) -> Response:
        return await complete(asked, request, ChatForm(chat.name))

    @app.post("/v1/completions", response_model=None)
    async def complete_text(asked: CompletionRequest, request: Request) -> Response:
        return await complete(asked, request, TextForm(chat.name))

    return app


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``Chat`` and ``Limits``."""
    parser.add_argument("folder", type=genai_folder, help="of onnxruntime-genai, converted")
    parser.add_argument("--name", help="by which clients ask for the model (default: the folder's)")
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the folder's"
    )
    parser.add_argument(
        "--warm",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="text file with a system prompt that is read at the start; may be given several times",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="compute one request at a time; a text then never depends on what else is asked",
    )
    numbers = {
        "threads": "of ONNX Runtime (default: all cores)",
        "max-length": "most tokens of a prompt and its answer (default: the configuration's)",
        "max-characters": f"of a prompt (default: {CHARACTERS} for each of those tokens)",
        "max-body": "bytes of a request (default: 64 KiB, and 32 for each of those tokens)",
        "max-requests": "that wait or are computed; more get status 429 (default: 64)",
        "client-seconds": "until a client has sent a head, then a body, and taken a piece of its "
        "answer (default: 30)",
    }
    defaults = {each.name: each.default for each in fields(Limits)}
    for name, text in numbers.items():
        default = defaults.get(name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=positive, metavar="N", default=default, help=text)


def positive(text: str) -> int:
    """Take a number of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def opened(options: dict[str, Any]) -> tuple[Chat, FastAPI]:
    """Open a folder, and make the application that serves it, by the options of ``add_options``.

    Raises:
        TqOnnxError: the folder cannot be served.
    """
    names = [each.name for each in fields(Limits)]
    chat = Chat(**{name: value for name, value in options.items() if name not in names})
    return chat, make_app(chat, Limits(**{name: options[name] for name in names}))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="likewise (default: 8000)")
    parser.add_argument(
        "--shutdown-seconds",
        type=positive,
        metavar="N",
        default=30,
        help="for answers that are being computed when the server is to end (default: 30)",
    )
    options = vars(parser.parse_args())
    host, port, ending = (options.pop(name) for name in ("host", "port", "shutdown_seconds"))
    try:
        chat, app = opened(options)
    except TqOnnxError as error:
        raise SystemExit(str(error)) from error
    if chat.engine.batching.reason:
        print(chat.engine.batching.reason, file=sys.stderr)
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=connections(options["client_seconds"]),
        ws="none",
        timeout_graceful_shutdown=ending,
    )


if __name__ == "__main__":
    main()
