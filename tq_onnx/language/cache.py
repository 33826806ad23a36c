"""Caches that programs keep: rewound, forked, saved.

A ``Cache`` holds the tokens that a model has read, with their keys and values, for one text. It
belongs to one model, and has one user at a time: two threads that use it at once are told so, and
nothing is mixed. Whatever ends a call early, the cache holds the tokens that it says.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Final, Protocol

from tq_onnx.errors import UsageError
from tq_onnx.language.cachefile import Identity, write_cache
from tq_onnx.language.templates import Message
from tq_onnx.runtime import arguments
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.memory import free_memory
from tq_onnx.runtime.snapshot import Snapshot

MOST_FORKS: Final = 65_536
"""Copies that ``Cache.fork`` makes at most."""


class Owner(Protocol):
    """A ``LanguageModel``, as far as its caches need one."""

    @property
    def identity(self) -> Identity:
        """Digests that identify the model."""


class _User:
    """Lives as long as a call that uses a cache."""


def _nobody() -> None:
    """Refer to no user."""


@dataclass(eq=False)
class _Use:
    """One use of a cache; it is over when its user is gone."""

    user: Callable[[], _User | None]  #: gives the user, or None
    #: the use after it, as "use"; of several threads the first to note its own has it
    following: dict[str, _Use] = field(default_factory=dict)


class Cache:
    """The keys and values of one text; ``LanguageModel.new_cache`` makes an empty one.

    A cache belongs to the object that made it, and is computed by its session. Another object is
    another model, even if it has opened the same file: it may have other kernels, threads and
    context. ``save`` and ``LanguageModel.load_cache`` bring a cache from one to the other.

    Args:
        decoder: of batch size 1, used by this cache only.
        model: that the cache belongs to.
        tokens: ids of the tokens that the decoder holds.
    """

    def __init__(self, decoder: Decoder, model: Owner, tokens: Sequence[int] = ()) -> None:
        """Take over a decoder; see the class for arguments."""
        self._model = model
        # Replaced together. The text may be longer than what the decoder has read of it.
        self._held = decoder, list(tokens)
        self._use = _Use(_nobody)

    def __len__(self) -> int:
        return self.decoder.length

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the tokens in the cache."""
        decoder, text = self._held
        return tuple(text[: decoder.length])

    @property
    def decoder(self) -> Decoder:
        """The decoder of the cache."""
        return self._held[0]

    @property
    def text(self) -> list[int]:
        """The tokens that the decoder holds, and those that it reads next.

        Who has the cache in use appends to it before the decoder reads.
        """
        return self._held[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache buffers as they are now."""
        return self.decoder.cache_bytes

    @property
    def capacity(self) -> int | None:
        """Capacity in tokens; None if the cache grows."""
        return self.decoder.capacity

    def rewind(self, tokens: int) -> None:
        """Forget all but the first tokens.

        Of the exact tokens of a window, those that were overwritten since are read by their codes.

        Args:
            tokens: how many are kept.

        Raises:
            UsageError: the number is none, the cache has fewer, or it is in use.
            UnsupportedModelError: the model has recurrent layers, which cannot go back.
        """
        count = arguments.count(tokens, "tokens")
        with self.in_use() as decoder:
            decoder.rewind(count)

    def fork(self, count: int) -> list[Cache]:
        """Copy the cache, so that several texts can continue from it.

        Args:
            count: how many copies; this cache stays as it is.

        Raises:
            UsageError: the count is below 1, there is no memory for so many, or the cache is in
                use.
        """
        copies = arguments.count(count, "count", least=1, most=MOST_FORKS)
        with self.in_use() as decoder:
            free = free_memory()
            if free is not None and copies * self.nbytes > free:
                raise UsageError(
                    f"{copies} copies of {self.nbytes} bytes are more than the {free} that are free"
                )
            return [Cache(decoder.copy(), self._model, self.tokens) for _ in range(copies)]

    def save(self, path: str | PathLike[str], *, messages: Sequence[Message] = ()) -> None:
        """Write the tokens, their keys and values to a safetensors file.

        The file appears whole, or what was there stays. A file that is no cache is not replaced.

        Args:
            path: the file.
            messages: the turns of the conversation that the tokens are of, see ``Chat.save``; each
                has a ``role`` and a ``content``, which are texts.

        Raises:
            OutputExistsError: something that is no cache is there.
            ModelFileError: it cannot be written, or the model's files have changed.
            UsageError: the path or a message is none, the cache is empty, or it is in use.
        """
        file = arguments.path(path, "path")
        with self.in_use() as decoder:
            if not len(self):
                raise UsageError("an empty cache cannot be saved")
            write_cache(file, self.tokens, decoder.snapshot(), self._model.identity, messages)

    @contextmanager
    def in_use(self) -> Iterator[Decoder]:
        """Give the decoder to one caller at a time.

        Raises:
            UsageError: somebody does already.
        """
        # No lock, which an interrupt may leave locked: the cache is free when this frame is gone.
        user = _User()
        use, last = _Use(weakref.ref(user)), self._use
        while last is not use:
            if last.user() is not None:
                raise UsageError(
                    "the cache is in use by another call",
                    fix="close its stream, or give each text a cache of its own, by new_cache or "
                    "fork",
                )
            last = last.following.setdefault("use", use)
        self._use = use
        try:
            yield self.decoder
        finally:
            use.user = _nobody

    def refuse_other(self, model: Owner) -> None:
        """Refuse any model but the one that made the cache.

        Raises:
            UsageError: it is another one.
        """
        if self._model is not model:
            raise UsageError(
                "the cache belongs to another model",
                fix="make one by new_cache of this model, or save it and open it by load_cache",
            )

    def begin(self, tokens: Sequence[int]) -> int:
        """Keep the tokens that a prompt shares, and record the others, which are read next.

        One token of the prompt is always left to be read, for its logits.

        For the user of the cache only, like the methods below.

        Args:
            tokens: ids of the prompt.

        Returns:
            The number of tokens that are kept.
        """
        decoder, held = self.decoder, self.tokens
        most = min(len(held), len(tokens) - 1)
        prefix = next((at for at in range(most) if held[at] != tokens[at]), most)
        if prefix < len(self) and decoder.signature.interface.states:
            prefix = 0  # recurrent layers cannot go back
        decoder.rewind(prefix)
        self._held = decoder, list(tokens)
        return prefix

    def replace(self, held: Snapshot, tokens: Sequence[int]) -> None:
        """Replace the contents.

        Args:
            held: keys and values of the tokens, of batch 1.
            tokens: their ids.
        """
        decoder = copy.copy(self.decoder)
        decoder.restore(held)
        self._held = decoder, list(tokens)
