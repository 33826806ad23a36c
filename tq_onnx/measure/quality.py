"""How much a conversion changes what a model says: perplexity, KL divergence, agreement.

Two decoders read the same tokens in windows; their logits are compared chunk by chunk and then
forgotten, so that memory does not grow with the text. Where many models are compared with one
original, its logits are recorded instead; see ``tq_onnx.measure.recording``.

    perplexity = exp(mean of -log p(next token))
    KL         = sum_i p_i (log p_i - log q_i), p the original's distribution, q the converted one's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel

MIN_TOKENS: Final = 16
"""Tokens of the shortest text that is compared."""

# Logits of one chunk: at most this many numbers per model.
_CHUNK_LOGITS: Final = 1 << 23
_LONGEST_CHUNK: Final = 256

Ids = npt.NDArray[np.int64]
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
        perplexity_change: relative change of the perplexity; 0.01 is one percent worse.
        perplexity_change_error: its standard error, taking the positions for independent.
        kl_mean: mean KL divergence in nats.
        kl_error: standard error of the mean, taking the positions for independent.
        kl_p99: 99th percentile of the KL divergence.
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
    perplexity_change: float
    perplexity_change_error: float
    kl_mean: float
    kl_error: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    logit_max_difference: float
    logit_relative_error: float
    logit_rms_difference: float


def text_of(original: OpenModel, tokens: Sequence[int] | npt.NDArray[np.int64] | int) -> Ids:
    """Return the ids ``[n]`` of a text that a model can read.

    Args:
        original: the model.
        tokens: ids of a text, or the number of pseudo-random ids to make, always the same.

    Raises:
        UsageError: the text is too short, or has ids that the model does not know.
    """
    if isinstance(tokens, int):
        tokens = np.random.default_rng(0).integers(0, original.vocabulary, tokens)
    text = np.asarray(tokens, np.int64)
    if len(text) < MIN_TOKENS:
        raise UsageError(
            f"a text of {len(text)} tokens is too short", fix=f"give {MIN_TOKENS} or more"
        )
    original.refuse_tokens(text)
    return text


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


def blocks(tokens: int, context: int) -> list[Window]:
    """Windows side by side; of each, every prediction of a token inside it is scored.

    What is left behind the last whole window is not read; a text shorter than one is one window.

    Raises:
        UsageError: the text or a size is too small.
    """
    if tokens < 2:
        raise UsageError(f"a text of {tokens} tokens predicts nothing", fix="give a longer text")
    if context < 2:
        raise UsageError(f"windows of {context} tokens predict nothing")
    size = min(context, tokens)
    return [Window(start, start + size, start) for start in range(0, tokens - size + 1, size)]


def compare(
    original: Decoder,
    converted: Decoder,
    tokens: npt.ArrayLike,
    *,
    vocabulary: int,
    context: int = 512,
    stride: int = 256,
    on_progress: OnProgress | None = None,
) -> QualityFigures:
    """Reads a text with both models and compares their predictions.

    Args:
        original: batch 1, growing.
        converted: batch 1, growing.
        tokens: ids ``[n]``.
        vocabulary: number of token ids, which bounds the chunks.
        context: tokens per window.
        stride: tokens by which windows advance.
        on_progress: called as windows are read.

    Raises:
        UsageError: the text is too short.
    """
    text = np.asarray(tokens, np.int64)
    todo = windows(len(text), context, stride)
    sums = Sums()
    for done, window in enumerate(todo):
        for (own, other), following in read((original, converted), text, window, vocabulary):
            sums.add(own, other, following)
        if on_progress is not None:
            on_progress(Progress("Reading the text with both models", done + 1, len(todo)))
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
        for (logits,), following in read((decoder,), text, window, vocabulary):
            loss -= float(_picked(log_softmax(logits), following).sum())
            count += len(following)
    return float(np.exp(loss / count))


def read(
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


class Sums:
    """Running sums of everything in ``QualityFigures``, and two numbers of each position."""

    def __init__(self) -> None:
        self._kl: list[npt.NDArray[np.float64]] = []
        self._gain: list[npt.NDArray[np.float64]] = []
        self._loss = 0.0
        self._values = 0
        self._agreed = 0
        self._largest = 0.0
        self._difference = 0.0
        self._energy = 0.0

    def add(self, own: Floats, other: Floats, following: npt.NDArray[np.int64]) -> None:
        """Counts the logits ``[n, vocabulary]`` of both models and the ids ``[n]`` that came."""
        p, q = log_softmax(own), log_softmax(other)
        self._kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        own_loss = -_picked(p, following)
        self._gain.append(-_picked(q, following) - own_loss)
        self._loss += float(own_loss.sum())
        self._values += own.size
        self._agreed += int((own.argmax(axis=-1) == other.argmax(axis=-1)).sum())
        self._largest = max(
            self._largest, float(np.abs(own.astype(np.float64) - other.astype(np.float64)).max())
        )
        # A constant added to all logits changes no probability, so it counts in neither sum.
        p -= p.mean(axis=-1, keepdims=True)
        q -= q.mean(axis=-1, keepdims=True)
        self._difference += float(((p - q) ** 2).sum())
        self._energy += float((p**2).sum())

    def figures(self, context: int, stride: int) -> QualityFigures:
        """What was counted, for windows of ``context`` tokens that advance by ``stride``."""
        kl, gain = np.concatenate(self._kl), np.concatenate(self._gain)
        count = len(kl)
        change = float(np.exp(gain.mean()))
        own = float(np.exp(self._loss / count))
        return QualityFigures(
            context=context,
            stride=stride,
            positions=count,
            original_perplexity=own,
            converted_perplexity=own * change,
            perplexity_change=change - 1,
            perplexity_change_error=change * float(gain.std()) / float(np.sqrt(count)),
            kl_mean=float(kl.mean()),
            kl_error=float(kl.std() / np.sqrt(count)),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            top1_agreement=self._agreed / count,
            logit_max_difference=self._largest,
            logit_relative_error=float(np.sqrt(self._difference / max(self._energy, 1e-300))),
            logit_rms_difference=float(np.sqrt(self._difference / self._values)),
        )
