"""Equalisation: scales of channels that make quantised keys cost less, folded into norm weights.

For any s that is constant over each RoPE pair, ``q_norm.weight * s`` and ``k_norm.weight / s``
leave every score of the model as it was. A rotation spreads the error of a quantised key evenly
over its channels, so that the error of a score is proportional to |q|^2 |k|^2, which

    s = (E k^2 / E q^2)^(1/4)        E: mean over the pair

makes as small as it can be. After a norm the energies are the squared weights: nothing has to be
measured, no byte is added and nothing is computed at run time.

    gain  = (sum Eq)(sum Ek) / (sum sqrt(Eq Ek))^2
    noise = scale * sqrt(e^2 * sum gq^2 * sum gk^2 / D)

``noise`` is the standard deviation of a score, in nats, that keys of the relative squared error e^2
cause; it falls by sqrt(gain). Scales are powers of two where the model computes in half precision,
so that nothing is rounded otherwise than before.

How to use it, with a model that ``ConvertPass`` has converted by ``plan``, before it is checked::

    layers = predict(find_norms(model, plan), plan)    # only looks, at 4 bits
    layers = equalise(model, plan)                     # folds, where keys are rotated

Who has measured energies gives ``layer_scales`` their roots and folds by ``fold``. From then on
keys are what they were over s, ``[D]``; so must be what was measured of them before, such as the
offsets of centering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.channels import Ids
from tq_onnx.conversion.headnorms import Array, LayerNorms, NoNorms, Norm, find_norms
from tq_onnx.graph.builder import Builder
from tq_onnx.plan import LayerPlan, Plan

Floats = npt.NDArray[np.float64]

INT4: Final = Codec(LLOYD_MAX, 4)
"""The codec that ``inspect`` predicts for."""

UNSAFE_NOISE: Final = 0.4
"""Noise of a score, in nats, above which quantised keys change what a model says. Measured on the
bundled model with outliers in its norm weights, per noise: 0.1 KL 0.0013 and no perplexity, 0.2
KL 0.007 and 0.6 %, 0.35 KL 0.026 and 0.8 %, 0.7 KL 0.19 and 19 %, 1.4 KL 0.92 and 144 %."""

SAFER_PRESET: Final = "k8v4"
"""Its keys are floats of 8 bits, whose error stays in the channel that it is made in: noise 0.03
whatever the outliers, where 4 bits make 1.5 and 5 bits 0.8 (keys with 8 channels 64 times as large
as the others, and queries 64 times as small there)."""

_MAX_SCALE: Final = 2.0**12
_ROUNDING: Final = 1e-6
"""Relative; of float32."""


@dataclass(frozen=True)
class LayerEqualisation:
    """The effect of equalisation on a layer; JSON-able.

    Attributes:
        layer: index of the layer.
        scaled: whether its norm weights are scaled, or would be; not if they were not found, or
            if its keys are not rotated.
        reason: why they were not found, as a clause; otherwise empty.
        gain: how many times smaller scales make the variance of the noise; None if no norm
            weights were found.
        noise_before: standard deviation of a score, in nats, from quantised keys; None likewise.
        noise_after: the same with scales.
        unsafe: whether the noise that is left changes what a model says.
    """

    layer: int
    scaled: bool
    reason: str
    gain: float | None = None
    noise_before: float | None = None
    noise_after: float | None = None
    unsafe: bool = False


def equalise(
    model: ir.Model, plan: Plan, layer_norms: Sequence[LayerNorms | NoNorms] | None = None
) -> tuple[LayerEqualisation, ...]:
    """Fold scales into the norm weights of all layers whose keys are rotated.

    Args:
        model: after ``ConvertPass``; changed in place, see ``fold``.
        plan: the plan that it was converted by.
        layer_norms: the norms of all its layers, if they were found already.

    Returns:
        for each layer, in the order of the plan, what was done or why not.
    """
    layer_norms = find_norms(model, plan) if layer_norms is None else layer_norms
    build = Builder(model.graph)
    report = []
    for norms, layer in zip(layer_norms, plan.layers, strict=True):
        if not layer.key.codec.is_rotated:
            report.append(LayerEqualisation(layer.layer, False, ""))
            continue
        report.append(_predicted(norms, layer, layer.key.codec))
        if isinstance(norms, LayerNorms):
            fold(model, norms, layer_scales(norms), build)
    return tuple(report)


def predict(
    layer_norms: Sequence[LayerNorms | NoNorms], plan: Plan, codec: Codec = INT4
) -> tuple[LayerEqualisation, ...]:
    """Return what ``equalise`` would do for keys of a rotated codec.

    Args:
        layer_norms: the norms of all layers of the plan.
        plan: tells head sizes and scales of the scores; its codecs do not matter.
        codec: what the keys would be.
    """
    return tuple(
        _predicted(norms, layer, codec)
        for norms, layer in zip(layer_norms, plan.layers, strict=True)
    )


def scales(query: Floats, key: Floats, groups: Ids, *, powers_of_two: bool) -> Floats:
    """Return the scales of the query channels; the key channels have their inverses.

    Args:
        query: weights of the queries' norm, or roots of measured energies, ``[D]``.
        key: likewise of the keys.
        groups: ``[D]``, equal for channels that must have one scale.
        powers_of_two: whether to round them to powers of two.

    Returns:
        positive finite numbers ``[D]``; 1 where weights are zero or not finite.
    """
    with np.errstate(all="ignore"):
        s = (_mean(key**2, groups) / _mean(query**2, groups)) ** 0.25
    s = np.where(np.isfinite(s) & (s > 0), np.clip(s, 1 / _MAX_SCALE, _MAX_SCALE), 1.0)
    return np.exp2(np.rint(np.log2(s))) if powers_of_two else s


def layer_scales(
    norms: LayerNorms, query: Floats | None = None, key: Floats | None = None
) -> Floats:
    """Return the scales of a layer.

    Args:
        norms: its norms.
        query: roots of the energies of its queries, ``[D]``; by default the weights.
        key: likewise of its keys.

    Returns:
        float64 ``[D]``; 1 for groups whose weights have no room for scales.
    """
    s = scales(
        norms.query.channels if query is None else query,
        norms.key.channels if key is None else key,
        norms.groups,
        powers_of_two=norms.halves,
    )
    # Scaled weights may leave the range of their element type, or its normal numbers.
    bad = np.zeros(len(s), bool)
    for norm, factor in ((norms.query, s), (norms.key, 1 / s)):
        scaled = _scaled(norm, factor).astype(np.float64).reshape(-1)
        with np.errstate(all="ignore"):
            off = np.abs(scaled / factor - norm.channels)
        bad |= ~(off <= np.abs(norm.channels) * (0.0 if norms.halves else _ROUNDING))
    return np.where(np.isin(norms.groups, norms.groups[bad]), 1.0, s)


def fold(model: ir.Model, norms: LayerNorms, s: Floats, build: Builder | None = None) -> None:
    """Multiply the weight of a layer's query norm by s, and divide that of its key norm.

    The weights become new initializers, ``tq.q_norm.3`` and ``tq.k_norm.3``, for these two nodes;
    other nodes that read the old weights go on doing so. Scales of 1 change nothing.

    Args:
        model: what the norms were found in; changed in place.
        norms: the norms of the layer.
        s: ``[D]``, as ``layer_scales`` makes them.
        build: a builder of the model's graph, if there is one already.

    Raises:
        ValueError: channels that must have one scale have several.
    """
    # A group is called by its first channel.
    if not np.array_equal(s, s[norms.groups]):
        raise ValueError(f"scales of layer {norms.layer} differ within its groups")
    if (s == 1).all():
        return
    build = build or Builder(model.graph)
    for name, norm, factor in (("q", norms.query, s), ("k", norms.key, 1 / s)):
        old = norm.node.inputs[norm.index]
        new = build.constant(f"tq.{name}_norm.{norms.layer}", _scaled(norm, factor))
        norm.node.replace_input_with(norm.index, new)
        _drop(model.graph, old)


def score_noise(query: Floats, key: Floats, scale: float, codec: Codec) -> float:
    """Return standard deviation of a score, in nats, that quantised keys cause.

    Args:
        query: weights of the queries' norm, ``[D]``.
        key: weights of the keys' norm, ``[D]``.
        scale: factor on the scores.
        codec: a rotated one, whose error is spread evenly over the channels.
    """
    head_size = len(key)
    error = codebook_of(codec, head_size).mse
    if codec.has_sketch:
        # Signs of random projections estimate what the codebook leaves over.
        error *= math.pi / 2
    energy = float((query**2).sum() * (key**2).sum())
    return abs(scale) * math.sqrt(error * energy / head_size)


def _predicted(norms: LayerNorms | NoNorms, layer: LayerPlan, codec: Codec) -> LayerEqualisation:
    if isinstance(norms, NoNorms):
        return LayerEqualisation(layer.layer, False, norms.reason)
    query, key, s = norms.query.channels, norms.key.channels, layer_scales(norms)
    before = score_noise(query, key, layer.scale, codec)
    after = score_noise(query * s, key / s, layer.scale, codec)
    gain = (before / after) ** 2 if after > 0 else 1.0
    # Weights that are not finite make no prediction.
    unsafe = not after <= UNSAFE_NOISE
    return LayerEqualisation(layer.layer, True, "", gain, before, after, unsafe)


def _mean(energies: Floats, groups: Ids) -> Floats:
    """Return the mean over the group of each channel."""
    sums = np.bincount(groups, energies)
    means: Floats = (sums / np.maximum(np.bincount(groups), 1))[groups]
    return means


def _scaled(norm: Norm, factor: Floats) -> Array:
    weight = norm.weight
    with np.errstate(all="ignore"):
        wide = weight.astype(np.float64) * factor.reshape(weight.shape)
        return wide.astype(weight.dtype)


def _drop(graph: ir.Graph, value: ir.Value | None) -> None:
    """Remove a constant that nothing reads any more, and what made it."""
    if value is None or value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    node = value.producer()
    if node is None:
        graph.initializers.pop(value.name or "", None)
    elif not any(output.uses() for output in node.outputs):
        inputs = list(node.inputs)
        graph.remove(node, safe=True)
        for item in inputs:
            _drop(graph, item)
