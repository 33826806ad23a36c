"""Scales and offsets of a converted model, against its original and its plan.

Scales in norm weights follow from the original's weights, so an original that was converted without
codecs is given the same ones and can be compared tensor by tensor. All scales and offsets have a
digest in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.biases import Biases
from tq_onnx.conversion.equalise import fold, layer_scales
from tq_onnx.conversion.headnorms import LayerNorms, find_norms
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.conversion.scales import Scales, adaptation_digest
from tq_onnx.ops.features import OFFSETS, ROTARY_OFFSETS
from tq_onnx.plan import Plan
from tq_onnx.targets.registry import target_of_plan

BY_NORMS = "norms"
BY_NODES = "nodes"
_BIAS_ROUNDING: Final = 1e-5
"""Of the largest number of an offset."""


def fold_alike(original: ir.Model, raw: Plan, plan: Plan) -> Mapping[int, Scales]:
    """Give norm weights the scales that a converted model should have.

    Args:
        original: the original, converted with the codec ``raw``; changed in place.
        raw: the plan of that.
        plan: the plan of the converted model.

    Returns:
        The scales ``[N, D]`` of the keys, by layer, in all layers that have norms.
    """
    folded: dict[int, Scales] = {}
    for norms, layer in zip(find_norms(original, raw), plan.layers, strict=True):
        if not isinstance(norms, LayerNorms):
            continue
        scales = layer_scales(norms)
        folded[layer.layer] = np.tile(scales.astype(np.float32), (layer.kv_num_heads, 1))
        if layer.equalised == BY_NORMS:
            fold(original, norms, scales)
    return folded


def adaptation_problems(model: ir.Model, plan: Plan, folded: Mapping[int, Scales]) -> list[str]:
    """Return the layers whose scales and offsets have another digest than planned."""
    return [
        f"layer {layer.plan.layer}: scales or offsets are not those of the conversion"
        for layer in converted_layers(model, plan)
        if not _is_planned(layer, folded)
    ]


def bias_problems(
    model: ir.Model, plan: Plan, biases: Biases, folded: Mapping[int, Scales]
) -> Iterator[str]:
    """Yield the layers of a model without a calibration whose offsets are not the biases.

    Args:
        model: the converted model.
        plan: its plan.
        biases: of the original.
        folded: scales of the keys, by layer.
    """
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
        scale = folded.get(index) if layer.plan.equalised == BY_NORMS else None
        expected = (
            None
            if bias is None
            else biases.offsets(index, key_scale=scale, turns=layer.plan.key.rotary)
        )
        if expected is None or not all(map(_is_close, tables, expected)):
            yield f"layer {index}: the offsets are not the biases of the original"


def _is_close(table: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    return table.shape == expected.shape and np.allclose(
        table, expected, rtol=0, atol=_BIAS_ROUNDING * np.abs(expected).max(initial=0)
    )


def _is_planned(layer: ConvertedLayer, folded: Mapping[int, Scales]) -> bool:
    plan = layer.plan
    tables = _constants(
        value
        for encoder in layer.encoders
        for value in (encoder.offset, encoder.frequencies if encoder.cache.rotary else None)
    )
    if not plan.adaptation:
        return not any(table.any() for table in tables)
    if not plan.centered:
        tables = []
    return any(
        adaptation_digest(*scales, *tables) == plan.adaptation
        for scales in _possible(layer, folded)
    )


def _constants(values: Iterable[ir.Value | None]) -> list[npt.NDArray[np.float32]]:
    return [
        np.asarray(value.const_value.numpy(), np.float32)
        for value in values
        if value is not None and value.const_value is not None
    ]


def _possible(layer: ConvertedLayer, folded: Mapping[int, Scales]) -> Iterator[list[Scales]]:
    """Yield what the keys of a layer may have been divided by."""
    plan = layer.plan
    if plan.equalised == BY_NODES:
        maker = layer.attention.query.producer()
        for value in () if maker is None else maker.inputs:
            table = None if value is None else value.const_value
            if table is not None and list(table.shape) == [1, plan.num_heads, 1, plan.head_size]:
                group = plan.num_heads // plan.kv_num_heads
                yield [np.asarray(table.numpy(), np.float32)[0, ::group, 0]]
        return
    if plan.layer in folded:
        yield [folded[plan.layer]]
    if plan.equalised != BY_NORMS:
        yield []
        yield [np.ones((plan.kv_num_heads, plan.head_size), np.float32)]
