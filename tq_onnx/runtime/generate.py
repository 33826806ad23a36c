"""Text generation as tokens: greedy or sampled, at once or token by token."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.sampling import Sampler, Sampling

PROMPT_PIECE: Final = 512
"""Tokens of a prompt per call: logits of a whole one take gigabytes, of this many as long as the
products of matrices are no faster for more."""


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and their speed."""

    tokens: tuple[int, ...]  #: new token ids; a stop id is not among them
    prompt_tokens: int
    stopped: bool  #: whether a stop id ended it
    prefill_seconds: float  #: time of the prompt
    decode_seconds: float  #: time of all later steps, without what the caller does between them
    cache_bytes: int  #: bytes of the cache buffers


class TokenStream(Iterator[int]):
    """Continues a prompt with a decoder of batch 1; yields token by token.

    A token is computed when it is asked for. The last one is not fed to the decoder.

    Args:
        stop_ids: tokens that end the text.
        text: the tokens that the decoder holds, and behind them the prompt; they count for the
            repetition penalty. Whatever the decoder reads is appended before it does. None for a
            prompt alone.

    Attributes:
        tokens: the new tokens so far; a stop id is not among them.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] = (),
        text: list[int] | None = None,
    ) -> None:
        """Look at the arguments; see the class."""
        if not len(prompt):
            raise UsageError("the prompt is empty", fix="give at least one token")
        if decoder.batch != 1:
            raise UsageError(f"generation takes a batch of 1, not {decoder.batch}")
        self.tokens: list[int] = []
        self._decoder = decoder
        self._prompt = prompt
        self._text = list(prompt) if text is None else text
        self._most = arguments.count(max_new_tokens, "max_new_tokens")
        self._sampler = Sampler(sampling or Sampling(), self._text)
        self._stop_ids = frozenset(stop_ids)
        self._stopped = False
        self._prefilled = False
        self._prefill_seconds = self._decode_seconds = 0.0

    def __next__(self) -> int:
        """Compute the next token."""
        if self._stopped or (self._prefilled and len(self.tokens) >= self._most):
            raise StopIteration
        started = time.perf_counter()
        if not self._prefilled:
            logits = self._decoder.read([self._prompt], most=PROMPT_PIECE)[0]
            self._prefill_seconds = time.perf_counter() - started
            self._prefilled = True
            if not self._most:
                raise StopIteration
            token = self._sampler.choose(logits)
        else:
            self._text.append(self.tokens[-1])
            token = self._sampler.choose(self._decoder.step(self.tokens[-1:])[0])
            self._decode_seconds += time.perf_counter() - started
        if token in self._stop_ids:
            self._stopped = True
            raise StopIteration
        self.tokens.append(token)
        return token

    @property
    def result(self) -> Generation:
        """The generation so far."""
        return Generation(
            tokens=tuple(self.tokens),
            prompt_tokens=len(self._prompt),
            stopped=self._stopped,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            cache_bytes=self._decoder.cache_bytes,
        )


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Generate as ``TokenStream`` does, all at once."""
    tokens = TokenStream(
        decoder,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
    )
    for _ in tokens:
        pass
    return tokens.result
