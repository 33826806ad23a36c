"""A conversation that keeps one cache: each turn computes its new tokens only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from os import PathLike
from typing import Protocol

from tq_onnx.errors import UsageError
from tq_onnx.language.cache import Cache
from tq_onnx.language.templates import Message, messages_of
from tq_onnx.language.text import Completion, Piece
from tq_onnx.runtime import arguments
from tq_onnx.runtime.sampling import Sampling


class Answering(Protocol):
    """A ``LanguageModel``, as far as a conversation needs one."""

    def generate(
        self,
        prompt: Sequence[Message],
        *,
        cache: Cache,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
    ) -> Completion:
        """Answer turns at once."""

    def stream(
        self,
        prompt: Sequence[Message],
        *,
        cache: Cache,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
    ) -> Generator[Piece, None, Completion]:
        """Answer turns piece by piece."""


class Chat:
    """A conversation with a model; ``LanguageModel.chat`` begins one.

    Args:
        model: the model; it has a chat template.
        system: the system message; empty for none.
        cache: that the conversation keeps.

    Attributes:
        messages: the turns so far; they may be changed, as long as each has a role and a content.
        cache: the tokens that the model has read.

    Raises:
        UsageError: ``system`` is no text.
    """

    def __init__(self, model: Answering, system: str, cache: Cache) -> None:
        """Begin a conversation; see the class for arguments and errors."""
        self._model = model
        self.cache = cache
        self.messages: list[Message] = []
        if arguments.text(system, "system"):
            self.messages.append({"role": "system", "content": system})

    def ask(
        self,
        text: str,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Answer a message; see ``LanguageModel.generate`` for arguments and errors."""
        turn = self._turn(text)
        completion = self._model.generate(
            turn,
            cache=self.cache,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
        )
        self.messages = [*turn, {"role": "assistant", "content": completion.text}]
        return completion

    def stream(
        self,
        text: str,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[Piece, None, None]:
        """Answer a message piece by piece.

        An answer that is left early counts as far as it was given.
        """
        turn = self._turn(text)
        answer: list[str] = []
        pieces = self._model.stream(
            turn,
            cache=self.cache,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
        )
        try:
            for piece in pieces:
                answer.append(piece.text)
                yield piece
        finally:
            pieces.close()
            if answer:
                self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the turns and the cache to a file; see ``Cache.save`` for its errors.

        ``LanguageModel.load_chat`` goes on with it.
        """
        self.cache.save(path, messages=self.messages)

    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and their answers.

        Raises:
            UsageError: there are not as many, or the cache is in use.
        """
        back = arguments.count(turns, "turns", least=1)
        messages = messages_of(self.messages)
        questions = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if back > len(questions):
            held = f"{len(questions)} turn{'' if len(questions) == 1 else 's'}"
            raise UsageError(f"{held} cannot go back by {back}")
        # The cache goes back by itself, to where the next prompt begins to differ.
        with self.cache.in_use():  # a stream would bring its turn back
            self.messages = messages[: questions[-back]]

    def _turn(self, text: str) -> list[Message]:
        """Return the turns with a question of the user."""
        question = {"role": "user", "content": arguments.text(text, "text")}
        return [*messages_of(self.messages), question]
