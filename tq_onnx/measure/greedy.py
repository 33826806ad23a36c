"""Greedy continuations: where two models part, and whether the original was undecided there.

A greedy continuation is a chain of choices; the first one that falls differently decides all that
follow. So the first difference is judged by the original's own logits: by how much it preferred its
token over the other model's. A gap within the noise of the logits is a near-tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE

NEAR_TIE: Final = 4.0
"""A gap below this many RMS logit differences may well close: the difference of two logits has
sqrt(2) times their noise, and one in a few hundred draws goes beyond three times that."""

MAX_NEAR_TIE_GAP: Final = math.log(2)
"""However noisy a converted model is, a token twice as likely as the other is no tie."""


@dataclass(frozen=True)
class GreedyFigures:
    """The most likely continuation by each model.

    Attributes:
        prompt_tokens: tokens of the prompt.
        original: tokens of the original.
        converted: tokens of the converted model.
        first_difference: position of the first difference; None if there is none.
        gap: by how much the original preferred its own token there, in logits.
        noise: RMS difference of a logit between the models.
    """

    prompt_tokens: int
    original: tuple[int, ...]
    converted: tuple[int, ...]
    first_difference: int | None
    gap: float | None
    noise: float

    @property
    def near_tie(self) -> bool:
        """True if the original was undecided where the continuations part."""
        return self.gap is not None and self.gap <= min(NEAR_TIE * self.noise, MAX_NEAR_TIE_GAP)

    def __str__(self) -> str:
        """Return one line for a report."""
        count = len(self.original)
        if self.first_difference is None:
            return f"the same {count} tokens"
        tie = "a near-tie" if self.near_tie else "not a near-tie"
        return (
            f"the same {self.first_difference} of {count} tokens, then the original prefers its "
            f"own by {self.gap:.3f} logits ({tie}; logits differ by {self.noise:.3f} RMS)"
        )


def greedy_tokens(decoder: Decoder, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the most likely tokens after a prompt.

    Logits may be NaN, where ``generate`` would raise: the checks of ``verify`` say that.

    Args:
        count: number of tokens.
    """
    tokens: list[int] = []
    logits = decoder.read([prompt], most=PROMPT_PIECE)[0]
    while len(tokens) < count:
        tokens.append(int(np.argmax(logits)))
        if len(tokens) < count:
            logits = decoder.step(tokens[-1:])[0]
    return tuple(tokens)


def compare_greedy(
    decoder: Decoder,
    prompt: Sequence[int],
    original: Sequence[int],
    converted: Sequence[int],
    noise: float,
) -> GreedyFigures:
    """Find the first difference of two continuations and judge it."""
    pairs = zip(original, converted, strict=False)
    parted = next(
        (i for i, (token, converted_token) in enumerate(pairs) if token != converted_token), None
    )
    gap = None
    if parted is not None:
        context = np.asarray([*prompt, *original[:parted]], np.int64)
        logits = decoder.prefill(context[None])[0, -1].astype(np.float64)
        gap = float(logits[original[parted]] - logits[converted[parted]])
    return GreedyFigures(len(prompt), tuple(original), tuple(converted), parted, gap, noise)
