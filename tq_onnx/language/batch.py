"""Several texts at once: one step of the model for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tq_onnx.language.call import Call
from tq_onnx.language.text import LENGTH, STOP, Completion, Seconds, Transcript, Usage
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE
from tq_onnx.runtime.sampling import Logits, Sampler


class _Row:
    """One text of a batch."""

    def __init__(self, call: Call, most: int) -> None:
        self.call = call
        self.most = most
        self.tokens: list[int] = []
        self.reason = "" if most else LENGTH
        self.sampler = Sampler(call.sampling, call.ids)
        self.said = Transcript(call.tokenizer, call.stops)

    def take(self, logits: Logits) -> None:
        """Choose the next token; a text that has ended takes none."""
        if self.reason:
            return
        token = self.sampler.choose(logits)
        if token in self.call.stop_ids:
            self.reason = STOP
            return
        self.tokens.append(token)
        self.said.take(token)
        if self.said.stopped:
            self.reason = STOP
        elif len(self.tokens) >= self.most:
            self.reason = LENGTH

    @property
    def last(self) -> int:
        """The token to feed next; any will do for a text that has ended."""
        return self.tokens[-1] if self.tokens else self.call.ids[-1]

    def completion(self, seconds: Seconds) -> Completion:
        self.said.rest()
        return Completion(
            text=self.said.text,
            tokens=tuple(self.tokens),
            finish_reason=self.reason,
            usage=Usage(len(self.call.ids), 0, len(self.tokens)),
            seconds=seconds,
        )


def generate_batch(decoder: Decoder, calls: Sequence[Call]) -> list[Completion]:
    """Continue prompts of any lengths, padded on the left.

    Args:
        decoder: with empty caches, of as many sequences, whose graph takes padding.
        calls: the prompts.
    """
    longest_call = max(calls, key=lambda call: len(call.ids))
    longest = len(longest_call.ids)
    tokens, mask = np.zeros((2, len(calls), longest), np.int64)
    for index, call in enumerate(calls):
        tokens[index, longest - len(call.ids) :] = call.ids
        mask[index, longest - len(call.ids) :] = 1
    # Padding takes room in the caches, too.
    spare = None if decoder.capacity is None else decoder.capacity - longest + 1
    rows = [
        _Row(
            call, min(call.most(decoder.capacity), call.max_new_tokens if spare is None else spare)
        )
        for call in calls
    ]
    started = time.perf_counter()
    logits = decoder.read(tokens, mask, most=PROMPT_PIECE)
    prefill, decode = time.perf_counter() - started, 0.0
    while True:
        for row, row_logits in zip(rows, logits, strict=True):
            row.take(row_logits)
        if all(row.reason for row in rows):
            break
        started = time.perf_counter()
        logits = decoder.step([row.last for row in rows])
        decode += time.perf_counter() - started
    return [row.completion(Seconds(prefill, decode)) for row in rows]
