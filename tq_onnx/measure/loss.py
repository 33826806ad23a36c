"""The loss of a conversion on a text that needs no file, because the original writes it.

The predictions of both models are compared, and each layer with its inputs in the converted one:

- the noise of scores, scale (q . decoded k - q . k) in nats: its deviation under the weights of the
  query. What all keys of a query have in common changes no softmax, and keys that it hardly looks
  at change little;
- the error of attention by it and by decoded values, relative to the result.

Exact tokens hide both in a short text. So all rows are decoded but for those of sinks, which stay
exact however long the text is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import extremes, reference
from tq_onnx.errors import VerificationError
from tq_onnx.measure.divergence import QualityFigures, Sums, call_tokens
from tq_onnx.measure.probe import LayerNames, Probe
from tq_onnx.measure.reconstruction import decoded_rows
from tq_onnx.measure.windows import Ids
from tq_onnx.plan import ROLES
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.sampling import Sampler, Sampling

LOSS_TOKENS: Final = 256
"""Tokens of the text."""

_TEXTS: Final = 4
"""Texts that are written side by side: a step with several takes hardly longer than with one."""
_PREDICTIONS: Final = 16
"""Calls to graphs that give the logits of the last token of a call only."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Call = tuple[slice, Array]
"""The tokens of a call, and an original's logits of it."""


@dataclass(frozen=True)
class LayerLoss:
    """The loss of one layer.

    Attributes:
        layer: index of the layer.
        bits: bits per coordinate of its keys, and of its values.
        noise: deviation of the scores of a query under its weights, in nats, of the KV head where
            it is largest.
        attention_error: distance of the results of attention from the exact ones, over the length
            of these.
        extremes: keys and values that float16 cannot hold.
    """

    layer: int
    bits: tuple[int, int]
    noise: float
    attention_error: float
    extremes: tuple[extremes.Extremes, ...]


@dataclass(frozen=True)
class LossFigures:
    """The loss of a conversion on a short text.

    Attributes:
        source: where the text comes from.
        tokens: tokens of the text.
        predictions: original against converted.
        layers: each layer on its own.
    """

    source: str
    tokens: int
    predictions: QualityFigures
    layers: tuple[LayerLoss, ...]


