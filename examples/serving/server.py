"""Serve a converted folder to OpenAI clients: chat completions, streamed or whole.

    python examples/serving/server.py qwen3-genai-int4 --port 8000

Routes: POST /v1/chat/completions, GET /v1/models, GET /health. Requests are computed on
onnxruntime-genai's Engine; see engine.py for what it batches.

Needs onnxruntime-genai 0.18, fastapi, uvicorn and tq-onnx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime_genai as og
import uvicorn
from engine import genai_folder
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from tq_onnx import Engine
from tq_onnx.errors import EngineError, UsageError
from tq_onnx.runtime.engine import Choice, Job, Step

MOST_STOPS = 4
NO_TEMPLATE = "the folder has no chat template: give one with --chat-template FILE"


class TextPart(BaseModel):
    """A piece of a message; there are no images or sounds."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. Other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart]

    def for_template(self) -> dict[str, Any]:
        """Return the message with its text in one piece."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A chat completion. A field that is not here is refused, and not passed over in silence."""

    model_config = ConfigDict(extra="forbid")
    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    # Clients send these, and nothing here depends on them.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> list[str]:
        """Texts before which an answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


class RequestError(Exception):
    """A request that cannot be answered as it is.

    Attributes:
        status: of HTTP.
        param: the field, if it is one.
        code: a word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        """Make an error; see the class for arguments."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class TextUntil:
    """Text of tokens, up to a stop string.

    What could be the beginning of a stop string is kept back.

    Attributes:
        stopped: whether a stop string came.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        """Begin with no text."""
        self._stream = tokenizer.create_stream()
        self._stops = stops
        self._kept = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that is certain with one more token."""
        if self.stopped:
            return ""
        self._kept += self._stream.decode(token)
        ends = [place for stop in self._stops if (place := self._kept.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._kept = self._kept[: min(ends)]
            return self.rest()
        most = max((len(stop) for stop in self._stops), default=0)
        begun = (
            length
            for length in range(min(most, len(self._kept)), 0, -1)
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops)
        )
        certain = len(self._kept) - next(begun, 0)
        text, self._kept = self._kept[:certain], self._kept[certain:]
        return text

    def rest(self) -> str:
        """Return what was kept back."""
        text, self._kept = self._kept, ""
        return text


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: text, and at the end why it ended (``stop`` or ``length``)."""

    text: str
    finish: str | None = None


class Answer:
    """An answer that is being computed: an asynchronous iterator of pieces.

    Attributes:
        prompt_tokens: tokens of the prompt.
        tokens: tokens of the answer so far.
    """

    def __init__(self, engine: Engine, tokenizer: Any, asked: ChatRequest, prompt: list[int]):
        """Hand a prompt to the Engine.

        Raises:
            UsageError: the prompt is too long.
            EngineError: the Engine answers nothing any more.
        """
        self.prompt_tokens = len(prompt)
        self.tokens = 0
        self._engine = engine
        self._text = TextUntil(tokenizer, asked.stops)
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._job: Job = engine.submit(
            prompt,
            lambda step: loop.call_soon_threadsafe(self._steps.put_nowait, step),
            max_new_tokens=asked.most,
            sampling=Choice(asked.temperature, asked.top_p, asked.top_k, seed=asked.seed),
        )

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over pieces; whoever leaves early cancels the rest.

        Raises:
            UsageError: the Engine does not take this request.
            EngineError: it failed.
        """
        ended = False
        try:
            while not ended:
                step = await self._steps.get()
                ended = step.is_last
                if step.error is not None:
                    raise step.error
                text = "" if step.token is None else self._add(step.token)
                if self._text.stopped:
                    yield Piece(text, "stop")
                    return
                if ended:
                    yield Piece(text + self._text.rest(), step.finish)
                elif text:
                    yield Piece(text)
        finally:
            if not ended:
                self._engine.cancel(self._job)

    def _add(self, token: int) -> str:
        self.tokens += 1
        return self._text.add(token)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens, as OpenAI's clients count them."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        return {**counts, "total_tokens": sum(counts.values())}


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
        max_length: int | None = None,
        alone: bool = False,
        threads: int | None = None,
    ) -> None:
        """Open a folder.

        Args:
            folder: of onnxruntime-genai.
            name: the folder's own by default.
            chat_template: a Jinja template instead of the folder's.
            max_length: see ``tq_onnx.Engine``.
            alone: likewise.
            threads: likewise.

        Raises:
            SystemExit: there is no chat template.
        """
        self.name = name or folder.resolve().name
        self.engine = Engine(folder, max_length=max_length, alone=alone, threads=threads)
        self._made = int(time.time())
        self._tokenizer = og.Tokenizer(self.engine.model)
        self._template = chat_template.read_text(encoding="utf-8") if chat_template else None
        try:
            self._prompt([{"role": "user", "content": "hello"}])
        except RuntimeError as error:
            raise SystemExit(f"{NO_TEMPLATE} ({error})") from error

    def _prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        given = {} if self._template is None else {"template_str": self._template}
        text = self._tokenizer.apply_chat_template(
            json.dumps(messages), add_generation_prompt=True, **given
        )
        return [int(token) for token in np.asarray(self._tokenizer.encode(text)).reshape(-1)]

    def describe(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {"id": self.name, "object": "model", "created": self._made, "owned_by": "tq-onnx"}

    def begin(self, asked: ChatRequest) -> Answer:
        """Begin an answer.

        Raises:
            RequestError: a field asks for what there is not.
            EngineError: the Engine answers nothing any more.
        """
        if asked.model != self.name:
            raise RequestError(
                f"there is no model {asked.model!r}, but {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if len(asked.stops) > MOST_STOPS or not all(asked.stops):
            raise RequestError(f"stop takes {MOST_STOPS} texts at most, none empty", param="stop")
        batching = self.engine.batching
        if asked.seed is not None and asked.temperature != 0 and not batching.joins:
            raise RequestError(
                "onnxruntime-genai's Engine takes no seed for a request in static batches: ask for "
                "temperature 0, leave the seed out, or serve a folder converted with --paged",
                param="seed",
            )
        try:
            prompt = self._prompt([message.for_template() for message in asked.messages])
        except RuntimeError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        try:
            return Answer(self.engine, self._tokenizer, asked, prompt)
        except UsageError as error:
            raise RequestError(
                str(error), param="messages", code="context_length_exceeded"
            ) from error


def document(chat: Chat, kind: str, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return a completion, or a chunk of one, without its id."""
    choices = [] if choice is None else [{"index": 0, "logprobs": None, **choice}]
    made = int(time.time())
    return {"object": kind, "created": made, "model": chat.name, "choices": choices, **more}


