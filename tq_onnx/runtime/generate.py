"""Text generation as tokens: greedy or sampled, at once or token by token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.drafts import Drafts
from tq_onnx.runtime.guide import Guide
from tq_onnx.runtime.sampling import Logits, Sampler, Sampling

PROMPT_PIECE: Final = 512
"""Tokens of a prompt per call: logits of a whole one take gigabytes, of this many as long as the
products of matrices are no faster for more."""
_MOST_GUESSES: Final = 7
"""Of a step, as onnxruntime-genai has them."""


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and their speed.

    Attributes:
        tokens: new token ids; a stop id is not among them.
        prompt_tokens: tokens of the prompt.
        stopped: whether a stop id ended it.
        prefill_seconds: time of the prompt.
        decode_seconds: time of all later steps, without what the caller does between them.
        steps: decode steps taken; fewer than tokens if guesses were right.
        cache_bytes: bytes of the cache buffers.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    stopped: bool
    prefill_seconds: float
    decode_seconds: float
    steps: int
    cache_bytes: int


class TokenStream(Iterator[int]):
    """Continues a prompt with a decoder of batch 1; yields token by token.

    A token is computed when it is asked for. The last one is not fed to the decoder.

    With guesses, several tokens are checked in one call of the decoder, see ``Drafts``. Each is
    chosen from its own logits, so the choice does not depend on the guesses: they decide only how
    many calls it takes.

    Args:
        decoder: holds the caches; tokens that it already holds stay in the context.
        prompt: token ids, at least one.
        max_new_tokens: upper limit of new tokens.
        sampling: greedy if None.
        stop_ids: tokens that end the text.
        text: the tokens that the decoder holds, and behind them the prompt; they count for the
            repetition penalty. Whatever the decoder reads is appended before it does. None for a
            prompt alone.
        guesses: whether to guess tokens; the decoder is one that ``refuse_guesses`` accepts.
        guide: rules out tokens; it ends the text, too. None for any text.

    Attributes:
        tokens: the new tokens so far; a stop id is not among them.

    Raises:
        UsageError: the prompt is empty, the batch is not 1, or the capacity is too small.
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
        guesses: bool = False,
        guide: Guide | None = None,
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
        self._guide = guide
        self._drafts = Drafts(self._text) if guesses else None
        self._chosen: deque[int] = deque()  # all but the last are read
        self._stopped = False
        self._prefilled = False
        self._prefill_seconds = self._decode_seconds = 0.0
        self._steps = 0

    def __next__(self) -> int:
        """Return the next token; compute it unless the last call has."""
        if not self._chosen and not self._stopped:
            if not self._prefilled:
                self._read()
            elif len(self.tokens) < self._most:
                self._step()
        if not self._chosen:
            raise StopIteration
        token = self._chosen.popleft()
        self.tokens.append(token)
        return token

    def close(self) -> None:
        """Take from the decoder what it has read behind the tokens that were given out."""
        self._forget(len(self._chosen))
        self._chosen.clear()

    def _read(self) -> None:
        """Read the prompt, and choose the first token."""
        started = time.perf_counter()
        logits = self._decoder.read([self._prompt], most=PROMPT_PIECE)
        self._prefill_seconds = time.perf_counter() - started
        self._prefilled = True
        if self._most:
            self._choose(logits, [])

    def _step(self) -> None:
        """Read the last token and guesses of the next ones, and choose those that follow."""
        started = time.perf_counter()
        # A step gives one more token than guesses.
        room = min(_MOST_GUESSES, self._most - len(self.tokens) - 1)
        guesses = [] if self._drafts is None else self._drafts.propose(room)
        tokens = [self.tokens[-1], *guesses]
        self._text += tokens
        logits = self._decoder.prefill([tokens])[0]
        self._forget(len(guesses) - self._choose(logits, guesses))
        self._decode_seconds += time.perf_counter() - started
        self._steps += 1

    def _choose(self, logits: Logits, guesses: list[int]) -> int:
        """Choose tokens as long as they are the guesses; return how many guesses are right."""
        tokens = []
        for right, row in enumerate(logits):
            token = self._sampler.choose(row if self._guide is None else self._guide.masked(row))
            if token in self._stop_ids:
                self._stopped = True
                break
            tokens.append(token)
            if self._guide is not None:
                self._guide.take(token)
                self._stopped = self._guide.is_complete
                if self._stopped:
                    break
            if guesses[right : right + 1] != [token]:
                break
        if self._drafts is not None:
            self._drafts.take(tokens)
        self._chosen.extend(tokens)
        return right

    def _forget(self, count: int) -> None:
        """Take the last tokens from the decoder."""
        if count:
            self._decoder.rewind(self._decoder.length - count)
            del self._text[-count:]

    @property
    def result(self) -> Generation:
        """The generation so far."""
        return Generation(
            tokens=tuple(self.tokens),
            prompt_tokens=len(self._prompt),
            stopped=self._stopped,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            steps=self._steps,
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
