"""Scales of channels that make quantised keys cost less, from the weights of norms.

For any s > 0, q s and k / s leave every score of a model as it was. A rotation spreads the error of
a quantised key evenly over its channels, so that the error of a score is proportional to |q|^2
|k|^2, which

    s = (E k^2 / E q^2)^(1/4)        E: mean over the pair that a rotary embedding turns

makes as small as it can be. After a norm the energies are the squared weights, so that nothing has
to be measured. Where the weights are, and which channels are pairs, is read from the nodes in front
of queries and keys; were it read wrongly, scores would still be the same, and only cost more.

    gain  = (sum Eq)(sum Ek) / (sum sqrt(Eq Ek))^2
    noise = scale * sqrt(e^2 * sum gq^2 * sum gk^2 / D)

``noise`` is the standard deviation of a score, in nats, that keys of the relative squared error e^2
cause; it falls by sqrt(gain).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.calibration import equalising_scales
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.rmsnorm import constant_channels, match_norms
from tq_onnx.graph.values import static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.plan import LayerPlan, Plan

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

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

_ROTARY: Final = ("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding")
_SUMS: Final = ("Mul", "Div", "Add", "Sub", "Concat")
_LINEAR: Final = frozenset(
    {
        *("Identity", "Cast", "Neg", "Unsqueeze", "Squeeze", "Slice", "Split", "Reshape"),
        *("Transpose", *_SUMS, *_ROTARY),
    }
)


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """The weights of the norms in front of a layer."""

    query: Floats  #: of its queries, float64 ``[D]``
    key: Floats  #: of its keys, float64 ``[D]``
    pairs: Ids  #: ``[D]``, the first channel of the pair that a rotary embedding turns with each

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """What queries are multiplied by and keys divided by, ``[D]``; equal in a pair."""
        query, key = (_mean(weights**2, self.pairs) for weights in (self.query, self.key))
        scales: npt.NDArray[np.float32] = equalising_scales(query[None], key[None])[0]
        return scales


@dataclass(frozen=True)
class LayerEqualisation:
    """The effect of equalisation on a layer; JSON-able.

    Attributes:
        layer: index of the layer.
        scaled: whether norm weights tell scales for it; not if there are none, or if its keys are
            not rotated.
        reason: why there are none, as a clause; otherwise empty.
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


def find_norms(model: ir.Model, plan: Plan) -> tuple[LayerNorms | NoMatch, ...]:
    """Find the norms in front of all layers of a converted model, in the order of the plan.

    Args:
        model: after ``ConvertPass``, with any preset; it is not changed.

    Returns:
        for each layer its norms, or why it has none.
    """
    return tuple(map(_norms, converted_layers(model, plan)))


def predict(norms: LayerNorms | NoMatch, layer: LayerPlan, codec: Codec) -> LayerEqualisation:
    """Return what scales do for the keys of a layer."""
    if not codec.is_rotated:
        return LayerEqualisation(layer.layer, False, "")
    if isinstance(norms, NoMatch):
        return LayerEqualisation(layer.layer, False, norms.reason)
    query, key, s = norms.query, norms.key, norms.scales
    before = score_noise(query, key, layer.scale, codec)
    after = score_noise(query * s, key / s, layer.scale, codec)
    gain = (before / after) ** 2 if after > 0 else 1.0
    # Weights that are not finite make no prediction.
    unsafe = not after <= UNSAFE_NOISE
    return LayerEqualisation(layer.layer, True, "", gain, before, after, unsafe)


def score_noise(query: Floats, key: Floats, scale: float, codec: Codec) -> float:
    """Return standard deviation of a score, in nats, that quantised keys cause.

    Args:
        query: weights of the queries' norm, ``[D]``.
        key: weights of the keys' norm, ``[D]``.
        codec: a rotated one, whose error is spread evenly over the channels.
    """
    head_size = len(key)
    error = codebook_of(codec, head_size).mse
    if codec.has_sketch:
        # Signs of random projections estimate what the codebook leaves over.
        error *= math.pi / 2
    energy = float((query**2).sum() * (key**2).sum())
    return abs(scale) * math.sqrt(error * energy / head_size)


def _norms(layer: ConvertedLayer) -> LayerNorms | NoMatch:
    size = layer.plan.head_size
    try:
        if layer.sharing:
            raise NoMatch("other layers read the same keys", layer.attention.node)
        query, _ = _norm("query", layer.attention.query, size)
        key, pairs = _norm("key", layer.key.vectors, size)
    except NoMatch as miss:
        return miss
    return LayerNorms(query, key, pairs)


def _norm(role: str, operand: ir.Value, head_size: int) -> tuple[Floats, Ids]:
    """Return the weight of the one norm that an operand comes from, and the pairs behind it."""
    weights: dict[ir.Node, Floats] = {}
    between: set[ir.Node] = set()
    pending: list[ir.Value | None] = [operand]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in between or node in weights:
            continue
        weight = _weight(node, head_size)
        if weight is not None:
            weights[node] = weight
        elif kind(node) in _LINEAR:
            between.add(node)
            # Of the others only the first input is what the result is made of.
            pending += node.inputs if node.op_type in _SUMS else node.inputs[:1]
    if len(weights) != 1:
        number = "more than one norm stands" if weights else "no norm with a weight stands"
        raise NoMatch(f"{number} before the {role}")
    return next(iter(weights.values())), _pairs(between, head_size)


def _weight(node: ir.Node, head_size: int) -> Floats | None:
    """Return the weight ``[D]`` of a norm of every head; None for any other node."""
    for norm in match_norms(node):
        if norm.summands or norm.bias is not None or not norm.is_of_last_axis:
            continue
        weight = constant_channels(norm.weight, head_size)
        if weight is not None:
            return weight.astype(np.float64).reshape(-1)
    return None


def _pairs(nodes: Iterable[ir.Node], head_size: int) -> Ids:
    """Return the first channel of each one's pair; by themselves where none turns.

    Spelled out, a rotary embedding negates or subtracts one of each pair, and neighbours have an
    axis of two.
    """
    channels, width, interleaved = np.arange(head_size), 0, False
    for node in nodes:
        size = static_dim(node.outputs[0], -1)
        if kind(node) in _ROTARY:
            width = attribute_int(node, "rotary_embedding_dim", 0) or head_size
            interleaved = bool(attribute_int(node, "interleaved", 0))
        elif node.op_type in ("Neg", "Sub") and size and 2 * size <= head_size:
            width = 2 * size
        else:
            interleaved = interleaved or size == 2
    turned = channels[:width]
    pairs = turned // 2 * 2 if interleaved else turned % max(width // 2, 1)
    return np.concatenate([pairs, channels[width:]])


def _mean(energies: Floats, groups: Ids) -> Floats:
    """Return the mean over the group of each channel."""
    sums = np.bincount(groups, energies)
    means: Floats = (sums / np.maximum(np.bincount(groups), 1))[groups]
    return means