async def whole(chat: Chat, answer: Answer, ident: str) -> dict[str, Any]:
    """Return a completion once it is complete."""
    pieces = [piece async for piece in answer]
    message = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
    choice = {"message": message, "finish_reason": pieces[-1].finish}
    return {"id": ident, **document(chat, "chat.completion", choice, usage=answer.usage)}


async def streamed(
    chat: Chat, answer: Answer, pieces: AsyncIterator[Piece], ident: str, usage: bool
) -> AsyncIterator[str]:
    """Return server-sent events: a chunk for every piece of text, and an end."""

    def event(choice: dict[str, Any] | None, **more: Any) -> str:
        chunk = {"id": ident, **document(chat, "chat.completion.chunk", choice, **more)}
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    try:
        async for piece in pieces:
            delta = {"content": piece.text} if piece.text else {}
            yield event({"delta": delta, "finish_reason": piece.finish})
    except (UsageError, EngineError) as error:
        # The status was sent long ago. No [DONE] follows, and clients raise the error.
        yield f"data: {json.dumps(failure(str(error), 'server_error'))}\n\n"
        return
    if usage:
        yield event(None, usage=answer.usage)
    yield "data: [DONE]\n\n"


def failure(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def first_of(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Wait for the first piece, so that what fails before it has a status of its own."""
    first = await anext(pieces)

    async def all_of() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    return all_of()


def make_app(chat: Chat) -> FastAPI:
    """Make the application that serves a model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        chat.engine.close()

    app = FastAPI(title="tq-onnx", lifespan=lifespan)

    @app.exception_handler(RequestError)
    def refused(_: Request, error: RequestError) -> JSONResponse:
        content = failure(str(error), "invalid_request_error", error.param, error.code)
        return JSONResponse(content, error.status)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        place = ".".join(str(part) for part in found["loc"] if part != "body") or None
        message = f"{place}: {found['msg']}" if place else found["msg"]
        return JSONResponse(failure(message, "invalid_request_error", place), 400)

    @app.exception_handler(HTTPException)
    def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(failure(error.detail, "invalid_request_error"), error.status_code)

    @app.exception_handler(UsageError)
    def not_taken(_: Request, error: UsageError) -> JSONResponse:
        return JSONResponse(failure(str(error), "invalid_request_error"), 400)

    @app.exception_handler(EngineError)
    def broken(_: Request, error: EngineError) -> JSONResponse:
        return JSONResponse(failure(str(error), "server_error"), 503)

    @app.get("/health")
    def health() -> dict[str, Any]:
        if chat.engine.broken is not None:
            raise chat.engine.broken
        batches = chat.engine.batching.reason or "yes"
        return {"status": "ok", "batches": batches, "process": os.getpid()}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [chat.describe()]}

    @app.post("/v1/chat/completions", response_model=None)
    async def complete(asked: ChatRequest) -> dict[str, Any] | StreamingResponse:
        ident = f"chatcmpl-{uuid.uuid4().hex}"
        answer = chat.begin(asked)
        if not asked.stream:
            return await whole(chat, answer, ident)
        pieces = await first_of(aiter(answer))
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(
            streamed(chat, answer, pieces, ident, usage), media_type="text/event-stream"
        )

    return app


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``Chat``."""
    parser.add_argument("folder", type=genai_folder, help="of onnxruntime-genai, converted")
    parser.add_argument("--name", help="by which clients ask for the model (default: the folder's)")
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the folder's"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its answer (default: the configuration's max_length)",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="compute one request at a time; a text then never depends on what else is asked",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of ONNX Runtime (default: all cores)"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="likewise (default: 8000)")
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    chat = Chat(**given)
    if chat.engine.batching.reason:
        print(chat.engine.batching.reason, file=sys.stderr)
    uvicorn.run(make_app(chat), host=host, port=port, log_level="info")


if __name__ == "__main__":
    main()
