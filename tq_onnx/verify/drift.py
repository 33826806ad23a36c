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

from tq_onnx.verify.ladder import decoded_rows
from tq_onnx.verify.probe import EncodeNames, Probe

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DriftFigures:
    """One layer's caches against the original's.

    Attributes:
        layer: index of the layer.
        key: squared distance of all keys over the squared norm of the original's.
        value: the same of the values.
    """

    layer: int
    key: float
    value: float


def measure_drift(
    original: Sequence[Array], converted: Sequence[Array], probe: Probe
) -> list[DriftFigures]:
    """Compares the caches of both models after the same prompt.

    Args:
        original: floats ``[B, N, S, D]``, keys and values alternating.
        converted: uint8 ``[B, N, S, W]`` in the same order.
        probe: tells how to decode each layer; all layers of the model.
    """
    return [
        DriftFigures(
            layer.plan.layer,
            _distance(original[2 * index], converted[2 * index], layer.key, layer.plan.dtype),
            _distance(
                original[2 * index + 1], converted[2 * index + 1], layer.value, layer.plan.dtype
            ),
        )
        for index, layer in enumerate(probe.layers)
    ]


def _distance(vectors: Array, rows: Array, names: EncodeNames, dtype: str) -> float:
    wanted = vectors.astype(np.float64)
    found = decoded_rows(rows, names, dtype)
    return float(((found - wanted) ** 2).sum() / max((wanted**2).sum(), 1e-300))
