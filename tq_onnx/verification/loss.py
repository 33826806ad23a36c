"""The check "quality": what a conversion loses on a text that its original writes.

KL divergence has no bound: between two healthy codecs of 4 bits it is up to .7 with random weights.
So each layer has two, for 4 bits and more; each bit less doubles them. Seen with ``int4``, the
largest of all layers, as noise in nats and error of attention: exports with random weights .09 and
.11, SmolLM2 .38 and .23, Gemma 3 270M .39 and .14, Qwen2.5-Coder-0.5B .73 and .21 (``int3`` 1.64
and .46, ``k8v4`` .17 and .36). The same Qwen2.5 with the biases of its keys left in: 21.5 and 1.4,
with ``int5`` 11 and 1.1, with ``k8v4``, which loses 2 % of its perplexity, 1.7 and .36.
"""

from __future__ import annotations

import math
from typing import Final

from tq_onnx.codec.extremes import warnings_of
from tq_onnx.measure.loss import LayerLoss, LossFigures
from tq_onnx.verification.checks import PropertyCheck

QUALITY: Final = "quality"

MAX_NOISE: Final = 1.0
"""Nats."""
MAX_ERROR: Final = 0.5
"""Of the length of what attention gives."""
_MOST_ERROR: Final = 0.9
"""With any bits. Without a calibration, SmolLM2's ``int2`` has 1.0 and loses 20 %."""
_MOST_NAMED: Final = 8


def quality_check(figures: LossFigures) -> PropertyCheck:
    """Judge the loss of a conversion."""
    if clamped := _clamped(figures):
        return PropertyCheck(QUALITY, False, clamped[0])
    lost = lossy_layers(figures)
    noisiest = max(figures.layers, key=lambda layer: _excess(layer)[0])
    worst = max(figures.layers, key=lambda layer: _excess(layer)[1])
    beyond = f"the codes ruin {_named(lost)}: " if lost else ""
    predictions = figures.predictions
    return PropertyCheck(
        QUALITY,
        not lost,
        f"{beyond}scores are off by {noisiest.noise:.2g} nats (layer {noisiest.layer}), "
        f"{_max_noise(noisiest):g} allowed, attention by {worst.attention_error:.2g} of its length "
        f"(layer {worst.layer}), {_max_error(worst):g} allowed; KL divergence "
        f"{predictions.kl_mean:.2g}, at 99 % {predictions.kl_p99:.2g}, perplexity "
        f"{predictions.perplexity_change:+.1%}, same first choice "
        f"{predictions.top1_agreement:.1%}, on {figures.tokens} tokens of {figures.source}",
    )


def quality_advice(figures: LossFigures, *, is_calibrated: bool) -> str:
    """Return what to do where that check does not hold."""
    if _clamped(figures):
        return "convert again, with these layers left uncompressed with `layers`"
    first = "" if is_calibrated else "with `calibrate`, or "
    layers = _named(lossy_layers(figures))
    return (
        f'convert again {first}with `preset="int5"`, or leave {layers} uncompressed with `layers`'
    )


def lossy_layers(figures: LossFigures) -> list[LayerLoss]:
    """Return the layers that lose more than a model bears; a figure that is no number is one."""
    return [layer for layer in figures.layers if not max(_excess(layer)) <= 1]


def _excess(layer: LayerLoss) -> tuple[float, float]:
    """Return both figures over their bounds."""
    figures = layer.noise / _max_noise(layer), layer.attention_error / _max_error(layer)
    noise, error = (math.inf if math.isnan(figure) else figure for figure in figures)
    return noise, error


def _max_noise(layer: LayerLoss) -> float:
    return MAX_NOISE * _coarseness(layer.bits[0])


def _max_error(layer: LayerLoss) -> float:
    return min(_MOST_ERROR, MAX_ERROR * _coarseness(min(layer.bits)))


def _coarseness(bits: int) -> float:
    """Return how large the errors of a codec are beside those of 4 bits, at least 1."""
    return float(2 ** max(0, 4 - bits))


def _clamped(figures: LossFigures) -> tuple[str, ...]:
    return warnings_of(
        extremes for layer in figures.layers for extremes in layer.extremes if extremes.clamped
    )


def _named(layers: list[LayerLoss]) -> str:
    names = [str(layer.layer) for layer in layers]
    further = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(names[:_MOST_NAMED])}{further}"
