"""Requests that have ended and are kept, so that a prompt that goes on computes only what is new.

onnxruntime-genai's Engine keeps full pages of what it has read, see ``tq_onnx.runtime.prefixes``. A
request that goes on also has the rest of its last page, and needs no search for the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

IDLE_SECONDS: Final = 600
"""Until a conversation that does not go on is dropped: its pages could serve others."""


@dataclass(frozen=True)
class Conversation:
    """A request that may go on."""

    request: Any  #: of onnxruntime-genai; it holds its pages, and a place among those that run
    tokens: list[int]  #: that it has: its prompts and answers
    computed: int  #: those of them that are in its pages
    pages: int  #: of each cache that it holds
    end: float  #: when its last answer ended, by ``time.monotonic``

    def is_beginning_of(self, prompt: list[int]) -> bool:
        """Return True if a prompt has all of its tokens and more."""
        count = len(self.tokens)
        if count >= len(prompt) or prompt[count - 1] != self.tokens[-1]:
            return False
        return prompt[:count] == self.tokens


class Conversations:
    """The conversations of an Engine, those that ended last at the end."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: list[Conversation] = []

    def __len__(self) -> int:
        """Return their number."""
        return len(self._kept)

    @property
    def pages(self) -> int:
        """Pages of each cache that they hold."""
        return sum(conversation.pages for conversation in self._kept)

    def keep(self, conversation: Conversation) -> None:
        """Keep a conversation."""
        self._kept.append(conversation)

    def find(self, prompt: list[int]) -> Conversation | None:
        """Return the longest that a prompt goes on with; None if there is none."""
        fitting = [each for each in self._kept if each.is_beginning_of(prompt)]
        return max(fitting, key=lambda each: len(each.tokens), default=None)

    def take(self, conversation: Conversation) -> None:
        """Take a conversation out, which goes on or is dropped."""
        self._kept.remove(conversation)

    def oldest(self, spared: Conversation | None = None) -> Conversation | None:
        """Return the one that ended first, other than the one that is spared."""
        return next((each for each in self._kept if each is not spared), None)

    def expired(self) -> Iterator[Conversation]:
        """Yield those that have been idle for too long."""
        latest = time.monotonic() - IDLE_SECONDS
        yield from [each for each in self._kept if each.end < latest]
