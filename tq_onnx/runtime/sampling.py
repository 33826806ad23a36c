"""The choice of the next token from logits: greedy, or drawn by a seeded generator.

A draw takes the usual order: repetition penalty, logits / temperature, the ``top_k`` most likely,
of those the fewest that hold ``top_p`` of the probability, of those the ones that are at least
``min_p`` times as likely as the most likely. The same seed gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.runtime import arguments

Logits = npt.NDArray[np.floating[Any]]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens: greedy by default, or sampling.

    Its numbers are those that float32 holds, too, so that no draw overflows.

    Attributes:
        temperature: 0 for the most likely token always.
        top_k: candidates that are considered; 0 for all.
        top_p: the share of the probability that candidates hold together; 1 for all.
        min_p: the least probability of a candidate, relative to the most likely; 0 for all.
        repetition_penalty: logits of tokens that were there before are divided by it where they
            are positive, and multiplied where they are not (Keskar et al., 2019); 1 for none.
        seed: seed of the draws, below 2^64.

    Raises:
        UsageError: a number is of another type, or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no draw can use."""
        checked = {
            "temperature": arguments.real(self.temperature, "temperature", least=0),
            "top_k": arguments.count(self.top_k, "top_k"),
            "top_p": arguments.real(self.top_p, "top_p", above=0, most=1),
            "min_p": arguments.real(self.min_p, "min_p", least=0, most=1),
            "repetition_penalty": arguments.real(
                self.repetition_penalty, "repetition_penalty", above=0
            ),
            "seed": arguments.seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


class Sampler:
    """Chooses the tokens of one text, one after the other.

    Args:
        seen: the tokens before; they count for the repetition penalty.
    """

    def __init__(self, sampling: Sampling, seen: Iterable[int] = ()) -> None:
        """Seed the draws; see the class for arguments."""
        self.sampling = sampling
        self._draws = np.random.default_rng(sampling.seed)
        self._seen = set(seen) if sampling.repetition_penalty != 1 else None

    def choose(self, logits: Logits) -> int:
        """Return the next token from logits ``[vocabulary]``, and remember it."""
        best = int(np.argmax(logits))  # the first NaN, where there is one
        if not np.isfinite(logits[best]):
            raise UnsupportedModelError(
                f"the logit of token {best} is {logits[best]}, so no token can be chosen",
                fix="see whether the model or its cache is damaged",
            )
        if self._seen is None and self.sampling.temperature == 0:
            return best
        scores = logits.astype(np.float64)
        if self._seen:
            known = np.fromiter(self._seen, np.int64)
            penalty = self.sampling.repetition_penalty
            scores[known] = np.where(
                scores[known] > 0, scores[known] / penalty, scores[known] * penalty
            )
        token = self._drawn(scores) if self.sampling.temperature else int(np.argmax(scores))
        if self._seen is not None:
            self._seen.add(token)
        return token

    def _drawn(self, scores: _Floats) -> int:
        weights = probabilities(scores, self.sampling)
        return int(self._draws.choice(len(weights), p=weights))


def probabilities(scores: _Floats, sampling: Sampling) -> _Floats:
    """Return the probability of every token to be drawn, ``[vocabulary]``."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p]] = 0
    if sampling.min_p:
        weights[weights < sampling.min_p * weights.max()] = 0
    result: _Floats = weights / weights.sum()
    return result
