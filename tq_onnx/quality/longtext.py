"""A long text with needles and passages in it, and what a model finds of them at its end.

The text is that of ``report`` as far as the context goes. In its first part are two passages of
tokens in no order; in the rest, at even distances, needles: sentences with a name and a number.
After 25, 50 and 100 % of the context the caches are kept, and each needle and each passage that was
read is asked for on its own: by a question whose answer is the number, and by the first tokens of
the passage, whose others only copying predicts.

A small model may not find a needle itself. What counts is how far the answer of a conversion is
that of its original, and how much less likely it makes the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_onnx.integrations.huggingface import Tokenizer
from tq_onnx.measure.divergence import call_tokens
from tq_onnx.measure.windows import Ids
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.quality.answers import Preferences, Steps, forced, written
from tq_onnx.quality.copy_test import LEAD, CopyFigures, copy_figures
from tq_onnx.runtime.decoder import Decoder

SHARES: Final = (0.25, 0.5, 1.0)
"""Parts of the context at whose ends the model is asked."""

_NAMES: Final = (
    *("Amsterdam", "Budapest", "Cordoba", "Dublin", "Edinburgh", "Florence", "Geneva", "Helsinki"),
    *("Istanbul", "Jakarta", "Krakow", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
)
_NEEDLE: Final = "\nThe code of {} is {}.\n"
_QUESTION: Final = "\nThe code of {} is"
_BEGIN: Final = 16
"""Tokens in front of the first passage: exact first tokens would hold some of it."""
_PASSAGES: Final = 2
_PASSAGE: Final = 64
_SHORTEST: Final = 2 * LEAD


@dataclass(frozen=True)
class NeedleFigures:
    """Needles that were asked for after a part of the context.

    Attributes:
        context: tokens of the text up to the questions.
        needles: needles that were asked for.
        tokens: tokens of their right answers.
        original_right: needles that the original answers rightly.
        right: needles that this model answers rightly.
        same_answer: needles that this model answers as the original does, right or wrong.
        near_ties: other answers that depart at a near-tie, see ``tq_onnx.quality.answers``.
        original_loss: loss of the original on the right answers, in nats per token.
        rise: increase of that loss, in nats per token.
        rise_error: standard error of the rise, if tokens are independent.
    """

    context: int
    needles: int
    tokens: int
    original_right: int
    right: int
    same_answer: int
    near_ties: int
    original_loss: float
    rise: float
    rise_error: float


@dataclass(frozen=True, eq=False)
class _Probe:
    """A question after a stage: tokens that are fed, the answer, and the place of a passage."""

    stage: int
    lead: Ids
    answer: Ids
    passage: int | None = None


@dataclass(frozen=True, eq=False)
class _Reply:
    """The original's preferences on the right answer, and on its own where that is another."""

    right: Preferences
    written: Preferences


class LongText:
    """A long text that the original has read; other models are compared with it.

    Args:
        decoder: the original, batch 1, with room for the context.
        text: ids ``[n]``, repeated as often as needed.
        context: tokens that models read at most.
        words: the tokenizer; without it there are no needles.
        vocabulary: number of token ids, which bounds the calls.
        on_progress: called as parts of the text are read.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Ids,
        *,
        context: int,
        words: Tokenizer | None,
        vocabulary: int,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Lay the text out and read it; see the class for arguments."""
        self._vocabulary = vocabulary
        self._ids, self._ends, self._probes = _laid_out(text, context, words)
        self._replies: list[_Reply] = []
        self._first = np.zeros(len(self._ids))
        for probe, start in self._asked(decoder, "the original", on_progress, losses=True):
            right = forced(start, probe.lead, probe.answer, vocabulary)
            text_of_it = right
            if probe.passage is None and not right.is_greedy:
                again = self._again(decoder)
                text_of_it = written(again, probe.lead[None], len(probe.answer))[0]
            self._replies.append(_Reply(right, text_of_it))

    @property
    def has_needles(self) -> bool:
        """True if there is room for needles."""
        return any(probe.passage is None for probe in self._probes)

    @property
    def has_copies(self) -> bool:
        """True if there is room for copies."""
        return any(probe.passage is not None for probe in self._probes)

    def compare(
        self, decoder: Decoder, *, name: str, on_progress: OnProgress | None = None
    ) -> tuple[tuple[NeedleFigures, ...], tuple[CopyFigures, ...]]:
        """Read the text with another model; no figures of what there is no room for.

        Args:
            decoder: batch 1, with room for the context.
            name: name of the model, for progress.
            on_progress: called as parts of the text are read.
        """
        answers: list[tuple[_Probe, _Reply, Preferences, Steps]] = []
        for (probe, start), reply in zip(
            self._asked(decoder, name, on_progress), self._replies, strict=True
        ):
            right = forced(start, probe.lead, probe.answer, self._vocabulary)
            mine = right
            if reply.written is not reply.right:
                again = self._again(decoder)
                mine = forced(again, probe.lead, reply.written.answer, self._vocabulary)
            answers.append((probe, reply, right, Steps.between(reply.written, mine)))
        needles, copies = [], []
        for stage in range(len(SHARES)):
            replies = [answer for answer in answers if answer[0].stage == stage]
            numbers = [answer for answer in replies if answer[0].passage is None]
            passages = [answer for answer in replies if answer[0].passage is not None]
            if numbers:
                needles.append(_needle_figures(self._ends[stage], numbers))
            if passages:
                copies.append(self._copies(stage, passages))
        return tuple(needles), tuple(copies)

    def _asked(
        self, decoder: Decoder, name: str, on_progress: OnProgress | None, *, losses: bool = False
    ) -> Iterator[tuple[_Probe, Decoder]]:
        """Read the text; yield every probe with the decoder behind what it is asked after."""
        tell = on_progress or silent
        decoder.reset()
        size = call_tokens(decoder, self._vocabulary)
        begin = 0
        for stage, end in enumerate(self._ends):
            for start in range(begin, end, size):
                stop = min(start + size, end)
                logits = decoder.prefill(self._ids[None, start:stop])[0]
                if losses and start <= _BEGIN + _PASSAGES * _PASSAGE:
                    following = self._ids[start + 1 : stop + 1]
                    read = Preferences.of(logits[: len(following)], following)
                    self._first[start + 1 : stop + 1] = read.losses
            begin = end
            self._held = decoder.snapshot()
            for probe in self._probes:
                if probe.stage == stage:
                    yield probe, self._again(decoder)
            self._again(decoder)
            tell(Progress(f"Reading a long text with {name}", stage + 1, len(self._ends)))
        del self._held

    def _again(self, decoder: Decoder) -> Decoder:
        """Put the caches back to the end of what was read."""
        decoder.restore(self._held)
        return decoder

    def _copies(
        self, stage: int, answers: Sequence[tuple[_Probe, _Reply, Preferences, Steps]]
    ) -> CopyFigures:
        places = [probe.passage or 0 for probe, _, _, _ in answers]
        slices = [
            slice(place + len(probe.lead), place + len(probe.lead) + len(probe.answer))
            for place, (probe, _, _, _) in zip(places, answers, strict=True)
        ]
        return copy_figures(
            "random",
            self._ends[stage] - min(places),
            np.concatenate([self._first[place] for place in slices]),
            np.concatenate([reply.right.losses for _, reply, _, _ in answers]),
            np.concatenate([right.losses for _, _, right, _ in answers]),
        )


