"""How answers are written: as one document, or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from tq_onnx.errors import TqOnnxError
from tq_onnx.serving.answers import Answers, Piece
from tq_onnx.serving.protocol import Document, RequestError, failure


class Form:
    """How the answer to a request is written."""

    prefix: ClassVar[str]  #: of its id
    kind: ClassVar[str]  #: of a whole answer
    chunk: ClassVar[str]  #: of a part of one
    #: what the stream of a choice begins with, if anything
    opening: ClassVar[dict[str, Any] | None] = None

    def __init__(self, model: str) -> None:
        """Begin an answer of a model."""
        self._model = model
        self._ident = f"{self.prefix}-{uuid.uuid4().hex}"

    def document(
        self, kind: str, choices: Sequence[dict[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """Return a completion, or a chunk of one."""
        entries = [{"logprobs": None, **choice} for choice in choices]
        names = {"id": self._ident, "object": kind, "model": self._model}
        return {**names, "created": int(time.time()), "choices": entries, **fields}

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


async def completed(answers: Answers, form: Form) -> Document:
    """Return a completion once it is complete."""
    pieces: list[list[Piece]] = [[] for _ in range(answers.count)]
    async for piece in answers:
        pieces[piece.index].append(piece)
    choices = []
    for index, parts in enumerate(pieces):
        text = "".join(part.text for part in parts)
        choice = form.whole(text, [call for part in parts for call in part.calls])
        choices.append({"index": index, **choice, "finish_reason": parts[-1].finish})
    return Document(form.document(form.kind, choices, usage=answers.usage))


async def streamed(
    answers: Answers, pieces: AsyncIterator[Piece], form: Form, *, with_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events: a chunk for every piece of text, and an end."""

    def event(*choices: dict[str, Any], **fields: Any) -> str:
        return f"data: {json.dumps(form.document(form.chunk, choices, **fields))}\n\n"

    if form.opening is not None:
        for index in range(answers.count):
            yield event({"index": index, **form.opening, "finish_reason": None})
    try:
        async for piece in pieces:
            yield event({"index": piece.index, **form.part(piece), "finish_reason": piece.finish})
    except (TqOnnxError, RequestError) as error:
        # The status was sent long ago. No [DONE] follows, and clients raise the error.
        status = error.status if isinstance(error, RequestError) else 503
        yield f"data: {json.dumps(failure(str(error), status))}\n\n"
        return
    if with_usage:
        yield event(usage=answers.usage)
    yield "data: [DONE]\n\n"


async def first_of(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Wait for the first piece, so that what fails before it has a status of its own."""
    first = await anext(pieces)

    async def all_of() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    return all_of()
