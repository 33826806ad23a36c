"""The two operators of a layer as calls of ``tq_onnx.targets.web.bodies``.

Keys and values are encoded by the same nodes where they have the same codec. What does not depend
on the layer is made by ``tq_onnx.targets.web.shared``, once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer, EncodeNode
from tq_onnx.plan import Plan
from tq_onnx.targets.restore import AttentionEnds, EncoderEnds, Remembered, take_place
from tq_onnx.targets.web import bodies, tables
from tq_onnx.targets.web.shared import Calls, Shared

_FLOAT: Final = ir.DataType.FLOAT
_BYTES: Final = ir.DataType.UINT8
_INT32: Final = ir.DataType.INT32

_SCALES: Final = {NOT_CORRECTED: bodies.scales_of_norm, NORM_KEPT: bodies.scales_of_length}


@dataclass(frozen=True, eq=False)
class LayerCalls:
    """Makes the calls of one layer."""

    calls: Calls  #: makes them
    shared: Shared  #: makes what layers share
    layer: ConvertedLayer  #: with the operators
    plan: Plan  #: of the conversion

    def replace(self) -> Remembered:
        """Put calls in the places of the operators, and return what those were connected to."""
        layer, build = self.layer, self.calls.build
        name = f"layers.{layer.plan.layer}.attention"
        with build.before(layer.attention.node, name):
            key, value = (
                self._replaced(encoder, rows)
                for encoder, rows in zip(layer.encoders, self._rows(), strict=True)
            )
        attentions = []
        for each in layer.attentions:
            with build.before(each.node, name):
                output = take_place(each.output, self._attention(each))
                ends = AttentionEnds(each.query, each.past_length, each.bias, each.sink, output)
                attentions.append(ends)
        return Remembered(key, value, tuple(attentions))

    def _rows(self) -> tuple[ir.Value, ...]:
        """Return the new rows of keys and of values, uint8 ``[B, N, T, W]``."""
        encoders, build = self.layer.encoders, self.calls.build
        vectors = [self.calls.wide(encoder.vectors) for encoder in encoders]
        key, value = (encoder.codec for encoder in encoders)
        if key != value:
            return self._encoded(vectors[0], key), self._encoded(vectors[1], value)
        keys_and_values = build.op("Concat", vectors, "keys_and_values", dtype=_FLOAT, axis=1)
        heads = self.layer.plan.kv_num_heads
        return build.ops(
            "Split",
            [self._encoded(keys_and_values, key), build.integers(heads, heads)],
            "rows",
            dtype=_BYTES,
            shapes=[None, None],
            attributes={"axis": 1},
        )

    def _encoded(self, vectors: ir.Value, codec: Codec) -> ir.Value:
        """Return rows of float32 vectors ``[B, N, T, D]``."""
        call, build = self.calls.call, self.calls.build
        planned, size = self.layer.plan, self.layer.plan.head_size
        rotation = tables.rotation(build, self.plan, planned, codec)
        norms = call(bodies.norms_of, vectors)
        turned = call(bodies.turned_units, vectors, norms, rotation)
        codes = call(bodies.codes_of, turned, tables.boundaries(build, codec, size))
        indices = build.op("Cast", [codes], "indices", dtype=_INT32, to=int(_INT32))
        centroids = tables.centroids(build, codec, size)
        quantised = build.op("Gather", [centroids, indices], "quantised", dtype=_FLOAT)
        scaling = _SCALES.get(self.plan.correction_of(codec), bodies.scales_of_product)
        halves = call(
            bodies.half_bytes,
            call(scaling, norms, turned, quantised),
            tables.half_powers(build),
            tables.half_units(build),
            tables.half_bases(build),
            dtype=_BYTES,
        )
        rows = [*self._planes(codes, codec), halves]
        return build.op("Concat", rows, "packed_rows", dtype=_BYTES, axis=-1)

    def _planes(self, codes: ir.Value, codec: Codec) -> list[ir.Value]:
        """Return the planes ``[B, N, T, n]`` of codes in the order of their bytes."""
        call, build = self.calls.call, self.calls.build
        width, count = tables.plane_of(codec), tables.fields_per_byte(codec)
        weights = tables.place_values(build, width, count)
        by_byte = build.integers(0, 0, 0, -1, count)
        if not tables.has_tops(codec):
            return [call(bodies.packed_plane, codes, weights, by_byte, dtype=_BYTES)]
        top = tables.top_value(build, codec)
        tops = call(bodies.tops_of, codes, top)
        remainder = call(bodies.without_tops, codes, tops, top)
        return [
            call(bodies.packed_plane, remainder, weights, by_byte, dtype=_BYTES),
            call(
                bodies.packed_tops,
                tops,
                weights,
                build.integers(0, 0, 0, width, -1, count),
                tables.place_values(build, 1, width),
                dtype=_BYTES,
            ),
        ]

    def _replaced(self, encoder: EncodeNode, rows: ir.Value) -> EncoderEnds:
        """Put a cache with new rows in the place of an encoder's."""
        ends = encoder.vectors, encoder.past, encoder.past_length
        return EncoderEnds(*ends, take_place(encoder.output, self._present(encoder, rows)))

    def _present(self, encoder: EncodeNode, rows: ir.Value) -> ir.Value:
        """Return a cache with new rows."""
        heads, width = self.layer.plan.kv_num_heads, encoder.cache.row_bytes
        past, past_length = encoder.past, encoder.past_length
        used = row_layout(encoder.codec, self.layer.plan.head_size).row_bytes
        if width > used:
            filled = [rows, self.shared.fill(heads, width - used)]
            rows = self.calls.build.op("Concat", filled, "filled", dtype=_BYTES, axis=-1)
        return self.calls.call(
            bodies.appended,
            past,
            self.shared.room(past, past_length, heads, width),
            self.shared.slots(past_length, heads, width),
            rows,
            dtype=_BYTES,
        )

    def _attention(self, node: AttentionNode) -> ir.Value:
        """Return attention over the new caches ``[B, H, T, D]``."""
        shared, calls, build = self.shared, self.calls, self.calls.build
        past_length = node.past_length
        bias = None if node.bias is None else shared.live_bias(node.bias, past_length)
        visible = shared.visible(node, bias)
        scores = self._scores(node)
        masked = [scores, shared.mask(visible, bias)]
        scores = build.op("Add", masked, "masked", dtype=_FLOAT)
        if node.sink is None:
            weights = build.op("Softmax", [scores], "weights", dtype=_FLOAT, axis=-1)
        else:
            weights = calls.call(bodies.softmax_with_sink, scores, node.sink)
        sums = self._sums(node, weights)
        if bias is not None:
            sums = calls.call(bodies.or_zero, shared.sees_any(visible), sums)
        dtype = node.output.dtype or _FLOAT
        if dtype is not _FLOAT:
            sums = build.op("Cast", [sums], "narrow", dtype=dtype, to=int(dtype))
        return sums

    def _scores(self, node: AttentionNode) -> ir.Value:
        """Return scores ``[B, H, T, S]``, without a mask."""
        planned, build = self.layer.plan, self.calls.build
        keys, scales = self._read(node, node.key_cache, planned.key.codec, planned.scale)
        scores = self.calls.call(
            bodies.grouped_scores,
            self.calls.wide(node.query),
            tables.rotation(build, self.plan, planned, planned.key.codec),
            self.shared.grouped_shape(build.integers(planned.head_size), planned.kv_num_heads),
            keys,
            scales,
            self.shared.heads_shape(planned.num_heads),
        )
        if not planned.softcap:
            return scores
        cap = build.constant(f"tq.softcap_{planned.softcap:.9g}", np.float32(planned.softcap))
        return self.calls.call(bodies.capped, scores, cap)

    def _sums(self, node: AttentionNode, weights: ir.Value) -> ir.Value:
        """Return weighted sums ``[B, H, T, D]`` of the values."""
        planned, shared = self.layer.plan, self.shared
        values, scales = self._read(node, node.value_cache, planned.value.codec, 1.0)
        return self.calls.call(
            bodies.grouped_sums,
            weights,
            shared.grouped_shape(shared.total(node.past_length), planned.kv_num_heads),
            scales,
            values,
            shared.heads_shape(planned.num_heads),
            tables.rotation(self.calls.build, self.plan, planned, planned.value.codec),
        )

    def _read(
        self, node: AttentionNode, cache: ir.Value, codec: Codec, factor: float
    ) -> tuple[ir.Value, ir.Value]:
        """Return coordinates ``[B, N, S, D]`` and scales ``[B, N, 1, S]`` times a factor."""
        build, size = self.calls.build, self.layer.plan.head_size
        layout = row_layout(codec, size)
        places = [self._columns(node, plane.offset, plane.size) for plane in layout.planes]
        axes, by_head = build.integers(2, 3), build.integers(0, 0, 0, size)
        centroids = tables.centroids_of_bytes(build, codec, size)
        if tables.has_tops(codec):
            coordinates = self.calls.call(
                bodies.coordinates_of_planes,
                cache,
                *places[0],
                *places[1],
                axes,
                tables.tops_of_bytes(build, codec),
                build.integers(0, 0, 0, -1),
                centroids,
                by_head,
            )
        else:
            coordinates = self.calls.call(
                bodies.coordinates_of, cache, *places[0], axes, centroids, by_head
            )
        scale = layout.field("scale")
        scales = self.calls.call(
            bodies.scales_of,
            cache,
            *self._columns(node, scale.offset, scale.size),
            axes,
            tables.byte_places(build),
            tables.halves(build, factor),
        )
        return coordinates, scales

    def _columns(self, node: AttentionNode, first: int, count: int) -> tuple[ir.Value, ir.Value]:
        """Return the starts and ends of columns of a cache's live rows."""
        start = self.calls.build.integers(0, first)
        return start, self.shared.ends(node.past_length, first + count)
