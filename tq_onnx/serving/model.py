"""A model that is served: its name, its chat template, and the prompts of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import UsageError
from tq_onnx.language.engine import Engine
from tq_onnx.language.templates import find_template, read_template
from tq_onnx.serving.answers import Answers
from tq_onnx.serving.calls import described, instructions
from tq_onnx.serving.metrics import Record
from tq_onnx.serving.protocol import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    shown,
)

CHARACTERS: Final = 16
"""Of a prompt, for each token that the model takes: no language has tokens of so many."""


class ServedModel:
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
        max_batch_size: int | None = None,
        max_characters: int | None = None,
        alone: bool = False,
        threads: int | None = None,
        request_timeout: float | None = None,
    ) -> None:
        """Open a folder.

        Args:
            folder: of onnxruntime-genai.
            name: the folder's own by default.
            chat_template: a Jinja template instead of the folder's. Without any, the model
                completes texts, and takes no messages.
            warm: text files, each with a system prompt that is read before any request, or without
                a chat template with the beginning of prompts.
            max_length: see ``tq_onnx.Engine``.
            max_batch_size: likewise.
            max_characters: of a prompt; more are not made tokens of.
            alone: see ``tq_onnx.Engine``.
            threads: likewise.
            request_timeout: seconds until an answer has to be complete; None for no limit.

        Raises:
            TqOnnxError: the folder cannot be served.
        """
        self.name = name or folder.resolve().name
        self._template = (
            read_template(chat_template, folder) if chat_template else find_template(folder)
        )
        self._created = int(time.time())
        self._timeout = request_timeout
        self.engine = Engine(
            folder,
            max_length=max_length,
            alone=alone,
            threads=threads,
            max_batch_size=max_batch_size,
        )
        self._tokenizer = self.engine.tokenizer
        self._characters = max_characters or CHARACTERS * self.engine.batching.longest
        for path in warm:
            self._warm(path)

    @property
    def has_template(self) -> bool:
        """Whether the model takes messages."""
        return self._template is not None

    def _warm(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is no text file: {error}") from error
        if self._template is None:
            self.engine.warm(text)
            return
        # What the template writes in front of any message of a user.
        system = {"role": "system", "content": text}
        first, second = (
            self._tokenizer.encode(
                self._template.render([system, {"role": "user", "content": letter}]),
                add_special_tokens=False,
            )
            for letter in "ab"
        )
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        self.engine.warm([token for token, _ in pairs])

    def describe(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "tq-onnx",
            "max_model_len": self.engine.batching.longest,
        }

    async def begin(self, request: GenerationRequest, record: Record) -> Answers:
        """Begin to answer a request."""
        if request.model != self.name:
            raise RequestError(
                f"there is no model '{shown(request.model)}'; ask for {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        # Others are answered meanwhile.
        prompts = await asyncio.to_thread(self.prompts, request)
        if len(prompts) * (request.n or 1) > MOST_CHOICES:
            raise RequestError(
                f"n times the number of prompts is more than {MOST_CHOICES}; ask for fewer",
                param="n",
            )
        try:
            return Answers(self.engine, request, prompts, record, self._timeout)
        except UsageError as error:
            field = str(error).partition(" ")[0]
            if field in type(request).model_fields:
                raise RequestError(str(error), param=field) from error
            code = "context_length_exceeded" if all(prompts) else None
            raise RequestError(str(error), param=field_of_prompt(request), code=code) from error

    def prompts(self, request: GenerationRequest) -> list[list[int]]:
        """Return the token ids of each prompt of a request."""
        try:
            if isinstance(request, ChatRequest):
                return [self._encoded(self._text(request), request)]
            if not isinstance(request, CompletionRequest):
                raise TypeError(type(request).__name__)
            return [
                self._encoded(prompt, request) if isinstance(prompt, str) else prompt
                for prompt in request.prompts
            ]
        except UsageError as error:  # without the place of the template, which is private
            sentence = f"{error.what}; {error.fix}"
            raise RequestError(sentence, param=field_of_prompt(request)) from error

    def _encoded(self, text: str, request: GenerationRequest) -> list[int]:
        if len(text) > self._characters:
            raise RequestError(
                f"the prompt has {len(text):,} characters, and this server takes "
                f"{self._characters:,}; send less",
                param=field_of_prompt(request),
                code="context_length_exceeded",
            )
        # Templates write special tokens themselves.
        special = isinstance(request, CompletionRequest)
        return self._tokenizer.encode(text, add_special_tokens=special)

    def _text(self, request: ChatRequest) -> str:
        """Return the text of the messages and of what tools there are."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; ask for /v1/completions", param="messages"
            )
        messages = [message.for_template() for message in request.messages]
        tools = request.usable_tools
        if not tools or self._template.takes_tools:
            return self._template.render(messages, tools=described(tools) or None)
        texts = [instructions(tools)]
        if messages[0]["role"] == "system":
            texts.insert(0, messages.pop(0)["content"])
        system = {"role": "system", "content": "\n\n".join(texts)}
        return self._template.render([system, *messages])


def field_of_prompt(request: GenerationRequest) -> str:
    """Return the field that has the prompt."""
    return "prompt" if isinstance(request, CompletionRequest) else "messages"
