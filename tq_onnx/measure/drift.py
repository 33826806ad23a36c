"""How far the converted model's caches are from the original's, on the same tokens.

In the first layer both models cache the same vectors, so the distance is that of the codec alone;
more than that means that the two files hold different weights. From layer to layer it grows,
because each layer reads what the quantised ones before it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.reference import offset_rows
from tq_onnx.measure.oracle import decoded_rows, largest_error, theory
from tq_onnx.measure.probe import EncodeNames, LayerNames, Probe

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DriftFigures:
    """One layer's caches against the original's.

    Attributes:
        layer: index of the layer.
        key: squared distance of all keys over the squared norm of the original's; where keys are
            equalised, after each channel of the original's is scaled as the converted ones are.
        value: the same of the values.
        key_expected: what quantisation alone may be expected to make of ``key``.
        value_expected: likewise of ``value``.
    """

    layer: int
    key: float
    value: float
    key_expected: float = 0.0
    value_expected: float = 0.0


def measure_drift(
    original: Sequence[Array], converted: Sequence[Array], probe: Probe
) -> list[DriftFigures]:
    """Compares the caches of both models after the same prompt.

    Args:
        original: floats ``[B, N, S, D]``, keys and values alternating.
        converted: uint8 ``[B, N, S, W]`` in the same order.
        probe: tells how to decode each layer; all layers of the model.
    """
    figures = []
    for index, layer in enumerate(probe.layers):
        keys, values = (array.astype(np.float64) for array in original[2 * index : 2 * index + 2])
        rows = converted[2 * index : 2 * index + 2]
        if layer.plan.equalised:
            keys = _scaled(keys, _decoded(rows[0], layer.key, layer))
        key, key_expected = _distance(keys, rows[0], layer.key, layer)
        value, value_expected = _distance(values, rows[1], layer.value, layer)
        figures.append(DriftFigures(layer.plan.layer, key, value, key_expected, value_expected))
    return figures


def _decoded(rows: Array, names: EncodeNames, layer: LayerNames) -> Floats:
    """What a converted cache stands for, offsets included."""
    return decoded_rows(rows, names, layer.plan.dtype) + _offsets(rows, names)


def _offsets(rows: Array, names: EncodeNames) -> Floats:
    batch, heads, tokens, _ = rows.shape
    if names.offset is None:
        return np.zeros((batch, heads, tokens, names.head_size))
    return offset_rows(names.offset, np.zeros(1, np.int64), batch, tokens)


def _scaled(keys: Floats, found: Floats) -> Floats:
    """Keys whose channels are scaled as those that were found.

    The scales are in no file of their own, so they are the ones that fit best; whatever is not a
    scale of the channels of a head remains.
    """
    products = (keys * found).sum(axis=(0, 2), keepdims=True)
    energies = (keys * keys).sum(axis=(0, 2), keepdims=True)
    scaled: Floats = keys * (products / np.where(energies > 0, energies, 1))
    return scaled


def _distance(
    vectors: Floats, rows: Array, names: EncodeNames, layer: LayerNames
) -> tuple[float, float]:
    """The distance, and what may be expected of it."""
    energy = max(float((vectors**2).sum()), 1e-300)
    distance = float(((_decoded(rows, names, layer) - vectors) ** 2).sum()) / energy
    left = vectors - _offsets(rows, names)
    promised = theory(names.codec, names.head_size, names.norm_correction)
    if promised is None:
        expected = float(largest_error(left.reshape(-1, names.head_size), names.codec).sum())
    else:
        expected = promised * float((left**2).sum())
    return distance, expected / energy
