"""Scales and offsets of a converted model, against its original and its plan.

All of them have a digest in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.biases import Biases
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.conversion.scales import adaptation_digest
from tq_onnx.ops.features import OFFSETS, ROTARY_OFFSETS
from tq_onnx.plan import Plan
from tq_onnx.targets.registry import target_of_plan

_BIAS_ROUNDING: Final = 1e-5
"""Of the largest number of an offset."""


def adaptation_problems(model: ir.Model, plan: Plan) -> list[str]:
    """Return the layers whose scales and offsets have another digest than planned."""
    return [
        f"layer {layer.plan.layer}: scales or offsets are not those of the conversion"
        for layer in converted_layers(model, plan)
        if not _is_planned(layer)
    ]


def bias_problems(model: ir.Model, plan: Plan, biases: Biases) -> Iterator[str]:
    """Yield the layers of a model without a calibration whose offsets are not the biases."""
    lacking = target_of_plan(plan).capabilities.lacking
    for layer in converted_layers(model, plan):
        index, bias = layer.plan.layer, biases.layers.get(layer.plan.layer)
        if not layer.plan.centered:
            can_leave = not layer.plan.key.codec.is_raw and not {OFFSETS, ROTARY_OFFSETS} & {
                *lacking
            }
            if bias is not None and can_leave:
                yield f"layer {index}: the keys keep a bias of norm {bias.norm:.0f}"
            continue
        tables = _constants(encoder.offset for encoder in layer.encoders)
        expected = (
            None
            if bias is None
            else biases.offsets(index, key_scale=layer.key_scales, turns=layer.plan.key.rotary)
        )
        if expected is None or not all(map(_is_close, tables, expected)):
            yield f"layer {index}: the offsets are not the biases of the original"


def _is_close(table: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    return table.shape == expected.shape and np.allclose(
        table, expected, rtol=0, atol=_BIAS_ROUNDING * np.abs(expected).max(initial=0)
    )


def _is_planned(layer: ConvertedLayer) -> bool:
    plan, scales = layer.plan, layer.key_scales if layer.plan.equalised else None
    tables = _constants(
        value
        for encoder in layer.encoders
        for value in (encoder.offset, encoder.frequencies if encoder.cache.rotary else None)
    )
    if (scales is not None) != plan.equalised:
        return False
    if not plan.adaptation:
        return not any(table.any() for table in tables)
    held = [] if scales is None else [scales]
    held += tables if plan.centered else []
    return adaptation_digest(*held) == plan.adaptation


def _constants(values: Iterable[ir.Value | None]) -> list[npt.NDArray[np.float32]]:
    return [
        np.asarray(value.const_value.numpy(), np.float32)
        for value in values
        if value is not None and value.const_value is not None
    ]
