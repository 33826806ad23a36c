"""The change of a model's predictions by a conversion: perplexity, KL divergence, agreement.

Two decoders read the same tokens in windows; their logits are compared chunk by chunk and then
forgotten, so that memory does not grow with the text. Where many models are compared with one
original, its logits are recorded instead; see ``tq_onnx.quality.recording``.

    perplexity = exp(mean of -log p(next token))
    KL         = sum_i p_i (log p_i - log q_i), p the original's distribution, q the converted one's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.measure.windows import Ids, Window, windows
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.decoder import Decoder

STRETCH: Final = 1024
"""Positions of a window whose mean KL divergence is one number of ``kl_by_position``."""

# Logits of one chunk: at most this many numbers per model.
_CHUNK_LOGITS: Final = 1 << 23
_LONGEST_CHUNK: Final = 256

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class PositionFigures:
    """Original against converted at some positions of the windows.

    Attributes:
        start: the first position.
        positions: predictions that were compared.
        kl_mean: mean KL divergence in nats.
        kl_error: its standard error, if positions are independent.
        perplexity_change: relative change of the perplexity; 0.01 is one percent worse.
        perplexity_change_error: its standard error, likewise.
        top1_agreement: share of the positions where both models prefer the same token.
    """

    start: int
    positions: int
    kl_mean: float
    kl_error: float
    perplexity_change: float
    perplexity_change_error: float
    top1_agreement: float


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
        perplexity_change_error: its standard error, if positions are independent.
        kl_mean: mean KL divergence in nats.
        kl_error: standard error of the mean, if positions are independent.
        kl_p99: 99th percentile of the KL divergence.
        kl_p999: its 99.9th percentile.
        kl_max: largest KL divergence.
        kl_first_half: mean KL divergence in the first half of each window; None if nothing was
            scored there.
        kl_second_half: the same in the second half, whose caches are longer.
        kl_by_position: mean KL divergence of each 1,024 positions of the windows, the first ones
            first; None where nothing was scored.
        by_position: all figures of those positions, where something was scored.
        top1_agreement: share of the positions where both models prefer the same token.
        logit_max_difference: largest absolute difference of a logit.
        logit_relative_error: RMS difference divided by the RMS of the original's centred logits.
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
    kl_p999: float
    kl_max: float
    kl_first_half: float | None
    kl_second_half: float | None
    kl_by_position: tuple[float | None, ...]
    by_position: tuple[PositionFigures, ...]
    top1_agreement: float
    logit_max_difference: float
    logit_relative_error: float
    logit_rms_difference: float


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
    """Read a text with both models and compare their predictions.

    Args:
        tokens: ids ``[n]``.
        context: tokens per window.
        stride: tokens by which windows advance.
    """
    text = np.asarray(tokens, np.int64)
    sums = Sums()
    for (original_logits, converted_logits), following, positions in read(
        (original, converted), text, windows(len(text), context, stride), vocabulary, on_progress
    ):
        sums.add(original_logits, converted_logits, following, positions)
    return sums.figures(context, stride)


def perplexity(
    decoder: Decoder,
    tokens: npt.ArrayLike,
    *,
    vocabulary: int,
    context: int = 512,
    stride: int = 256,
) -> float:
    """Return the perplexity of one model on ids ``[n]``; the arguments are as for ``compare``."""
    text = np.asarray(tokens, np.int64)
    loss, count = 0.0, 0
    todo = windows(len(text), context, stride)
    for (logits,), following, _ in read((decoder,), text, todo, vocabulary):
        loss -= float(_picked(log_softmax(logits), following).sum())
        count += len(following)
    return float(np.exp(loss / count))


def read(
    decoders: Sequence[Decoder],
    text: Ids,
    todo: Sequence[Window],
    vocabulary: int,
    on_progress: OnProgress | None = None,
    *,
    doing: str = "Reading the text with both models",
) -> Iterator[tuple[list[Floats], Ids, Ids]]:
    """Read the windows of a text with decoders, and yield their predictions that are scored.

    Args:
        text: ids ``[n]``.

    Yields:
        Each decoder's logits ``[n, vocabulary]``, the ids ``[n]`` that they predict, and the
        positions ``[n]`` in the window that they predict them from.
    """
    for index, window in enumerate(todo):
        yield from _read_window(decoders, text, window, vocabulary)
        if on_progress is not None:
            on_progress(Progress(doing, index + 1, len(todo)))


def _read_window(
    decoders: Sequence[Decoder], text: Ids, window: Window, vocabulary: int
) -> Iterator[tuple[list[Floats], Ids, Ids]]:
    chunk = min(call_tokens(decoder, vocabulary) for decoder in decoders)
    if any(decoder.signature.first_only for decoder in decoders):
        chunk = window.stop - window.start
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
                np.arange(first, last) - window.start,
            )


def call_tokens(decoder: Decoder, vocabulary: int) -> int:
    """Return the tokens of a call that gives the logits of all of them, and not too many."""
    return 1 if decoder.last_only else max(1, min(_LONGEST_CHUNK, _CHUNK_LOGITS // vocabulary))


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Return the log probabilities of logits ``[..., vocabulary]`` in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _picked(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    picked: npt.NDArray[np.float64] = np.take_along_axis(scores, ids[:, None], axis=1)[:, 0]
    return picked


def _mean_error(values: npt.NDArray[np.float64]) -> float:
    return float(values.std() / np.sqrt(len(values)))


class Sums:
    """Sums of everything in ``QualityFigures``, and two numbers of each position."""

    def __init__(self) -> None:
        self._kl: list[npt.NDArray[np.float64]] = []
        self._gain: list[npt.NDArray[np.float64]] = []
        self._positions: list[Ids] = []
        self._loss = 0.0
        self._values = 0
        self._agreed: list[npt.NDArray[np.bool_]] = []
        self._largest = 0.0
        self._difference = 0.0
        self._energy = 0.0

    def add(
        self, original_logits: Floats, converted_logits: Floats, following: Ids, positions: Ids
    ) -> None:
        """Add predictions.

        Args:
            original_logits: the original's logits ``[n, vocabulary]``.
            following: the ids ``[n]`` that followed.
            positions: their positions ``[n]`` in the window, as ``read`` yields them.
        """
        self._positions.append(positions)
        p, q = log_softmax(original_logits), log_softmax(converted_logits)
        self._kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        own_loss = -_picked(p, following)
        self._gain.append(-_picked(q, following) - own_loss)
        self._loss += float(own_loss.sum())
        self._values += original_logits.size
        self._agreed.append(original_logits.argmax(axis=-1) == converted_logits.argmax(axis=-1))
        self._largest = max(
            self._largest,
            float(
                np.abs(
                    original_logits.astype(np.float64) - converted_logits.astype(np.float64)
                ).max()
            ),
        )
        # A constant added to all logits changes no probability, so it counts in neither sum.
        p -= p.mean(axis=-1, keepdims=True)
        q -= q.mean(axis=-1, keepdims=True)
        self._difference += float(((p - q) ** 2).sum())
        self._energy += float((p**2).sum())

    def figures(self, context: int, stride: int) -> QualityFigures:
        """Return the figures of windows of ``context`` tokens that advance by ``stride``."""
        kl, gain = np.concatenate(self._kl), np.concatenate(self._gain)
        agreed, positions = np.concatenate(self._agreed), np.concatenate(self._positions)
        early = positions < context // 2
        count = len(kl)
        change = float(np.exp(gain.mean()))
        original_perplexity = float(np.exp(self._loss / count))
        by_position = {
            stretch: PositionFigures(
                start=STRETCH * stretch,
                positions=int(inside.sum()),
                kl_mean=float(kl[inside].mean()),
                kl_error=_mean_error(kl[inside]),
                perplexity_change=float(np.expm1(gain[inside].mean())),
                perplexity_change_error=float(np.exp(gain[inside].mean()))
                * _mean_error(gain[inside]),
                top1_agreement=float(agreed[inside].mean()),
            )
            for stretch in map(int, np.unique(positions // STRETCH))
            for inside in (positions // STRETCH == stretch,)
        }
        return QualityFigures(
            context=context,
            stride=stride,
            positions=count,
            original_perplexity=original_perplexity,
            converted_perplexity=original_perplexity * change,
            perplexity_change=change - 1,
            perplexity_change_error=change * _mean_error(gain),
            kl_mean=float(kl.mean()),
            kl_error=_mean_error(kl),
            kl_p99=float(np.percentile(kl, 99)),
            kl_p999=float(np.percentile(kl, 99.9)),
            kl_max=float(kl.max()),
            kl_first_half=float(kl[early].mean()) if early.any() else None,
            kl_second_half=float(kl[~early].mean()) if not early.all() else None,
            kl_by_position=tuple(
                by_position[stretch].kl_mean if stretch in by_position else None
                for stretch in range(max(by_position) + 1)
            ),
            by_position=tuple(by_position.values()),
            top1_agreement=float(agreed.mean()),
            logit_max_difference=self._largest,
            logit_relative_error=float(np.sqrt(self._difference / max(self._energy, 1e-300))),
            logit_rms_difference=float(np.sqrt(self._difference / self._values)),
        )
