"""Put scales and offsets into a converted graph, so that its keys and values quantise better.

Two things, both exact: scores and results of the unquantised model stay what they were.

Scales make the channels of queries and keys alike. They multiply the operator's query (by s) and
the new keys (by 1 / s), behind the rotary embedding; powers of two in half precision, where 1 / s
would be rounded otherwise than s. A calibration file tells them by the energies of the channels;
without one the weights of norms do (``tq_onnx.conversion.equalise``).

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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.conversion.biases import NO_BIASES, Biases
from tq_onnx.conversion.equalise import LayerEqualisation, LayerNorms, find_norms, predict
from tq_onnx.conversion.layers import (
    SHARED,
    ConvertedLayer,
    EncodeNode,
    converted_layers,
)
from tq_onnx.conversion.options import Options
from tq_onnx.errors import UsageError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.ops.operator import Input
from tq_onnx.ops.operators import Encode
from tq_onnx.plan import LayerPlan, Plan

Scales = npt.NDArray[np.float32]
_Factors = npt.NDArray[np.floating[Any]]


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

    Returns:
        The plan with what was done to each layer; and for each layer what scales from the weights
        of its norms do, empty if they were not asked for.
    """
    if calibration is not None and not plan.centered:
        raise UsageError(
            f"the preset {plan.preset} quantises nothing, and statistics do nothing for it",
            fix="leave `calibration` out",
        )
    norms: Sequence[LayerNorms | NoMatch | None] = [None] * len(plan.layers)
    report: tuple[LayerEqualisation, ...] = ()
    if options.equalize is not False:
        norms = find_norms(model, plan)
        report = tuple(
            predict(layer_norms, layer, layer.key.codec)
            for layer_norms, layer in zip(norms, plan.layers, strict=True)
        )
        rotated = any(layer.key.codec.is_rotated for layer in plan.layers)
        scaled = any(entry.scaled for entry in report) or (rotated and calibration)
        if options.equalize and not scaled:
            _refuse(plan, report)
    adaptation = _Adaptation(model, options, calibration, biases)
    pairs = zip(converted_layers(model, plan), norms, strict=True)
    layers = tuple(adaptation.adapt(*pair) for pair in pairs)
    adaptation.drop_fillers()
    return replace(plan, layers=layers), report


def turning_layers(calibration: Calibration | None) -> frozenset[int]:
    """Return the layers whose keys have a mean that turns with their positions."""
    if calibration is None:
        return frozenset()
    frequencies = map(calibration.frequencies, range(len(calibration.layers)))
    return frozenset(index for index, each in enumerate(frequencies) if each.any())


def _refuse(plan: Plan, report: tuple[LayerEqualisation, ...]) -> None:
    if not any(layer.key.codec.is_rotated for layer in plan.layers):
        raise UsageError(
            f"the keys of the preset {plan.preset} are not rotated, and scales do nothing for them",
            fix="leave `equalize` out",
        )
    reason = next((entry.reason for entry in report if entry.reason), "none was found")
    raise UsageError(
        f"there are no norm weights that tell scales ({reason})",
        fix="leave `equalize` out, or give statistics with `calibration`",
    )


class _Adaptation:
    """Puts scales, offsets and error feedback into one model."""

    def __init__(
        self, model: ir.Model, options: Options, calibration: Calibration | None, biases: Biases
    ) -> None:
        self._graph = model.graph
        self._build = Builder(model.graph)
        self._options = options
        self._calibration = calibration
        self._means = biases if calibration is None else calibration
        self._fillers: set[ir.Value] = set()

    def adapt(self, layer: ConvertedLayer, norms: LayerNorms | NoMatch | None) -> LayerPlan:
        """Give a layer what it can have; return what it is now."""
        plan, held = layer.plan, []
        scales = None if norms is None else self._scales(layer, norms)
        if scales is not None:
            self._multiply(layer, scales)
            plan = replace(plan, equalised=True)
            held = [scales]
        if plan.key.feedback:
            self._feed_back(layer, scales)
        if plan.centered:
            held += self._center(layer, scales)
        return replace(plan, adaptation=adaptation_digest(*held)) if held else plan

    def _scales(self, layer: ConvertedLayer, norms: LayerNorms | NoMatch) -> Scales | None:
        """Return the scales ``[N, D]`` of a layer's keys; None where they would change nothing."""
        plan = layer.plan
        if layer.sharing or not plan.key.codec.is_rotated:
            return None
        if self._calibration is not None:
            scales = self._calibration.scales(plan.layer, self._options.center_from)
        elif isinstance(norms, NoMatch):
            return None
        else:
            scales = np.tile(norms.scales, (plan.kv_num_heads, 1))
        operands = layer.attention.query, layer.key.vectors
        if any(_dtype(operand, plan).bitwidth < 32 for operand in operands):
            scales = np.exp2(np.rint(np.log2(scales)))
        return None if (scales == 1).all() else scales

    def _center(self, layer: ConvertedLayer, scales: Scales | None) -> list[Scales]:
        """Give a layer its offsets; return what its keys and values have been changed by."""
        plan, center = layer.plan, self._options.center_from
        offsets = self._means.offsets(plan.layer, center, key_scale=scales, turns=plan.key.rotary)
        frequencies = self._means.frequencies(plan.layer)
        held = []
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

    def _feed_back(self, layer: ConvertedLayer, scales: Scales | None) -> None:
        """Give the encoder of keys the matrices of the queries that will read them."""
        plan, key = layer.plan, layer.key
        rotation = key.rotation.const_value
        assert rotation is not None  # baked
        assert self._calibration is not None  # or nothing would be fed back
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
