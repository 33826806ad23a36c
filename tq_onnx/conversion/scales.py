"""Fold scales and offsets into a converted graph, so that its keys and values quantise better.

Two things, both exact: scores and results of the unquantised model stay what they were.

Scales make the channels of queries and keys alike (``tq_onnx.conversion.equalise``). They go into
the weights of norms where there are such; where there are none, and a calibration file tells the
energies of the channels, into multiplications of their own, of the operator's query (by s) and of
the new keys (by 1 / s), behind the rotary embedding, so that no pairs are tied; powers of two in
half precision, where 1 / s would be rounded otherwise than s.

Offsets are means from a calibration file, or without one the biases of the projections
(``tq_onnx.conversion.biases``): ``tq.key_offset.3`` and ``tq.value_offset.3``, float32
``[P, N, D]``. The encoders take them away and attention gives them back. Those of the keys are
means of keys as the encoders see them, scales included. Where it is known how keys turn with
their positions, the offset turns likewise: two rows, of cosines and of sines, and
``tq.key_frequencies.3``, float32 ``[D]``. Further rows are what the means of the first tokens have
besides. It is that of the slot, whatever position the model gave the key, so that the encoder and
attention agree even where the file is of another model. A cache that is shortened before it is
returned has one offset for all its rows, because they move to other slots, and none for keys that
turn.

Error feedback is made of the same file's covariances of queries (``tq_onnx.codec.feedback``), with
the rotation and the scales that keys have in the end, ``tq.key_feedback.3``, float32 ``[N, D, D]``.
It changes how keys are rounded and no meaning of a row.

Layers that are not quantised get none of this.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.conversion.biases import NO_BIASES, Biases
from tq_onnx.conversion.equalise import LayerEqualisation, equalise, layer_scales
from tq_onnx.conversion.headnorms import LayerNorms, find_norms
from tq_onnx.conversion.layers import (
    SHARED,
    ConvertedLayer,
    EncodeNode,
    converted_layers,
)
from tq_onnx.conversion.options import Options
from tq_onnx.errors import UsageError
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.operator import Input
from tq_onnx.ops.operators import Encode
from tq_onnx.plan import LayerPlan, Plan

Scales = npt.NDArray[np.float32]
_Factors = npt.NDArray[np.floating[Any]]


class Means(Protocol):
    """What keys and values of a model have in common."""

    def offsets(
        self,
        layer: int,
        center_from: int,
        *,
        key_scale: Scales | None = None,
        turns: bool = True,
    ) -> tuple[Scales, Scales]:
        """Return the offsets of a layer's keys and values, as the operators take them."""

    def frequencies(self, layer: int) -> Scales:
        """Return the angles by which the offset of a layer's keys turns ``[D]``."""


_NO_SCALES: Final = np.ones((1, 1), np.float32)


def adapt(
    model: ir.Model,
    plan: Plan,
    options: Options,
    calibration: Calibration | None,
    biases: Biases = NO_BIASES,
) -> tuple[Plan, tuple[LayerEqualisation, ...]]:
    """Give a converted model scales and offsets, in place.

    Args:
        model: after ``ConvertPass``.
        plan: the plan that it was converted by.
        options: what was asked for.
        calibration: statistics of this model; None for none.
        biases: what is centered without statistics.

    Returns:
        The plan with what was done to each layer; and for each layer what scales of its norm
        weights do, empty if they were not asked for.

    Raises:
        UsageError: scales were asked for and there is no place for them, or statistics are of no
            use.
    """
    folded: dict[int, Scales] = {}
    report: tuple[LayerEqualisation, ...] = ()
    if options.equalize is not False:
        folded, report = _fold(model, plan)
        rotated = any(layer.key.codec.is_rotated for layer in plan.layers)
        if options.equalize and not folded and not (rotated and calibration):
            _refuse(plan, report)
    layers = [
        replace(layer, equalised="norms", adaptation=adaptation_digest(folded[layer.layer]))
        if (folded.get(layer.layer, _NO_SCALES) != 1).any()
        else layer
        for layer in plan.layers
    ]
    if calibration is not None and not plan.centered:
        raise UsageError(
            f"the preset {plan.preset} quantises nothing, and statistics do nothing for it",
            fix="leave `calibration` out",
        )
    if plan.centered:
        centering = (
            _Centering(model, biases, folded)
            if calibration is None
            else _Calibrated(model, calibration, options, folded)
        )
        converted = converted_layers(model, replace(plan, layers=tuple(layers)))
        layers = [
            centering.adapt(layer) if layer.plan.centered else layer.plan for layer in converted
        ]
        centering.drop_fillers()
    return replace(plan, layers=tuple(layers)), report


