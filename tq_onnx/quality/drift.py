"""Drift while generating: a model decodes, token by token, what its original has written.

The original continues passages of the text; its tokens are drawn from its own predictions, always
the same, since the likeliest ones alone soon go round in circles. The other model is then fed the
same tokens one by one, as decoding does it: each row is encoded alone and read from the cache ever
after. Errors that pile up while a text grows would show as a divergence that grows, and in the
tokens that both models prefer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_onnx.measure.divergence import Floats, log_softmax
from tq_onnx.measure.greedy import MAX_NEAR_TIE_GAP, NEAR_TIE
from tq_onnx.measure.windows import Ids, passages
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel

PROMPTS: Final = 4
PROMPT_TOKENS: Final = 128
NEW_TOKENS: Final = 128

MakeDecoder = Callable[[int], Decoder]
"""Returns an empty decoder of batch 1 whose caches have room for so many tokens."""


def decoding(model: OpenModel) -> MakeDecoder | None:
    """Return what makes decoders of a model, updated in place where its caches can be.

    None for a graph that does not go on token by token.
    """
    if model.signature.first_only or model.decoder().longest_call not in (None, 1):
        return None
    return lambda tokens: model.decoder(capacity=model.capacity_for(tokens, 0))


@dataclass(frozen=True)
class DriftFigures:
    """Predictions while decoding, against the original's.

    Attributes:
        prompts: passages that were continued.
        prompt_tokens: tokens of each.
        new_tokens: tokens that were decoded after each.
        kl_mean: mean KL divergence in nats.
        kl_error: its standard error, if positions are independent.
        kl_first_half: mean KL divergence in the first half of the new tokens.
        kl_second_half: the same in the second half.
        same_token: share of the steps where both models prefer the same token.
        near_ties: share of the steps where they prefer different tokens that are almost equally
            likely in the original; see ``tq_onnx.measure.greedy``.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    kl_mean: float
    kl_error: float
    kl_first_half: float
    kl_second_half: float
    same_token: float
    near_ties: float


class DriftTest:
    """Continuations by the original; keeps its logits of all steps in memory.

    Args:
        make: makes a decoder of the original.
        text: ids ``[n]``, whose passages are continued.
        room: tokens that the models take; None for any number.
        on_progress: called as passages are continued.
    """

    def __init__(
        self,
        make: MakeDecoder,
        text: Ids,
        *,
        room: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Let the original write; see the class for arguments."""
        most = len(text) if room is None else min(len(text), room)
        self._prompt = min(PROMPT_TOKENS, most // 2)
        self._new = min(NEW_TOKENS, most - self._prompt)
        self._prompts = passages(text, self._prompt, PROMPTS)
        rng = np.random.default_rng(0)
        tell = on_progress or silent
        decoder = make(self._prompt + self._new)
        self._tokens: list[Ids] = []
        self._logits: list[Floats] = []
        for index, prompt in enumerate(self._prompts):
            decoder.reset()
            logits = [decoder.prefill(prompt[None])[0, -1]]
            tokens: list[int] = []
            for _ in range(self._new - 1):
                tokens.append(int(rng.choice(len(logits[-1]), p=np.exp(log_softmax(logits[-1])))))
                logits.append(decoder.step([tokens[-1]])[0])
            self._tokens.append(np.asarray(tokens, np.int64))
            self._logits.append(np.stack(logits))
            tell(Progress("Generating with the original", index + 1, PROMPTS))

    def compare(
        self, make: MakeDecoder, *, name: str, on_progress: OnProgress | None = None
    ) -> DriftFigures:
        """Decode the same tokens with another model.

        Args:
            make: makes a decoder of the model.
            name: name of the model, for progress.
            on_progress: called as passages are continued.
        """
        tell = on_progress or silent
        decoder = make(self._prompt + self._new)
        logits = []
        for index, (prompt, tokens) in enumerate(zip(self._prompts, self._tokens, strict=True)):
            decoder.reset()
            rows = [decoder.prefill(prompt[None])[0, -1]]
            rows += [decoder.step([token])[0] for token in tokens]
            logits.append(np.stack(rows))
            tell(Progress(f"Decoding with {name}", index + 1, PROMPTS))
        return self._figures(np.stack(logits))

    def _figures(self, converted_logits: Floats) -> DriftFigures:
        """Compare logits ``[prompts, new tokens, vocabulary]``."""
        kl = np.zeros(converted_logits.shape[:2])
        gaps = np.zeros(converted_logits.shape[:2])
        difference = 0.0
        for index, original_logits in enumerate(self._logits):
            p, q = log_softmax(original_logits), log_softmax(converted_logits[index])
            kl[index] = (np.exp(p) * (p - q)).sum(axis=-1)
            chosen = converted_logits[index].argmax(axis=-1)[:, None]
            gaps[index] = p.max(axis=-1) - np.take_along_axis(p, chosen, axis=-1)[:, 0]
            p -= p.mean(axis=-1, keepdims=True)
            q -= q.mean(axis=-1, keepdims=True)
            difference += float(((p - q) ** 2).mean())
        noise = float(np.sqrt(difference / len(self._logits)))
        differs = gaps > 0
        undecided = differs & (gaps <= min(NEAR_TIE * noise, MAX_NEAR_TIE_GAP))
        half = (self._new + 1) // 2
        return DriftFigures(
            prompts=len(self._prompts),
            prompt_tokens=self._prompt,
            new_tokens=self._new,
            kl_mean=float(kl.mean()),
            kl_error=float(kl.std() / np.sqrt(kl.size)),
            kl_first_half=float(kl[:, :half].mean()),
            kl_second_half=float(kl[:, half:].mean()),
            same_token=float(1 - differs.mean()),
            near_ties=float(undecided.mean()),
        )
