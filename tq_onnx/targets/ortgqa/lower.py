"""A converted decoder whose caches are ONNX Runtime's own, with steps from a calibration.

    causal masks -> rotation and offsets of keys, where they help -> GroupQueryAttention

GroupQueryAttention hides the future, and what is behind a local window, by itself. A layer whose
mask hides anything else is refused, as it cannot take one beside codes everywhere.

Before keys become codes of 4 bits, queries and keys are multiplied with one rotation, which leaves
every score as it is, and their mean is taken from all keys. That changes all scores of a query
alike, which softmax does not see; a softcap would, and a sink of a head, so that such layers keep
it. Measured on SmolLM2, KL on 2,048 tokens: 0.106 without both, 0.083 with both, 0.361 with the
mean alone. With 8 bits they give nothing (0.00081, 0.00082, 0.00107), and so they are left out.
Offsets of values give nothing with 8 bits (0.00077) and harm with 4 (0.128); a rotation of values
gives nothing either (0.00084 with all of them, 8 bits).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.channelcodes import ChannelCodes, rotation_of_keys
from tq_onnx.codec.spec import row_layout
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.conversion.scales import adaptation_digest
from tq_onnx.conversion.target import Lowering
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.copying import copy_graph
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.plan import LayerPlan, Plan
from tq_onnx.targets import causality
from tq_onnx.targets.ortgqa.caches import INT4, INT8, LayerCodes, put_caches
from tq_onnx.targets.restore import (
    METADATA_LAYERS,
    AttentionEnds,
    EncoderEnds,
    Remembered,
    remember,
    restore_as,
)

_CACHES: Final = {8: INT8, 4: INT4}
_ROTATED: Final = (4,)
"""Bits of codes whose keys are rotated and centered."""
_BEYOND: Final = "use another target"


def lowering_of(plan: Plan, calibration: Calibration, bits: int, target: str) -> Lowering:
    """Return the pass that rewrites a converted model, and the plan of what it leaves.

    Args:
        plan: the plan that the model was converted by, with the preset ``raw``.
        calibration: statistics of the original.
        bits: of a code.
        target: name of the target.

    The pass raises ``UnsupportedModelError`` where a part of the model is not shown to be right.

    Raises:
        UsageError: the statistics do not tell steps.
    """
    if not calibration.has_quantiles:
        raise UsageError(
            "the calibration file does not tell the steps of codes: it was made by an older "
            "version",
            fix="run `tq-onnx calibrate` again",
        )
    rewrite = OrtCachesPass(plan, calibration, bits, target)
    return Lowering(plan, (rewrite,), lambda: rewrite.plan)


def codes_of(calibration: Calibration, layer: LayerPlan, bits: int) -> LayerCodes:
    """Return the constants of a layer."""
    statistics = calibration.layers[layer.layer]
    assert statistics.k_quantiles is not None  # lowering_of
    assert statistics.v_quantiles is not None
    assert statistics.k_range is not None
    value = ChannelCodes.of(statistics.v_quantiles, bits, centered=False)
    if bits not in _ROTATED:
        return LayerCodes(ChannelCodes.reaching(statistics.k_range, bits), value)
    is_centered = not (layer.has_sink or layer.softcap)
    key = ChannelCodes.of(statistics.k_quantiles, bits, centered=is_centered)
    element = ir.DataType[layer.dtype].numpy()
    rotation = rotation_of_keys(layer.layer, layer.head_size)
    # As the graph will have them.
    key, rotation = (
        replace(key, offset=key.offset.astype(element).astype(np.float32)),
        rotation.astype(element).astype(np.float32),
    )
    return LayerCodes(key, value, rotation)


class OrtCachesPass(ir.passes.InPlacePass):
    """Puts ONNX Runtime's caches and attention in the places of ours.

    Args:
        plan: as for ``lowering_of``.
        calibration: likewise.
        bits: likewise.
        target: likewise.
    """

    def __init__(self, plan: Plan, calibration: Calibration, bits: int, target: str) -> None:
        super().__init__()
        self._plan = plan
        self._bits = bits
        self._target = target
        self._codes = [codes_of(calibration, layer, bits) for layer in plan.layers]
        self.plan = plan
        """Of the model as it is; complete once the pass has run."""

    def requires(self, model: ir.Model) -> None:
        """Require a model as ``ConvertPass`` leaves it."""
        for violation in layer_violations(model, self._plan):
            raise ir.passes.PreconditionError(violation)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        plan, where = self._plan, f'`target="{self._target}"`'
        if plan.interface.static:
            raise UnsupportedModelError(
                "the caches have one size, and GroupQueryAttention's grow", where=where, fix=_BEYOND
            )
        layers = converted_layers(model, plan)
        try:
            windows = causality.windows(layers, plan, model)
            for layer in causality.of_each_mask(layers):
                length = layer.attention.past_length
                if not causality.is_past_length(length, plan, model):
                    raise NoMatch("the tokens in the caches are counted in another way than theirs")
        except NoMatch as miss:
            raise UnsupportedModelError(miss.reason, where=where, fix=_BEYOND) from miss
        self.plan = self._lowered(windows)
        planned = [
            replace(layer, plan=new) for layer, new in zip(layers, self.plan.layers, strict=True)
        ]
        for layer in planned:
            layer.attention.bias = None
        ends = [_inputs_of(layer) for layer in planned]
        results = put_caches(model, planned, _CACHES[self._bits], self._codes)
        RemoveUnusedNodesPass()(model)
        remember(
            model,
            [
                _remembered(layer_ends, output, presents)
                for layer_ends, (output, presents) in zip(ends, results, strict=True)
            ],
        )
        return ir.passes.PassResult(model, modified=True)

    def _lowered(self, windows: list[int]) -> Plan:
        """Return the plan of a model with these sliding windows."""
        layers = tuple(
            replace(
                layer.with_caches(
                    channel_bits=self._bits, row_bytes=layer.head_size * self._bits // 8
                ),
                has_bias=False,
                causal=True,
                sliding_window=window,
                adaptation=adaptation_digest(*codes.tables),
            )
            for layer, window, codes in zip(self._plan.layers, windows, self._codes, strict=True)
        )
        # GroupQueryAttention sees all slots up to the last one, those of padding among them.
        interface = replace(self._plan.interface, padding=False, right_padding=False)
        return replace(
            self._plan,
            target=self._target,
            preset=f"{self._target}-int{self._bits}",
            layers=layers,
            interface=interface,
        )


_Ends = tuple[list[tuple[ir.Value, ir.Value, ir.Value]], tuple[ir.Value, ir.Value, ir.Value | None]]


def _inputs_of(layer: ConvertedLayer) -> _Ends:
    """Return what goes into the operators of a layer."""
    attention = layer.attention
    return (
        [(each.vectors, each.past, each.past_length) for each in layer.encoders],
        (attention.query, attention.past_length, attention.sink),
    )


def _remembered(ends: _Ends, output: ir.Value, presents: list[ir.Value]) -> Remembered:
    encoders, (query, past_length, sink) = ends
    key, value = (
        EncoderEnds(*values, present) for values, present in zip(encoders, presents, strict=True)
    )
    return Remembered(key, value, (AttentionEnds(query, past_length, None, sink, output),))


def restore(model: ir.Model, plan: Plan) -> ir.Model:
    """Return a model with raw operators in the places of ONNX Runtime's; itself if it has them.

    Args:
        model: a lowered model; it is not changed, and shares its weights with the result.
        plan: its plan.

    Raises:
        UnsupportedModelError: the metadata or the graph is not what the lowering wrote.
    """
    if METADATA_LAYERS not in model.metadata_props:
        return model
    model = copy_graph(model)
    plain = replace(plan, layers=tuple(map(_raw, plan.layers)))
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for cache in plain.caches:
        for name in (cache.past, cache.present):
            value = values.get(name)
            if value is None or value.shape is None:
                continue
            value.type = ir.TensorType(ir.DataType.UINT8)
            value.shape = ir.Shape([*value.shape[:3], cache.row_bytes])
    return restore_as(model, plain)


def _raw(layer: LayerPlan) -> LayerPlan:
    width = row_layout(layer.key.codec, layer.head_size).row_bytes
    return replace(layer.with_caches(channel_bits=0, row_bytes=width), adaptation="")
