"""The two TurboQuant operators of a layer: their inputs and attributes, as the plan says.

All nodes of one operator in a model have the same inputs, because one function body serves them:
an input that no layer has is left out, and a layer without what others have gets a filler that
changes nothing (a bias of zero, sinks of minus infinity, offsets of zero that do not turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion import bake
from tq_onnx.conversion.attended_length import attended_length
from tq_onnx.conversion.cachenodes import as_query, leading, padded, past_bytes, turned, unpadded
from tq_onnx.conversion.siteoperands import Operands
from tq_onnx.graph.builder import Builder, Dim
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import LayerPlan, Plan, Role
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.site import Site


@dataclass(frozen=True, eq=False)
class OperatorNodes:
    """Makes the operators of one layer of given values."""

    build: Builder  #: makes the nodes, at the place where it stands
    plan: Plan  #: the conversion
    layer: LayerPlan  #: the layer as it will be
    #: slots in front that hold padding, int64 ``[B]``; None where nothing asks
    left_padding: ir.Value | None = None

    def encode(
        self,
        vectors: ir.Value,
        past: ir.Value,
        past_length: ir.Value,
        role: Role,
        shape: Sequence[Dim] | None,
    ) -> ir.Value:
        """Return a cache with new rows appended: uint8 ``[B, N, S, W]``."""
        build, plan, layer = self.build, self.plan, self.layer
        codec = layer.cache(role).codec
        return build.op(
            Encode.name,
            Encode.arguments(
                {
                    Encode.vectors: vectors,
                    Encode.past: past,
                    Encode.past_length: past_length,
                    Encode.rotation: bake.rotation(build, plan, layer, codec),
                    Encode.centroids: bake.centroids(build, codec, layer.head_size),
                    Encode.boundaries: bake.boundaries(build, codec, layer.head_size),
                    Encode.offset: self._no_offset(),
                    Encode.gains: bake.gains(build, plan, codec),
                    Encode.feedback: bake.no_feedback(build, plan),
                    Encode.frequencies: bake.no_frequencies(build, plan),
                    Encode.left_padding: self.left_padding,
                }
            ),
            f"{Encode.name}_{role}",
            dtype=ir.DataType.UINT8,
            shape=shape,
            domain=DOMAIN,
            **bake.encode_attributes(plan, layer, role),
        )

    def attend(
        self,
        query: ir.Value,
        caches: tuple[ir.Value, ir.Value],
        past_length: ir.Value,
        *,
        bias: ir.Value | None,
        sink: ir.Value | None,
        new: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        """Return attention over caches of keys and of values: ``[B, H, T, D]``."""
        build, plan, layer = self.build, self.plan, self.layer
        key, value = layer.codecs
        return build.op(
            Attention.name,
            Attention.arguments(
                {
                    Attention.query: query,
                    Attention.key_cache: caches[0],
                    Attention.value_cache: caches[1],
                    Attention.past_length: past_length,
                    Attention.key_rotation: bake.rotation(build, plan, layer, key),
                    Attention.key_centroids: bake.centroids(build, key, layer.head_size),
                    Attention.value_rotation: bake.rotation(build, plan, layer, value),
                    Attention.value_centroids: bake.centroids(build, value, layer.head_size),
                    Attention.attention_bias: bias,
                    Attention.head_sink: sink,
                    Attention.key_offset: self._no_offset(),
                    Attention.value_offset: self._no_offset(),
                    Attention.new_keys: new[0] if plan.has_window else None,
                    Attention.new_values: new[1] if plan.has_window else None,
                    Attention.key_frequencies: bake.no_frequencies(build, plan),
                    Attention.left_padding: self.left_padding,
                }
            ),
            Attention.name,
            dtype=ir.DataType[layer.dtype],
            shape=[None, layer.num_heads, None, layer.head_size],
            domain=DOMAIN,
            **bake.attention_attributes(plan, layer),
        )

    def _no_offset(self) -> ir.Value | None:
        return bake.no_offset(self.build, self.layer) if self.plan.centered else None


@dataclass(frozen=True, eq=False)
class LayerNodes:
    """Makes the operators of one layer."""

    build: Builder  #: makes the nodes, at the place where it stands
    plan: Plan  #: the conversion
    site: Site
    layer: LayerPlan  #: the layer as it will be
    past_length: ir.Value  #: tokens in the caches before a call, int64 ``[B]`` or ``[1]``
    #: slots in front that hold padding, int64 ``[B]``; None where nothing asks
    left_padding: ir.Value | None = None

    @property
    def operators(self) -> OperatorNodes:
        """Makes the two operators themselves."""
        return OperatorNodes(self.build, self.plan, self.layer, self.left_padding)

    def vectors(self, cache: Cache, operand: ir.Value, role: Role) -> ir.Value:
        """Return what goes into a cache: floats ``[B, N, T, D]``."""
        build, plan, site = self.build, self.plan, self.site
        rows = turned(build, cache, site, operand, role)
        # Raw rows do not tell their type; attention takes new vectors in the query's.
        if plan.has_window or any(codec.is_raw for pair in plan.pairs for codec in pair):
            rows = as_query(build, site, rows, role)
        return padded(build, site, rows) if role == "value" else rows

    def encode(self, cache: Cache, rows: ir.Value, role: Role) -> ir.Value:
        """Return a cache with new rows appended: uint8 ``[B, N, S, W]``."""
        build, plan, site, layer = self.build, self.plan, self.site, self.layer
        width = layer.cache(role).row_bytes
        overlay_rows = plan.overlay_rows
        past = past_bytes(build, cache, site, rows, width=width, overlay_rows=overlay_rows)
        shape = [*leading(cache, site, overlay_rows), width]
        return self.operators.encode(rows, past, self.past_length, role, shape)

    def attend(
        self,
        operands: Operands,
        caches: tuple[ir.Value, ir.Value],
        new: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        """Return attention over the new caches: ``[B, H, T, D]``, D of the values."""
        attended = attended_length(self.build, self.site, self.past_length, operands.bias)
        result = self.operators.attend(
            operands.query,
            caches,
            attended,
            bias=self._bias(operands),
            sink=self._sinks(operands),
            new=new,
        )
        return unpadded(self.build, self.site, result)

    def _bias(self, operands: Operands) -> ir.Value | None:
        if not self.layer.has_bias:
            return None
        if operands.bias is not None:
            return operands.bias
        dtype = self.site.dtype
        return self.build.constant(
            f"tq.{dtype.name}.no_bias", np.zeros((1, 1, 1, 1), dtype.numpy())
        )

    def _sinks(self, operands: Operands) -> ir.Value | None:
        if not self.layer.has_sink:
            return None
        if operands.sink is not None:
            return operands.sink
        dtype, heads = self.site.dtype, self.site.num_heads
        none = np.full(heads, -np.inf).astype(dtype.numpy())
        return self.build.constant(f"tq.{dtype.name}.no_sinks_of_{heads}", none)
