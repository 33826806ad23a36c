"""Hold one call of a model: a prompt, and the options of its continuation."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from tq_onnx.integrations.huggingface import Tokenizer
from tq_onnx.language.cache import Cache
from tq_onnx.language.text import LENGTH, STOP, Completion, Piece, Seconds, Transcript, Usage
from tq_onnx.runtime.generate import TokenStream
from tq_onnx.runtime.sampling import Sampling


@dataclass(frozen=True)
class Call:
    """A prompt, and how it is continued."""

    ids: list[int]  #: tokens of the prompt, at least one
    tokenizer: Tokenizer | None  #: None for tokens without a text
    max_new_tokens: int  #: tokens at most, as many as a cache has room for
    sampling: Sampling  #: the way to choose tokens
    stops: tuple[str, ...]  #: strings that end the text
    #: reads the beginning of the prompt into a cache, given the ids and how many of them the cache
    #: has, and returns how many were not computed; None if nothing is kept on disk
    read: Callable[[Cache, list[int], int], int] | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the text."""
        return self.tokenizer.eos_ids if self.tokenizer else ()

    def stream(self, cache: Cache) -> Generator[Piece, None, Completion]:
        """Yield the text as soon as it is certain; return it whole."""
        with cache.in_use():
            last, completion = yield from self._pieces(cache)
        yield last
        return completion

    def completion(self, cache: Cache) -> Completion:
        """Return the text; the cache is in use by the caller."""
        running = self._pieces(cache)
        while True:
            try:
                next(running)
            except StopIteration as end:
                completion: Completion = end.value[1]
                return completion

    def _pieces(self, cache: Cache) -> Generator[Piece, None, tuple[Piece, Completion]]:
        """Yield the text but for its last piece; return that and the whole."""
        started = time.perf_counter()
        prefix = reused = cache.begin(self.ids)
        if self.read is not None:
            reused = self.read(cache, self.ids, prefix)
            prefix = len(cache)
        before = time.perf_counter() - started
        tokens = TokenStream(
            cache.decoder,
            self.ids[prefix:],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            text=cache.text,
        )
        said = Transcript(self.tokenizer, self.stops)
        sent = 0
        for token in tokens:
            part = said.take(token)
            if said.stopped:
                break
            if part or self.tokenizer is None:
                yield Piece(part, tuple(tokens.tokens[sent:]))
                sent = len(tokens.tokens)
        result = tokens.result
        reason = STOP if result.stopped or said.stopped else LENGTH
        last = Piece(said.rest(), tuple(result.tokens[sent:]), reason)
        return last, Completion(
            text=said.text,
            tokens=result.tokens,
            finish_reason=reason,
            usage=Usage(len(self.ids), reused, len(result.tokens)),
            seconds=Seconds(before + result.prefill_seconds, result.decode_seconds),
        )
