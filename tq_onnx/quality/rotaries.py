"""Measure the angles by which a model turns its keys: it reads texts of one token, repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.rotaryangles import POSITIONS, Measurement, measure_rotary
from tq_onnx.conversion.biases import constant_rows
from tq_onnx.measure.probe import Probe

TEXTS: Final = 3
"""Coordinates in which one key is zero are not so in others."""

Array = npt.NDArray[Any]


def measure_rotaries(
    probe: Probe,
    read: Callable[[Array], Iterator[dict[str, Array]]],
    tokens: Array,
    model: ir.Model,
    *,
    longest: int | None = None,
) -> list[Measurement]:
    """Measure how the keys of each layer turn.

    Args:
        read: reads a text in an empty decoder, and yields the inner values of each call.
        tokens: ids that the model knows; without any, nothing is measured.
        longest: tokens that the model takes at most; None for any number.

    Returns:
        One measurement for each layer of the probe.
    """
    if not len(tokens):
        return [Measurement(None, float("nan"))] * len(probe.layers)
    length = min(POSITIONS, longest or POSITIONS)
    distinct = np.unique(tokens)
    chosen = distinct[np.linspace(0, len(distinct) - 1, TEXTS).astype(int)]
    names = [layer.key.vectors for layer in probe.layers]
    keys: list[list[Array]] = [[] for _ in names]
    for token in np.unique(chosen):
        calls = [[values[name][0] for name in names] for values in read(np.full(length, token))]
        for prompts, parts in zip(keys, zip(*calls, strict=True), strict=True):
            prompts.append(np.concatenate(parts, axis=1))
    constants = list(constant_rows(model))
    return [
        measure_rotary(np.stack(texts), constants)
        if texts and texts[0].shape[1] > 1
        else Measurement(None, float("nan"))
        for texts in keys
    ]
