"""The error of each layer of a converted model: keys and values against theory, and attention.

Measured on the model's own nodes while it reads a text: the vectors that went into a cache against
the rows that came out, and the result of attention against exact attention over the same queries
and over keys and values that were never quantised. The errors of the layers before are in the
inputs of both, so each layer is judged on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS, to_bytes
from tq_onnx.codec.extremes import Extremes
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW
from tq_onnx.measure.probe import EncodeNames, LayerNames, Probe
from tq_onnx.measure.reconstruction import ReconstructionFigures, reconstruction
from tq_onnx.runtime.decoder import Decoder

JUDGED_QUERIES: Final = 64
"""Queries of a layer whose attention is compared, spread over the text: exact attention is slow."""

Array = npt.NDArray[Any]
Seen = Mapping[str, Array]
"""Inner values of one call, by name."""


@dataclass(frozen=True)
class LayerErrors:
    """The errors of one layer.

    Attributes:
        layer: index of the layer.
        key_codec: codec of the keys.
        value_codec: codec of the values.
        key_error: squared error divided by squared norm, averaged over the vectors; in a calibrated
            model, of the vectors minus their offsets.
        key_theory: the expected value for random directions; None for codecs that do not rotate.
        value_error: as ``key_error``, of the values.
        value_theory: as ``key_theory``, of the values.
        attention_cosine: mean cosine between the result of attention and that of exact attention,
            over queries and heads.
        attention_cosine_lowest: the lowest of them.
        extremes: number of vectors that rows of keys and of values cannot represent.
    """

    layer: int
    key_codec: str
    value_codec: str
    key_error: float
    key_theory: float | None
    value_error: float
    value_theory: float | None
    attention_cosine: float
    attention_cosine_lowest: float
    extremes: tuple[Extremes, ...] = ()


def measure_layers(
    probe: Probe,
    tokens: npt.NDArray[np.int64],
    *,
    library: bool = True,
    threads: int | None = None,
) -> tuple[LayerErrors, ...]:
    """Read tokens with a converted model and judge every layer.

    Args:
        tokens: ids ``[n]``, few enough for all queries, keys and values of all layers to be kept.

    Returns:
        One entry per layer; none of a model that keeps a window of its caches only.
    """
    if any(layer.is_shortened for layer in probe.layers):
        return ()
    decoder = probe.decoder(library=library, threads=threads)
    calls = []
    for call in decoder.calls(len(tokens)):
        decoder.prefill(tokens[None, call])
        calls.append(dict(decoder.watched))
    return tuple(_judge(decoder, layer, calls) for layer in probe.layers)


def _judge(decoder: Decoder, layer: LayerNames, calls: list[dict[str, Array]]) -> LayerErrors:
    names = (layer.key.vectors, layer.value.vectors)
    vectors = {name: np.concatenate([seen[name] for seen in calls], axis=2) for name in names}
    by_name = {spec.pair.present: index for index, spec in enumerate(decoder.signature.caches)}
    pairs = (layer.plan.key.present, layer.plan.value.present)
    key_rows, value_rows = (decoder.cache(by_name[present]) for present in pairs)
    key, value = reconstruction(vectors, layer, (key_rows, value_rows))
    cosines = np.concatenate(list(_cosines(layer, calls, vectors)))
    return LayerErrors(
        layer=layer.plan.layer,
        key_codec=key.codec,
        value_codec=value.codec,
        key_error=key.error,
        key_theory=_theory(key, layer.key),
        value_error=value.error,
        value_theory=_theory(value, layer.value),
        attention_cosine=float(cosines.mean()),
        attention_cosine_lowest=float(cosines.min()),
        extremes=tuple(errors.extremes for errors in (key, value) if errors.extremes is not None),
    )


def _theory(figures: ReconstructionFigures, names: EncodeNames) -> float | None:
    return figures.theory if names.codec.levels else None


def _cosines(
    layer: LayerNames, calls: list[dict[str, Array]], vectors: Seen
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the cosines of all heads ``[H]`` for some queries; results of zero are left out."""
    plan = layer.plan
    total = sum(seen[layer.query].shape[2] for seen in calls)
    positions = np.unique(np.linspace(0, total - 1, JUDGED_QUERIES).astype(int))
    element = ELEMENTS[plan.dtype]
    raw = Codec(RAW, ELEMENT_BITS[element])
    keys, values = (
        to_bytes(vectors[names.vectors], raw, element) for names in (layer.key, layer.value)
    )
    start = 0
    for seen in calls:
        query = seen[layer.query]
        for position in positions[(positions >= start) & (positions < start + query.shape[2])]:
            row = position - start
            bias = None if layer.bias is None else seen[layer.bias]
            if bias is not None and bias.shape[2] > 1:
                bias = bias[:, :, row : row + 1]
            expected = reference.attention(
                query[:, :, row : row + 1],
                keys,
                values,
                np.array([position]),
                key=raw,
                value=raw,
                key_rotation=None,
                key_codebook=None,
                value_rotation=None,
                value_codebook=None,
                scale=plan.scale,
                causal=plan.causal,
                sliding_window=plan.sliding_window,
                softcap=plan.softcap,
                attention_bias=bias,
                head_sink=None if layer.sink is None else seen[layer.sink],
                element=element,
            )[0, :, 0]
            attended = seen[layer.output][0, :, row].astype(np.float64)
            lengths = np.linalg.norm(expected, axis=-1) * np.linalg.norm(attended, axis=-1)
            products = (expected * attended).sum(axis=-1)
            yield products[lengths > 0] / lengths[lengths > 0]
        start += query.shape[2]