def written_text(original: OpenModel, begin: int, tokens: int) -> Ids | None:
    """Let a model write, each token drawn from its own predictions, always the same.

    Args:
        begin: the first token of each of the texts that are written side by side.
        tokens: tokens of all texts together.

    Returns:
        Ids ``[n]``, one text behind the other; None if the graph takes no single tokens.
    """
    decoder = original.decoder()
    if original.signature.first_only or decoder.longest_call not in (None, 1):
        return None
    batch = _TEXTS if decoder.rows is None else decoder.rows
    texts: list[Ids] = []
    while len(texts) * batch < _TEXTS:
        decoder = original.decoder(batch=batch)
        seeds = range(len(texts) * batch, len(texts) * batch + batch)
        samplers = [Sampler(Sampling(temperature=1.0, seed=seed)) for seed in seeds]
        steps = [np.full(batch, begin, np.int64)]
        while len(steps) < -(-tokens // _TEXTS):
            logits = decoder.step(steps[-1])[:, : original.vocabulary]
            drawn = [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
            steps.append(np.array(drawn, np.int64))
        texts.append(np.stack(steps, axis=1).reshape(-1))
    return np.concatenate(texts)[:tokens]


def predict(original: OpenModel, text: Ids) -> list[Call]:
    """Read a text ``[n]`` with an original, in calls whose logits do not take too much memory.

    Tokens at the end that fill no call of a graph with calls of one length are left out.
    """
    decoder = original.decoder()
    size = max(1, len(text) // _PREDICTIONS)
    if original.signature.first_only:
        size = len(text)
    elif not decoder.last_only:
        size = call_tokens(decoder, original.vocabulary)
    longest = decoder.longest_call or 1
    calls = decoder.calls(len(text) // longest * longest, size)
    return [(call, decoder.prefill(text[None, call])[0]) for call in calls]


def measure_loss(
    probe: Probe,
    text: Ids,
    calls: Sequence[Call],
    *,
    source: str,
    library: bool,
    threads: int | None = None,
) -> LossFigures:
    """Read a text with a converted model, and compare it with its original.

    Args:
        text: ids ``[n]``.
    """
    decoder = probe.decoder(library=library, threads=threads)
    sums, watched = Sums(), []
    for call, expected in calls:
        logits = decoder.prefill(text[None, call])[0]
        if len(logits) < len(expected):
            raise VerificationError(
                f"a call with {call.stop - call.start} tokens gives the logits of {len(logits)}, "
                f"and the original's of {len(expected)}"
            )
        logits = logits[-len(expected) :]
        watched.append(decoder.watched)
        following = text[call.stop - len(logits) + 1 : call.stop + 1]
        count = len(following)
        if count:
            positions = np.arange(call.stop - len(logits), call.stop)[:count]
            sums.add(expected[:count], logits[:count], following, positions)
    tokens = calls[-1][0].stop
    layers = tuple(_loss(decoder, layer, watched) for layer in probe.layers)
    return LossFigures(source, tokens, sums.figures(tokens, tokens), layers)


def _loss(decoder: Decoder, layer: LayerNames, watched: Sequence[Mapping[str, Array]]) -> LayerLoss:
    names = [spec.pair.present for spec in decoder.signature.caches]
    sinks = 0 if decoder.signature.plan is None else decoder.signature.plan.sinks
    exact, coded, lossy = [], [], []
    for role, cache, cached in zip(ROLES, layer.caches, layer.plan.caches, strict=True):
        vectors = np.concatenate([seen[cache.vectors] for seen in watched], axis=2)
        lossy.append(extremes.of_vectors(vectors, layer=layer.plan.layer, cache=role))
        rows = decoder.cache(names.index(cached.present))
        decoded = decoded_rows(rows, cache, layer.plan.dtype)
        decoded += cache.offsets(vectors.shape, np.zeros(1, np.int64))
        window = min(sinks, vectors.shape[2] // 4)
        decoded[:, :, :window] = vectors[:, :, :window]
        exact.append(vectors[0].astype(np.float64))
        coded.append(decoded[0])
    noise, error = _attention_loss(layer, watched, exact, coded)
    bits = layer.key.codec.bits, layer.value.codec.bits
    return LayerLoss(layer.plan.layer, bits, noise, error, tuple(lossy))


def _attention_loss(
    layer: LayerNames,
    watched: Sequence[Mapping[str, Array]],
    exact: Sequence[Floats],
    coded: Sequence[Floats],
) -> tuple[float, float]:
    """Compare attention over exact and decoded keys and values ``[N, S, D]``, of later queries."""
    heads, total = exact[0].shape[:2]
    variances, squares, end = np.zeros(heads), np.zeros(2), total
    for seen in reversed(watched):
        query = seen[layer.query].astype(np.float64)
        positions = np.arange(end - query.shape[2], end)
        later = positions >= total // 2
        (keys, values), (decoded_keys, decoded_values) = (
            [part[:, None, :end] for part in side] for side in (exact, coded)
        )
        bias, hidden = _mask(layer, seen, query.shape[1], positions)
        before, after = (_scores(layer, query, bias, side) for side in (keys, decoded_keys))
        weights, coded_weights = (
            _softmax(np.where(hidden, -np.inf, scores), layer, seen)[:, :, later]
            for scores in (before, after)
        )
        noise = (after - before)[:, :, later]
        spread = (weights * noise**2).sum(axis=-1) - (weights * noise).sum(axis=-1) ** 2
        variances += spread.mean(axis=1).sum(axis=-1)
        result = weights @ values
        squares += np.sum((coded_weights @ decoded_values - result) ** 2), np.sum(result**2)
        end = int(positions[0])
    noises = np.sqrt(np.maximum(variances, 0) / (total - total // 2))
    error = np.sqrt(squares[0] / np.maximum(squares[1], np.finfo(np.float64).tiny))
    return float(noises.max()), float(error)


def _scores(layer: LayerNames, query: Floats, bias: Floats, keys: Floats) -> Floats:
    """Return the scores ``[N, G, T, S]`` of queries ``[1, H, T, D]`` and keys ``[N, 1, S, D]``."""
    plan = layer.plan
    groups = query.reshape(len(keys), -1, *query.shape[2:])
    scores: Floats = plan.scale * (groups @ keys.swapaxes(2, 3))
    if plan.softcap:
        scores = plan.softcap * np.tanh(scores / plan.softcap)
    return scores + bias


def _mask(
    layer: LayerNames, seen: Mapping[str, Array], heads: int, positions: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return what is added to scores ``[N, G, T, S]``, and which are hidden."""
    plan, at, slots = layer.plan, positions[:, None], np.arange(positions[-1] + 1)
    added = None if layer.bias is None else seen[layer.bias]
    bias, hidden = reference.bias_of(added, (1, heads, len(positions), len(slots)))
    if plan.causal:
        hidden = hidden | (slots > at)
    if plan.sliding_window:
        hidden = hidden | (at - slots >= plan.sliding_window)
    groups = (plan.kv_num_heads, -1, len(positions), len(slots))
    return np.where(hidden, 0, bias).reshape(groups), hidden.reshape(groups)


def _softmax(scores: Floats, layer: LayerNames, seen: Mapping[str, Array]) -> Floats:
    """Return weights ``[N, G, T, S]``; heads' sinks are one more score that has no value."""
    sink = np.full(1, -np.inf) if layer.sink is None else np.asarray(seen[layer.sink], np.float64)
    sinks = sink.reshape((1, 1) if layer.sink is None else scores.shape[:2])[..., None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    shares: Floats = weights / np.maximum(total, np.finfo(np.float64).tiny)
    return shares
