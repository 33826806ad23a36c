"""Answers: texts by one model that another one is fed token by token (teacher forcing).

A model that is fed the greedy text of its original prefers the same token at every step as long as
its own greedy text is the same one. So the first step at which it prefers another token is the
token at which the two greedy texts depart.

A step is a near-tie if the models prefer different tokens and the original gave its own hardly more
probability than the other: rounding alone might have turned that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.measure.divergence import Floats, call_tokens, log_softmax
from tq_onnx.measure.windows import Ids
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE

NEAR_TIE: Final = 0.1
"""Nats by which the original prefers its token to the other one, at most, in a near-tie."""

_LIKELY: Final = 8
"""Tokens of a step whose probabilities are kept."""


@dataclass(frozen=True, eq=False)
class Preferences:
    """What a model makes of each token of an answer.

    Attributes:
        answer: ids ``[n]``.
        losses: negative log probability of each, in nats, ``[n]``.
        likely: ids of the likeliest tokens in the place of each, ``[n, 8]``, the likeliest first.
        scores: their log probabilities, ``[n, 8]``.
    """

    answer: Ids
    losses: npt.NDArray[np.float64]
    likely: Ids
    scores: npt.NDArray[np.float64]

    @classmethod
    def of(cls, logits: Floats, answer: Ids | None = None) -> Preferences:
        """Read them from logits ``[n, vocabulary]``; None for the likeliest token as the answer."""
        scores = log_softmax(logits)
        top = np.argpartition(-scores, min(_LIKELY, scores.shape[1]) - 1, axis=1)[:, :_LIKELY]
        top[:, -1] = scores.argmax(axis=1)  # of equal ones the first, as greedy decoding takes it
        order = np.argsort(-np.take_along_axis(scores, top, 1)[:, ::-1], axis=1, kind="stable")
        likely = np.take_along_axis(top[:, ::-1], order, 1)
        answer = likely[:, 0] if answer is None else answer
        losses = -np.take_along_axis(scores, answer[:, None], 1)[:, 0]
        return cls(answer, losses, likely, np.take_along_axis(scores, likely, 1))

    @classmethod
    def joined(cls, parts: Sequence[Preferences]) -> Preferences:
        """Join those of pieces of an answer."""
        names = ("answer", "losses", "likely", "scores")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def is_greedy(self) -> bool:
        """True if the answer is the model's own greedy one."""
        return bool((self.likely[:, 0] == self.answer).all())


@dataclass(frozen=True, eq=False)
class Steps:
    """An original's preferences against those of another model on the same answer.

    Attributes:
        differs: whether the models prefer different tokens, ``[n]``.
        near: whether that is a near-tie, ``[n]``.
        rises: increase of the loss, in nats, ``[n]``.
    """

    differs: npt.NDArray[np.bool_]
    near: npt.NDArray[np.bool_]
    rises: npt.NDArray[np.float64]

    @classmethod
    def between(cls, original: Preferences, converted: Preferences) -> Steps:
        """Compare what two models prefer."""
        chosen = converted.likely[:, :1]
        scores = np.where(original.likely == chosen, original.scores, -np.inf).max(axis=1)
        differs = original.likely[:, 0] != chosen[:, 0]
        near = differs & (original.scores[:, 0] - scores <= NEAR_TIE)
        return cls(differs, near, converted.losses - original.losses)

    @property
    def first(self) -> int | None:
        """The first step at which the models prefer different tokens; None if there is none."""
        return int(self.differs.argmax()) if self.differs.any() else None

    @property
    def is_near(self) -> bool:
        """True if the first of those steps is a near-tie."""
        return self.first is not None and bool(self.near[self.first])


def forced(decoder: Decoder, lead: Ids, answer: Ids, vocabulary: int) -> Preferences:
    """Feed a lead and an answer behind what the caches hold.

    Args:
        decoder: batch 1.
        lead: ids ``[m]``, one or more.
        answer: ids ``[n]``; the last one is not fed.
        vocabulary: number of token ids, which bounds the calls.
    """
    fed = np.concatenate([lead, answer[:-1]])
    size = call_tokens(decoder, vocabulary)
    parts = []
    for start in range(0, len(fed), size):
        logits = decoder.prefill(fed[None, start : start + size])[0]
        first = max(len(lead) - 1 - start, 0)
        if first < len(logits):
            place = start + first - len(lead) + 1
            answered = answer[place : place + len(logits) - first]
            parts.append(Preferences.of(logits[first:], answered))
    return Preferences.joined(parts)


def written(
    decoder: Decoder,
    prompts: Ids,
    count: int,
    stops: Collection[int] = (),
    *,
    on_step: Callable[[int], None] | None = None,
) -> list[Preferences]:
    """Let a model write greedily behind prompts and what the caches hold.

    Args:
        decoder: of the batch of the prompts.
        prompts: ids ``[B, n]``.
        count: tokens to write, one or more.
        stops: ids that end a text of batch 1, and are its last.
        on_step: called with the number of tokens so far.
    """
    steps = [Preferences.of(decoder.read(prompts, most=PROMPT_PIECE))]
    while len(steps) < count and not (len(prompts) == 1 and int(steps[-1].answer[0]) in stops):
        steps.append(Preferences.of(decoder.step(steps[-1].answer)))
        if on_step is not None:
            on_step(len(steps))
    return [
        Preferences.joined([_row(step, index) for step in steps]) for index in range(len(prompts))
    ]


def _row(step: Preferences, index: int) -> Preferences:
    row = slice(index, index + 1)
    return Preferences(step.answer[row], step.losses[row], step.likely[row], step.scores[row])


def share_error(share: float, count: int) -> float:
    """Return the standard error of a share of independent trials.

    With two trials more, one of each result (Laplace): a share of 1 has an error, too.
    """
    likely = (share * count + 1) / (count + 2)
    return float(np.sqrt(likely * (1 - likely) / count))
