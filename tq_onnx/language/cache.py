"""Caches that programs keep: rewound, forked, saved.

A ``Cache`` holds the tokens that a model has read, with their keys and values, for one text. It has
one owner: two threads that use it at the same time are told so, and nothing is mixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from tq_onnx.errors import UsageError
from tq_onnx.language.cachefile import Identity, write_cache
from tq_onnx.language.templates import Message
from tq_onnx.runtime.decoder import Decoder


class Cache:
    """The keys and values of one text; ``LanguageModel.new_cache`` makes an empty one.

    Args:
        decoder: of batch 1; nobody else uses it.
        identity: returns the digests of the model that it belongs to, once they are asked for.
        tokens: ids of the tokens that the decoder holds.
    """

    def __init__(
        self, decoder: Decoder, identity: Callable[[], Identity], tokens: Sequence[int] = ()
    ) -> None:
        """Take over a decoder; see the class for arguments."""
        self._decoder = decoder
        self._identity = identity
        self._tokens = list(tokens)
        self._owner = threading.Lock()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the tokens in the cache."""
        return tuple(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache buffers as they are now."""
        return self._decoder.cache_bytes

    @property
    def capacity(self) -> int | None:
        """Tokens that the cache holds at most; None if it grows."""
        return self._decoder.capacity

    def rewind(self, tokens: int) -> None:
        """Forget all but the first tokens.

        Of the exact tokens of a window, those that were overwritten since are read by their codes.

        Args:
            tokens: how many are kept.

        Raises:
            UsageError: the cache has fewer, or is in use.
            UnsupportedModelError: the model has recurrent layers, which cannot go back.
        """
        with self.in_use() as decoder:
            decoder.rewind(tokens)
            del self._tokens[tokens:]

    def fork(self, count: int) -> list[Cache]:
        """Copy the cache, so that texts can go on from here in several ways.

        Args:
            count: how many copies; this cache stays as it is.

        Raises:
            UsageError: the count is below 1, or the cache is in use.
        """
        if count < 1:
            raise UsageError(f"a cache cannot be forked {count} times")
        with self.in_use() as decoder:
            return [Cache(decoder.copy(), self._identity, self._tokens) for _ in range(count)]

    def save(self, path: str | PathLike[str], *, messages: Sequence[Message] = ()) -> None:
        """Write the tokens, their keys and values to a safetensors file.

        The file appears whole, or what was there stays. A file that is no cache is not replaced.

        Args:
            path: the file.
            messages: the turns of the conversation that the tokens are of, see ``Chat.save``.

        Raises:
            ModelFileError: it cannot be written.
            UsageError: the cache is empty, or in use.
        """
        with self.in_use() as decoder:
            if not self._tokens:
                raise UsageError("an empty cache cannot be saved")
            held = decoder.snapshot()
            write_cache(Path(path), self._tokens, held, self._identity(), messages)

    @contextmanager
    def in_use(self) -> Iterator[Decoder]:
        """Let one caller at a time use the decoder.

        Raises:
            UsageError: somebody does already.
        """
        if not self._owner.acquire(blocking=False):
            raise UsageError(
                "the cache is in use by another call",
                fix="give each text a cache of its own, by new_cache or fork",
            )
        try:
            yield self._decoder
        finally:
            self._owner.release()

    def shared(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens with which a prompt and the cache begin alike.

        One token of the prompt is always left to be read, for its logits.

        Args:
            tokens: ids of the prompt.
        """
        most = min(len(self._tokens), len(tokens) - 1)
        return next((at for at in range(most) if self._tokens[at] != tokens[at]), most)

    def holds(self, tokens: Sequence[int]) -> None:
        """Note what the decoder has read: the first of some tokens, as many as it holds."""
        self._tokens = list(tokens[: self._decoder.length])
