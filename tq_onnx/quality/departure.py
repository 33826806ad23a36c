"""Departure: how far the greedy text of a conversion is that of its original.

The original continues passages of the text greedily. The other model is fed the same tokens, and
the first step at which it prefers another one is where its own greedy text departs; see
``tq_onnx.quality.answers``. Small models soon repeat themselves, and where they do so everything
agrees: ``loops_at`` says from where on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tq_onnx.measure.windows import Ids, passages
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.quality.answers import Preferences, Steps, forced, share_error, written
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel

PROMPT_TOKENS: Final = 128
NEW_TOKENS: Final = 1000

_LONGEST_LOOP: Final = 128


@dataclass(frozen=True)
class DepartureFigures:
    """Greedy texts against the original's.

    Attributes:
        prompts: passages that were continued.
        prompt_tokens: tokens of each.
        new_tokens: tokens that were written after each.
        departed: texts that are not the original's to the end.
        near_ties: those of them that depart at a near-tie.
        median: median of the tokens before the departure; a text that does not depart counts with
            all its tokens.
        same_token: share of all steps at which both models prefer the same token.
        same_token_error: its standard error, if steps are independent.
        near_tie_steps: share of all steps that are near-ties.
        new_steps: steps of all texts before the original only repeats itself.
        same_token_new: share of those steps at which both models prefer the same token.
        same_token_new_error: its standard error, likewise.
        loops_at: median of the tokens after which the original only repeats itself.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    departed: int
    near_ties: int
    median: float
    same_token: float
    same_token_error: float
    near_tie_steps: float
    new_steps: int
    same_token_new: float
    same_token_new_error: float
    loops_at: float


class DepartureTest:
    """Greedy texts by the original; other models are compared with it.

    Args:
        model: the original, which goes on token by token.
        text: ids ``[n]``, whose passages are continued.
        prompts: number of passages.
        room: tokens that the models take; None for any number.
        on_progress: called as texts are written.

    Attributes:
        tokens: tokens of a passage and its continuation.
    """

    def __init__(
        self,
        model: OpenModel,
        text: Ids,
        *,
        prompts: int,
        room: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Let the original write; see the class for arguments."""
        tell = on_progress or silent
        most = len(text) + NEW_TOKENS if room is None else room
        size = min(PROMPT_TOKENS, most // 2, len(text))
        count = min(NEW_TOKENS, most - size)
        self._vocabulary = model.vocabulary
        self._prompts = passages(text, size, prompts)
        self.tokens = size + count
        capacity = model.capacity_for(self.tokens, 0)
        decoder = model.decoder(capacity=capacity)
        # Steps of several texts together take hardly longer than those of one.
        together = prompts if decoder.rows is None else 1
        if together > 1:
            decoder = model.decoder(capacity=capacity, batch=together)
        self._texts: list[Preferences] = []
        step = partial(Progress, "Writing with the original", total=count)
        for begin in range(0, prompts, together):
            decoder.reset()
            batch = self._prompts[begin : begin + together]
            self._texts += written(decoder, batch, count, on_step=lambda n: tell(step(n)))

    def compare(
        self, decoder: Decoder, *, name: str, on_progress: OnProgress | None = None
    ) -> DepartureFigures:
        """Feed the texts to another model.

        Args:
            decoder: batch 1, with room for a passage and its continuation.
            name: name of the model, for progress.
            on_progress: called as texts are read.
        """
        tell = on_progress or silent
        steps = []
        for index, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True)):
            decoder.reset()
            converted = forced(decoder, prompt, text.answer, self._vocabulary)
            steps.append(Steps.between(text, converted))
            tell(Progress(f"Reading greedy texts with {name}", index + 1, len(self._prompts)))
        differs = np.stack([step.differs for step in steps])
        count = differs.shape[1]
        loops = np.asarray([loop_start(text.answer) for text in self._texts])
        new = differs[np.arange(count) < loops[:, None]]
        same_token, same_token_new = 1 - float(differs.mean()), 1 - float(new.mean())
        return DepartureFigures(
            prompts=len(steps),
            prompt_tokens=self._prompts.shape[1],
            new_tokens=count,
            departed=sum(step.first is not None for step in steps),
            near_ties=sum(step.is_near for step in steps),
            median=float(np.median([count if s.first is None else s.first for s in steps])),
            same_token=same_token,
            same_token_error=share_error(same_token, differs.size),
            near_tie_steps=float(np.mean([step.near for step in steps])),
            new_steps=new.size,
            same_token_new=same_token_new,
            same_token_new_error=share_error(same_token_new, new.size),
            loops_at=float(np.median(loops)),
        )


def loop_start(text: Ids) -> int:
    """Return the tokens after which a text only repeats itself, its length if it does not.

    A repetition has a period of 128 tokens at most, and its end is there three times or more.
    """
    best = len(text)
    for period in range(1, min(_LONGEST_LOOP, len(text) // 3) + 1):
        changes = np.flatnonzero(text[period:] != text[:-period])
        start = int(changes[-1]) + 1 if len(changes) else 0
        if len(text) - start >= 3 * period:
            best = min(best, start + period)
    return best