def _needle_figures(
    context: int, answers: Sequence[tuple[_Probe, _Reply, Preferences, Steps]]
) -> NeedleFigures:
    losses = np.concatenate([reply.right.losses for _, reply, _, _ in answers])
    rises = np.concatenate([right.losses for _, _, right, _ in answers]) - losses
    return NeedleFigures(
        context=context,
        needles=len(answers),
        tokens=len(losses),
        original_right=sum(reply.right.is_greedy for _, reply, _, _ in answers),
        right=sum(right.is_greedy for _, _, right, _ in answers),
        same_answer=sum(steps.first is None for _, _, _, steps in answers),
        near_ties=sum(steps.is_near for _, _, _, steps in answers),
        original_loss=float(losses.mean()),
        rise=float(rises.mean()),
        rise_error=float(rises.std() / np.sqrt(len(rises))),
    )


def _laid_out(
    text: Ids, context: int, words: Tokenizer | None
) -> tuple[Ids, list[int], list[_Probe]]:
    """Return the text, the ends of its parts, and what is asked after each."""
    rng = np.random.default_rng(0)
    needles = []
    for name in () if words is None else _NAMES:
        number = str(rng.integers(10_000, 100_000))
        needles.append(_tokens(words, name, number))
    passage = min(_PASSAGE, context // 16)
    passage = passage if passage >= _SHORTEST else 0
    margin = max([passage, *(len(lead) + len(answer) for _, lead, answer in needles)], default=0)
    ends = [int(context * share) - margin for share in SHARES]
    ids = np.resize(text, max(ends[-1], 0))
    first = _BEGIN + _PASSAGES * passage
    probes = []
    for index in range(_PASSAGES if passage else 0):
        place = _BEGIN + index * passage
        ids[place : place + passage] = rng.choice(np.unique(text), passage)
        lead, answer = np.split(ids[place : place + passage].copy(), [LEAD])
        probes += [_Probe(n, lead, answer, place) for n, end in enumerate(ends) if end > first]
    longest = max((len(needle) for needle, _, _ in needles), default=1)
    count = min(len(needles), max(ends[-1] - first, 0) // (2 * longest))
    for index, (needle, lead, answer) in enumerate(needles[:count]):
        slot = (ends[-1] - first) // count
        place = first + index * slot + (slot - len(needle)) // 2
        ids[place : place + len(needle)] = needle
        probes += [
            _Probe(n, lead, answer) for n, end in enumerate(ends) if end >= place + len(needle)
        ]
    return ids, [max(end, 0) for end in ends], probes


def _tokens(words: Tokenizer | None, name: str, number: str) -> tuple[list[int], Ids, Ids]:
    """Return the tokens of a needle, of its question and of its answer."""
    if words is None:
        return [], np.zeros(0, np.int64), np.zeros(0, np.int64)
    needle = words.encode(_NEEDLE.format(name, number), add_special_tokens=False)
    question = words.encode(_QUESTION.format(name), add_special_tokens=False)
    whole = words.encode(f"{_QUESTION.format(name)} {number}", add_special_tokens=False)
    begun = next(
        (n for n, pair in enumerate(zip(question, whole, strict=False)) if pair[0] != pair[1]),
        len(question),
    )
    return needle, np.asarray(whole[:begun], np.int64), np.asarray(whole[begun:], np.int64)