def turning_layers(calibration: Calibration | None) -> frozenset[int]:
    """Return the layers whose keys have a mean that turns with their positions."""
    if calibration is None:
        return frozenset()
    frequencies = map(calibration.frequencies, range(len(calibration.layers)))
    return frozenset(index for index, each in enumerate(frequencies) if each.any())


def _fold(model: ir.Model, plan: Plan) -> tuple[dict[int, Scales], tuple[LayerEqualisation, ...]]:
    """Fold scales into norm weights; return them, ``[N, D]`` by layer, in the keys' order."""
    found = find_norms(model, plan)
    scales = {
        layer.layer: layer_scales(norms)
        for layer, norms in zip(plan.layers, found, strict=True)
        if isinstance(norms, LayerNorms) and layer.key.codec.is_rotated
    }
    report = equalise(model, plan, found)
    sizes = {layer.layer: layer.kv_num_heads for layer in plan.layers}
    return {
        layer: np.tile(s.astype(np.float32), (sizes[layer], 1)) for layer, s in scales.items()
    }, report


def _refuse(plan: Plan, report: tuple[LayerEqualisation, ...]) -> None:
    if not any(layer.key.codec.is_rotated for layer in plan.layers):
        raise UsageError(
            f"the keys of the preset {plan.preset} are not rotated, and scales do nothing for them",
            fix="leave `equalize` out",
        )
    reason = next((entry.reason for entry in report if entry.reason), "none was found")
    raise UsageError(
        f"there are no norm weights to put scales into ({reason})",
        fix="leave `equalize` out, or give statistics with `calibration`",
    )


class _Centering:
    """Puts the biases of projections into one model."""

    def __init__(self, model: ir.Model, means: Means, folded: dict[int, Scales]) -> None:
        self._graph = model.graph
        self._build = Builder(model.graph)
        self._means = means
        self._folded = folded
        self._fillers: set[ir.Value] = set()

    def adapt(self, layer: ConvertedLayer) -> LayerPlan:
        """Give a layer its offsets; return what it is now."""
        scales = self._folded.get(layer.plan.layer)
        held = self._center(layer, scales, 0)
        return replace(layer.plan, adaptation=adaptation_digest(*held))

    def _center(self, layer: ConvertedLayer, scales: Scales | None, center: int) -> list[Scales]:
        """Give a layer its offsets; return what its keys and values have been changed by."""
        plan = layer.plan
        offsets = self._means.offsets(plan.layer, center, key_scale=scales, turns=plan.key.rotary)
        frequencies = self._means.frequencies(plan.layer)
        held = [] if scales is None else [scales]
        for encoder, offset in zip(layer.encoders, offsets, strict=True):
            # Both caches of a layer have offsets or none; raw rows would only be rounded by one.
            rows = offset[-1:] if layer.is_shortened else offset
            array = np.zeros_like(rows) if encoder.codec.is_raw else rows
            held.append(array)
            self._bake(layer, encoder, Encode.offset, array)
            if encoder.cache.rotary:
                held.append(frequencies)
                self._bake(layer, encoder, Encode.frequencies, frequencies)
        return held

    def _bake(
        self, layer: ConvertedLayer, encoder: EncodeNode, table: Input, array: Scales
    ) -> None:
        """Give an encoder and the attentions that read its cache a table in place of a filler."""
        name = f"tq.{encoder.role}_{table.name}.{layer.plan.layer}"
        baked = self._build.constant(name, np.ascontiguousarray(array))
        shared = SHARED[encoder.role][table]
        for node, slot in (
            (encoder.node, table),
            *((each.node, shared) for each in layer.attentions),
        ):
            filler = slot.of(node)
            assert filler is not None  # ConvertPass has put one there
            self._fillers.add(filler)
            slot.replace(node, baked)

    def drop_fillers(self) -> None:
        """Remove the fillers that no layer needs any more."""
        for filler in self._fillers:
            if not filler.uses():
                self._graph.initializers.pop(filler.name or "", None)


