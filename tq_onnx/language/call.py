"""One call of a model: a prompt, and what is asked of the text that continues it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from tq_onnx.errors import UsageError
from tq_onnx.integrations.huggingface import Tokenizer
from tq_onnx.language.cache import Cache
from tq_onnx.language.text import LENGTH, STOP, Completion, Piece, Seconds, Transcript, Usage
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import TokenStream
from tq_onnx.runtime.sampling import Sampling


@dataclass(frozen=True)
class Call:
    """A prompt, and how it is continued.

    Attributes:
        ids: tokens of the prompt, at least one.
        tokenizer: None for tokens without a text.
        max_new_tokens: tokens at most.
        sampling: the way to choose tokens.
        stops: strings that end the text.
    """

    ids: list[int]
    tokenizer: Tokenizer | None
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the text."""
        return self.tokenizer.eos_ids if self.tokenizer else ()

    def most(self, capacity: int | None) -> int:
        """Return the tokens that may be generated with a cache; the last one is not cached.

        Raises:
            UsageError: the prompt does not fit.
        """
        if capacity is None:
            return self.max_new_tokens
        if len(self.ids) > capacity:
            raise UsageError(
                f"the prompt has {len(self.ids)} tokens, and the cache holds {capacity}",
                fix="open the model with a larger context, or shorten the prompt",
            )
        return min(self.max_new_tokens, capacity - len(self.ids) + 1)

    def pieces(self, cache: Cache) -> Generator[Piece, None, Completion]:
        """Yield the text as soon as it is certain; return it whole."""
        with cache.in_use() as decoder:
            most = self.most(decoder.capacity)
            kept = _keep(cache, decoder, self.ids)
            tokens = TokenStream(
                decoder,
                self.ids[kept:],
                max_new_tokens=most,
                sampling=self.sampling,
                stop_ids=self.stop_ids,
                context=self.ids[:kept],
            )
            said = Transcript(self.tokenizer, self.stops)
            told = 0
            try:
                for token in tokens:
                    part = said.take(token)
                    if said.stopped:
                        break
                    if part or self.tokenizer is None:
                        yield Piece(part, tuple(tokens.tokens[told:]))
                        told = len(tokens.tokens)
            finally:
                cache.holds((*self.ids, *tokens.tokens))
        result = tokens.result
        reason = STOP if result.stopped or said.stopped else LENGTH
        yield Piece(said.rest(), tuple(result.tokens[told:]), reason)
        return Completion(
            text=said.text,
            tokens=result.tokens,
            finish_reason=reason,
            usage=Usage(len(self.ids), kept, len(result.tokens)),
            seconds=Seconds(result.prefill_seconds, result.decode_seconds),
        )

    def completion(self, cache: Cache) -> Completion:
        """Return the text."""
        running = self.pieces(cache)
        while True:
            try:
                next(running)
            except StopIteration as end:
                done: Completion = end.value
                return done


def _keep(cache: Cache, decoder: Decoder, ids: Sequence[int]) -> int:
    """Have a cache keep the tokens with which a prompt begins; return their number."""
    kept = cache.shared(ids)
    if kept < len(cache) and decoder.signature.interface.states:
        kept = 0  # recurrent layers cannot go back
    cache.holds(ids[:kept])
    decoder.rewind(kept)
    return kept
