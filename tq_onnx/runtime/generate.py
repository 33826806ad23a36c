"""Text generation as tokens: greedy or sampled, at once or token by token.

Sampling follows the usual order: logits / temperature, the ``top_k`` largest, softmax, one draw
from a seeded generator. The same seed gives the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.runtime.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Attributes:
        temperature: 0 for the most likely token always.
        top_k: candidates that are considered; 0 for all.
        seed: seed of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no draw can use."""
        if not np.isfinite(self.temperature) or self.temperature < 0:
            raise UsageError(f"a temperature of {self.temperature} is not 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top-k of {self.top_k} is not 0 or more")


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and their speed.

    Attributes:
        tokens: new token ids; a stop id is not among them.
        prompt_tokens: tokens of the prompt.
        stopped: whether a stop id ended it.
        prefill_seconds: time of the prompt.
        decode_seconds: time of all later steps, without what the caller does between them.
        steps: decode steps taken.
        cache_bytes: bytes of the cache buffers at the end; 0 before.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    stopped: bool
    prefill_seconds: float
    decode_seconds: float
    steps: int
    cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Decode steps per second; 0 if there were none."""
        return self.steps / self.decode_seconds if self.decode_seconds > 0 else 0.0


def stream(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[Generation]:
    """Continue a prompt with a decoder of batch 1, token by token.

    Args:
        decoder: holds the caches; tokens that it already holds stay in the context.
        prompt: token ids, at least one.
        max_new_tokens: upper limit of new tokens.
        sampling: greedy if None.
        stop_ids: tokens that end the text.

    Yields:
        The generation so far: after each new token, and once more at the end.

    Raises:
        UsageError: the prompt is empty, the batch is not 1, or the capacity is too small.
    """
    if not len(prompt):
        raise UsageError("the prompt is empty", fix="give at least one token")
    if decoder.batch != 1:
        raise UsageError(f"generation takes a batch of 1, not {decoder.batch}")
    if max_new_tokens < 0:
        raise UsageError(f"{max_new_tokens} new tokens cannot be generated")
    chosen = sampling or Sampling()
    draws = np.random.default_rng(chosen.seed)
    started = time.perf_counter()
    logits = decoder.prefill(np.asarray([prompt], np.int64))[0, -1]
    now = Generation((), len(prompt), False, time.perf_counter() - started, 0.0, 0, 0)
    while len(now.tokens) < max_new_tokens:
        token = choose(logits, chosen, draws)
        if token in stop_ids:
            now = replace(now, stopped=True)
            break
        now = replace(now, tokens=(*now.tokens, token))
        yield now
        if len(now.tokens) < max_new_tokens:
            started = time.perf_counter()
            logits = decoder.step([token])[0]
            seconds = now.decode_seconds + time.perf_counter() - started
            now = replace(now, decode_seconds=seconds, steps=now.steps + 1)
    yield replace(now, cache_bytes=decoder.cache_bytes)


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Generate as ``stream`` does, all at once."""
    *_, last = stream(
        decoder,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
    )
    return last


def choose(
    logits: npt.NDArray[np.floating[Any]], sampling: Sampling, draws: np.random.Generator
) -> int:
    """Return the next token from logits ``[vocabulary]``."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights = np.exp(scores - scores.max())
    return int(draws.choice(len(weights), p=weights / weights.sum()))
