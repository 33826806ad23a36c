"""Guess the next tokens of a text from what followed the same tokens before.

An engine checks guesses in one pass and keeps those that it would have chosen, so that a text which
repeats itself, or its prompt, takes fewer passes. Guesses that fail cost time. So a request whose
guesses fail makes none until its text has followed an earlier part for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_WIDTH: Final = 3
"""Tokens that have to be the same."""


class Drafts:
    """The tokens of a request, and which earlier part of them they follow."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """Read the prompt; see the class for arguments."""
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._source = 0  # of the token that is expected next; 0 for none
        self._followed = 0  # tokens that were the same as in front of the source
        self._needed = _WIDTH
        self._count = 0  # of tokens that were proposed last
        for token in prompt:
            self._append(token)
        self._prompt_tokens = len(self._tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens behind the prompt."""
        return len(self._tokens) - self._prompt_tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a pass: those proposed as far as they were right, and the next."""
        if self._count:
            # Double what is needed after a failure; a success halves it.
            right = len(tokens) - 1
            self._needed = (
                max(self._needed // 2, _WIDTH) if 2 * right >= self._count else 2 * self._needed
            )
            self._count = 0
        for token in tokens:
            self._append(token)

    def propose(self, most: int) -> list[int]:
        """Return tokens that may follow: more of them the longer the text has followed a part."""
        if not self._source or self._followed < self._needed:
            return []
        size = min(most, self._followed // 2 + 1)
        # A part that ends where the text ends goes on as it began.
        period = len(self._tokens) - self._source
        guess = [self._tokens[self._source + index % period] for index in range(size)]
        self._count = size
        return guess

    def _append(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        end = len(tokens)
        key = tuple(tokens[-_WIDTH:])
        if self._source and tokens[self._source] == token:
            self._source += 1
            self._followed += 1
        else:
            self._source = self._ends.get(key, 0)
            self._followed = _WIDTH if self._source else 0
        if end >= _WIDTH:
            self._ends[key] = end