class _Calibrated(_Centering):
    """Puts what a calibration file tells into one model."""

    def __init__(
        self,
        model: ir.Model,
        calibration: Calibration,
        options: Options,
        folded: dict[int, Scales],
    ) -> None:
        super().__init__(model, calibration, folded)
        self._calibration = calibration
        self._options = options

    def adapt(self, layer: ConvertedLayer) -> LayerPlan:
        """Give a layer its offsets, and scales if it has none; return what it is now."""
        plan = layer.plan
        center = self._options.center_from
        scales = self._folded.get(plan.layer)
        alone = not layer.sharing and plan.key.codec.is_rotated
        if scales is None and alone and self._options.equalize is not False:
            scales = self._calibration.scales(plan.layer, center)
            operands = layer.attention.query, layer.key.vectors
            if any(_dtype(operand, plan).bitwidth < 32 for operand in operands):
                scales = np.exp2(np.rint(np.log2(scales)))
            self._multiply(layer, scales)
            plan = replace(plan, equalised="nodes")
        if plan.key.feedback:
            self._feed_back(layer, scales)
        held = self._center(layer, scales, center)
        return replace(plan, adaptation=adaptation_digest(*held))

    def _feed_back(self, layer: ConvertedLayer, scales: Scales | None) -> None:
        """Give the encoder of keys the matrices of the queries that will read them."""
        plan, key = layer.plan, layer.key
        rotation = key.rotation.const_value
        assert rotation is not None  # baked
        try:
            covariance = self._calibration.query_covariance(plan.layer)
            matrices = feedback_of(covariance, rotation.numpy(), scales)
        except ValueError as error:
            raise UsageError(str(error), where=f"layer {plan.layer}") from error
        key.feedback = self._build.constant(f"tq.key_feedback.{plan.layer}", matrices)

    def _multiply(self, layer: ConvertedLayer, scales: Scales) -> None:
        """Multiply queries by s, and divide new keys by s."""
        plan, attention, key = layer.plan, layer.attention, layer.key
        group = plan.num_heads // plan.kv_num_heads
        query_scales = np.repeat(scales, group, axis=0)
        with self._build.before(attention.node, f"layers.{plan.layer}.attention"):
            attention.query = self._scaled(attention.query, query_scales, "query", plan)
        with self._build.before(key.node, f"layers.{plan.layer}.attention"):
            key.vectors = self._scaled(key.vectors, 1 / scales, "key", plan)
        if attention.new_keys is not None:  # exact keys meet the same queries as codes do
            attention.new_keys = key.vectors

    def _scaled(self, operand: ir.Value, factor: _Factors, role: str, plan: LayerPlan) -> ir.Value:
        dtype = _dtype(operand, plan)
        table = factor[None, :, None, :].astype(dtype.numpy())
        return self._build.op(
            "Mul",
            [operand, self._build.constant(f"tq.{role}_scale.{plan.layer}", table)],
            f"equalise_{role}",
            dtype=dtype,
            shape=[None, len(factor), None, plan.head_size],
        )


def adaptation_digest(*arrays: npt.NDArray[np.float32]) -> str:
    """Tell what keys were divided by, and what was taken from keys and values."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array, "<f4").tobytes())
    return content.hexdigest()[:16]


def _dtype(operand: ir.Value, layer: LayerPlan) -> ir.DataType:
    """Return element type of queries, or of new keys."""
    return ir.DataType[layer.dtype] if operand.dtype is None else operand.dtype
