"""Several texts at once: one step of the model for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from tq_onnx.language.cache import Cache
from tq_onnx.language.call import Call
from tq_onnx.language.text import LENGTH, STOP, Completion, Seconds, Transcript, Usage
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE
from tq_onnx.runtime.sampling import Logits, Sampler
from tq_onnx.runtime.snapshot import Snapshot


class _Row:
    """One text of a batch."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.tokens: list[int] = []
        self.reason = "" if call.max_new_tokens else LENGTH
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
        elif len(self.tokens) >= self.call.max_new_tokens:
            self.reason = LENGTH

    @property
    def last(self) -> int:
        """The token to feed next; any will do for a text that has ended."""
        return self.tokens[-1] if self.tokens else self.call.ids[-1]

    def completion(self, seconds: Seconds, reused: int) -> Completion:
        self.said.rest()
        return Completion(
            text=self.said.text,
            tokens=tuple(self.tokens),
            finish_reason=self.reason,
            usage=Usage(len(self.call.ids), reused, len(self.tokens)),
            seconds=seconds,
        )


def generate_batch(
    decoder: Decoder, calls: Sequence[Call], caches: Sequence[Cache] | None = None
) -> list[Completion]:
    """Continue prompts of any lengths, padded on the left.

    Args:
        decoder: with empty caches, of as many sequences, whose graph takes padding. It has room for
            the longest prompt and the longest answer.
        calls: the prompts.
        caches: one for each prompt, in use by the caller and without an exact window; what they
            hold of it is not computed again, and afterwards they hold the text. Prompts read as
            many new tokens as the one with the most.
    """
    lengths = [len(call.ids) for call in calls]
    prefixes = [cache.shared(call.ids) for cache, call in zip(caches or (), calls, strict=False)]
    new = max(length - keep for length, keep in zip_longest(lengths, prefixes, fillvalue=0))
    prefixes = [max(length - new, 0) for length in lengths] if caches else [0] * len(calls)
    if any(prefixes):
        decoder.restore(_joined([cache.decoder.snapshot() for cache in caches or ()], prefixes))
    rows, seconds = _continued(decoder, calls, new)
    if caches is not None:
        joined, longest = decoder.snapshot(), max(lengths)
        for index, row in enumerate(rows):
            # The last token of a text was not read, and texts that ended read anything.
            text = [*row.call.ids, *row.tokens[:-1]]
            start = longest - lengths[index]
            caches[index].replace(_part(joined, index, slice(start, start + len(text))), text)
    return [row.completion(seconds, keep) for row, keep in zip(rows, prefixes, strict=True)]


def _continued(decoder: Decoder, calls: Sequence[Call], new: int) -> tuple[list[_Row], Seconds]:
    """Read the last ``new`` tokens of each prompt, and continue all of them."""
    tokens, mask = np.zeros((2, len(calls), new), np.int64)
    for index, call in enumerate(calls):
        suffix = call.ids[-new:]
        tokens[index, new - len(suffix) :] = suffix
        mask[index, new - len(suffix) :] = 1
    rows = [_Row(call) for call in calls]
    started = time.perf_counter()
    logits = decoder.read(tokens, mask, most=PROMPT_PIECE)
    prefill, decode = time.perf_counter() - started, 0.0
    while True:
        for row, row_logits in zip(rows, logits, strict=True):
            row.take(row_logits)
        if all(row.reason for row in rows):
            return rows, Seconds(prefill, decode)
        started = time.perf_counter()
        logits = decoder.step([row.last for row in rows])
        decode += time.perf_counter() - started


def _joined(held: Sequence[Snapshot], prefixes: Sequence[int]) -> Snapshot:
    """Put the first tokens of several texts beside each other, padded on the left."""
    longest = max(prefixes)
    mask = np.array([[slot >= longest - keep for slot in range(longest)] for keep in prefixes])
    planes = []
    for parts in zip(*(snapshot.planes for snapshot in held), strict=True):
        first = parts[0]
        plane = np.zeros((len(parts), first.shape[1], longest, first.shape[3]), first.dtype)
        for row, part, keep in zip(plane, parts, prefixes, strict=True):
            row[:, longest - keep :] = part[0, :, :keep]
        planes.append(plane)
    return Snapshot(tuple(planes), mask.astype(np.int64), {})


def _part(joined: Snapshot, index: int, slots: slice) -> Snapshot:
    """Return one text of several."""
    planes = tuple(plane[index : index + 1, :, slots] for plane in joined.planes)
    return Snapshot(planes, np.array(joined.mask[index : index + 1, slots]), {})
