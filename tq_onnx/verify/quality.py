"""How much a conversion changes what a model says: perplexity, KL divergence, agreement.

Two decoders read the same tokens in windows; their logits are compared chunk by chunk and then
forgotten, so that memory does not grow with the text.

    perplexity = exp(mean of -log p(next token))
    KL         = sum_i p_i (log p_i - log q_i), p the original's distribution, q the converted one's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.runtime.decoder import Decoder

# Logits of one chunk: at most this many numbers per model.
_CHUNK_LOGITS: Final = 1 << 23
_LONGEST_CHUNK: Final = 256

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Window:
    """One stretch of text that is read with empty caches.

    Attributes:
        start: its first token.
        stop: behind its last token.
        scored: the first position whose prediction counts; those before only give context.
    """

    start: int
    stop: int
    scored: int


@dataclass(frozen=True)
class QualityFigures:
    """Original against converted over all scored positions.

    Attributes:
        context: tokens per window.
        stride: tokens by which windows advance.
        positions: predictions that were compared.
        original_perplexity: of the original, on the next tokens of the text.
        converted_perplexity: of the converted model.
        kl_mean: mean KL divergence in nats.
        kl_max: largest KL divergence.
        top1_agreement: part of the positions where both models prefer the same token.
        logit_max_difference: largest absolute difference of a logit.
        logit_relative_error: RMS difference over RMS of the original's centred logits.
        logit_rms_difference: RMS difference of a logit, after both are centred.
    """

    context: int
    stride: int
    positions: int
    original_perplexity: float
    converted_perplexity: float
    kl_mean: float
    kl_max: float
    top1_agreement: float
    logit_max_difference: float
    logit_relative_error: float
    logit_rms_difference: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity; 0.01 is one percent worse."""
        return self.converted_perplexity / self.original_perplexity - 1


def windows(tokens: int, context: int, stride: int) -> list[Window]:
    """Windows over a text; every position but the first is scored exactly once.

    Raises:
        UsageError: the text or a size is too small.
    """
    if tokens < 2:
        raise UsageError(f"a text of {tokens} tokens predicts nothing", fix="give a longer text")
    if context < 2 or not 0 < stride < context:
        raise UsageError(f"windows of {context} tokens cannot advance by {stride}")
    found = [Window(0, min(context, tokens), 0)]
    while found[-1].stop < tokens:
        last = found[-1]
        stop = min(last.stop + stride, tokens)
        start = stop - context
        # The prediction made at position p is for p + 1; the last window's final one is still due.
        found.append(Window(start, stop, last.stop - 1))
    return found


def compare(
    original: Decoder,
    converted: Decoder,
    tokens: npt.ArrayLike,
    *,
    vocabulary: int,
    context: int = 512,
    stride: int = 256,
    on_progress: Callable[[int, int], None] | None = None,
) -> QualityFigures:
    """Reads a text with both models and compares their predictions.

    Args:
        original: batch 1, growing.
        converted: batch 1, growing.
        tokens: ids ``[n]``.
        vocabulary: number of token ids, which bounds the chunks.
        context: tokens per window.
        stride: tokens by which windows advance.
        on_progress: called with windows done and windows in all.

    Raises:
        UsageError: the text is too short.
    """
    text = np.asarray(tokens, np.int64)
    todo = windows(len(text), context, stride)
    sums = _Sums()
    for done, window in enumerate(todo):
        for (own, other), following in _read((original, converted), text, window, vocabulary):
            sums.add(own, other, following)
        if on_progress is not None:
            on_progress(done + 1, len(todo))
    return sums.figures(context, stride)


def perplexity(
    decoder: Decoder,
    tokens: npt.ArrayLike,
    *,
    vocabulary: int,
    context: int = 512,
    stride: int = 256,
) -> float:
    """Perplexity of one model on ids ``[n]``; the arguments are those of ``compare``."""
    text = np.asarray(tokens, np.int64)
    loss, count = 0.0, 0
    for window in windows(len(text), context, stride):
        for (logits,), following in _read((decoder,), text, window, vocabulary):
            loss -= float(_picked(log_softmax(logits), following).sum())
            count += len(following)
    return float(np.exp(loss / count))


def _read(
    decoders: Sequence[Decoder], text: npt.NDArray[np.int64], window: Window, vocabulary: int
) -> Iterator[tuple[list[Floats], npt.NDArray[np.int64]]]:
    """Yields each decoder's logits ``[n, vocabulary]`` and the ids ``[n]`` that they predict."""
    chunk = max(1, min(_LONGEST_CHUNK, _CHUNK_LOGITS // vocabulary))
    if any(decoder.signature.first_only for decoder in decoders):
        chunk = window.stop - window.start
    elif any(decoder.last_only for decoder in decoders):
        chunk = 1
    for decoder in decoders:
        decoder.reset()
    for start in range(window.start, window.stop, chunk):
        stop = min(start + chunk, window.stop)
        logits = [decoder.prefill(text[None, start:stop])[0] for decoder in decoders]
        first, last = max(window.scored, start), min(stop, window.stop - 1)
        if first < last:
            yield (
                [part[first - start : last - start] for part in logits],
                text[first + 1 : last + 1],
            )


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Log probabilities of logits ``[..., vocabulary]`` in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _picked(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    picked: npt.NDArray[np.float64] = np.take_along_axis(scores, ids[:, None], axis=1)[:, 0]
    return picked


class _Sums:
    """Running sums of everything in ``QualityFigures``."""

    def __init__(self) -> None:
        self.count = 0
        self.values = 0
        self.loss = [0.0, 0.0]
        self.kl = 0.0
        self.kl_max = 0.0
        self.agreed = 0
        self.largest = 0.0
        self.difference = 0.0
        self.energy = 0.0

    def add(self, own: Floats, other: Floats, following: npt.NDArray[np.int64]) -> None:
        p, q = log_softmax(own), log_softmax(other)
        kl = (np.exp(p) * (p - q)).sum(axis=-1)
        self.count += len(kl)
        self.values += own.size
        self.loss[0] -= float(_picked(p, following).sum())
        self.loss[1] -= float(_picked(q, following).sum())
        self.kl += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.agreed += int((own.argmax(axis=-1) == other.argmax(axis=-1)).sum())
        self.largest = max(
            self.largest, float(np.abs(own.astype(np.float64) - other.astype(np.float64)).max())
        )
        # A constant added to all logits changes no probability, so it counts in neither sum.
        p -= p.mean(axis=-1, keepdims=True)
        q -= q.mean(axis=-1, keepdims=True)
        self.difference += float(((p - q) ** 2).sum())
        self.energy += float((p**2).sum())

    def figures(self, context: int, stride: int) -> QualityFigures:
        return QualityFigures(
            context=context,
            stride=stride,
            positions=self.count,
            original_perplexity=float(np.exp(self.loss[0] / self.count)),
            converted_perplexity=float(np.exp(self.loss[1] / self.count)),
            kl_mean=self.kl / self.count,
            kl_max=self.kl_max,
            top1_agreement=self.agreed / self.count,
            logit_max_difference=self.largest,
            logit_relative_error=float(np.sqrt(self.difference / max(self.energy, 1e-300))),
            logit_rms_difference=float(np.sqrt(self.difference / self.values)),
        )
