"""Hold generated text: its pieces, the reason of its end, tokens and times.

Pieces are whole characters: bytes of a character that are not complete yet wait for the next
token. Where a stop string may have begun, the text waits until it is certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tq_onnx.errors import UsageError
from tq_onnx.integrations.huggingface import TextStream, Tokenizer
from tq_onnx.runtime import arguments

STOP: Final = "stop"
"""The text ended by itself, or at a stop string."""
LENGTH: Final = "length"
"""The text has all tokens that were asked for, or that the cache has room for."""


@dataclass(frozen=True)
class Piece:
    """Newly generated text, in whole characters.

    Attributes:
        text: whole characters; never a part of a stop string.
        tokens: ids since the piece before.
        finish_reason: ``stop`` or ``length`` in the last piece; None before.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens that a call took.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were in the cache, or on disk, and not computed again.
        completion_tokens: generated tokens, an end-of-text token not counted.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Seconds:
    """Time that a call took.

    Attributes:
        prefill: of the prompt.
        decode: of all later steps, without what the caller does between them.
    """

    prefill: float
    decode: float


@dataclass(frozen=True)
class Completion:
    """A generated text.

    Attributes:
        text: the text, up to a stop string.
        tokens: ids of the generated tokens, those of a stop string included.
        finish_reason: ``stop`` or ``length``.
        usage: numbers of tokens.
        seconds: times; in a batch, those of the whole batch.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    seconds: Seconds


class StopStrings:
    """Cuts a text where the first of some strings begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Note the strings; see the class for arguments and errors."""
        self._stops = stop_strings(stops)
        self._held = ""
        self.found = False
        """True once one of the strings was there."""

    def take(self, text: str) -> str:
        """Take more text, and return what is certain to be before any stop string."""
        if self.found:
            return ""
        held = self._held + text
        begins = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if begins:
            self.found, self._held = True, ""
            return held[: min(begins)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def stop_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """Return strings that may end a text; one may stand for itself."""
    if not isinstance(stop, Iterable):
        raise UsageError(f"stop must be a list of texts, got type {type(stop).__name__}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for place, each in enumerate(strings):
        if not arguments.text(each, f"stop[{place}]"):
            raise UsageError(f"stop[{place}] is empty, and would end every text")
    return strings


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which a string begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


class Transcript:
    """The text of tokens that come one by one, up to a stop string.

    Attributes:
        text: what is certain so far.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        """Begin with no text; see the class for arguments."""
        self._words = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopStrings(stops)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """True once a stop string was there."""
        return self._stops.found

    def take(self, token: int) -> str:
        """Take a token, and return the text that has become certain."""
        return self._said("" if self._words is None else self._stops.take(self._words.take(token)))

    def rest(self) -> str:
        """Return the text that waited, at the end."""
        if self._words is None:
            return ""
        return self._said(self._stops.take(self._words.rest()) + self._stops.rest())

    def _said(self, text: str) -> str:
        self._parts.append(text)
        return text
