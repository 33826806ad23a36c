"""The two TurboQuant operators of a layer: their inputs and attributes, as the plan says.

All nodes of one operator in a model have the same inputs, because one function body serves them:
an input that no layer has is left out, and a layer without what others have gets a filler that
changes nothing (a bias of zero, sinks of minus infinity, offsets of zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion import bake
from tq_onnx.conversion.cachenodes import as_query, leading, past_bytes, turned
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE
from tq_onnx.plan import LayerPlan, Plan
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.site import Operands, Site

Role = Literal["key", "value"]


@dataclass(frozen=True, eq=False)
class LayerNodes:
    """Makes the operators of one layer.

    Attributes:
        build: makes the nodes, at the place where it stands.
        plan: the conversion.
        site: the layer as it was.
        layer: the layer as it will be.
        past_length: tokens in the caches before a call, int64 ``[B]`` or ``[1]``.
    """

    build: Builder
    plan: Plan
    site: Site
    layer: LayerPlan
    past_length: ir.Value

    def encode(self, cache: Cache, operand: ir.Value, role: Role) -> ir.Value:
        """A cache with new rows appended: uint8 ``[B, N, S, W]``."""
        build, plan, site, layer = self.build, self.plan, self.site, self.layer
        is_key = role == "key"
        codec = layer.key_of if is_key else layer.value_of
        width = layer.key_row_bytes if is_key else layer.value_row_bytes
        rows = turned(build, cache, site, operand, role)
        if any(one.is_raw for pair in plan.pairs for one in pair):
            rows = as_query(build, site, rows, role)
        inputs = [
            rows,
            past_bytes(build, cache, site, width, rows),
            self.past_length,
            bake.rotation(build, plan, layer, codec),
            bake.centroids(build, codec, layer.head_size),
            bake.boundaries(build, codec, layer.head_size),
        ]
        if plan.centered:
            inputs.append(bake.no_offset(build, layer))
        return build.op(
            ENCODE,
            inputs,
            f"{ENCODE}_{role}",
            dtype=ir.DataType.UINT8,
            shape=[*leading(cache, site), width],
            domain=DOMAIN,
            codec=codec.kind,
            bits=codec.bits,
            norm_correction=int(plan.norm_correction and codec.corrects_norm),
            **bake.codec_index(plan, "", codec),
        )

    def attend(self, operands: Operands, key: ir.Value, value: ir.Value) -> ir.Value:
        """Attention over the new caches: ``[B, H, T, D]``."""
        build, plan, layer = self.build, self.plan, self.layer
        inputs: list[ir.Value | None] = [operands.query, key, value, self.past_length]
        for codec in layer.codecs:
            inputs.append(bake.rotation(build, plan, layer, codec))
            inputs.append(bake.centroids(build, codec, layer.head_size))
        inputs.append((operands.bias or self._no_bias()) if layer.has_bias else None)
        inputs.append((operands.sink or self._no_sinks()) if layer.has_sink else None)
        inputs += [bake.no_offset(build, layer) if plan.centered else None] * 2
        while inputs[-1] is None:
            inputs.pop()
        return build.op(
            ATTENTION,
            inputs,
            ATTENTION,
            dtype=self.site.dtype,
            shape=[None, layer.num_heads, None, layer.head_size],
            domain=DOMAIN,
            scale=layer.scale,
            causal=int(layer.causal),
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
            key_codec=layer.key_codec,
            key_bits=layer.key_bits,
            value_codec=layer.value_codec,
            value_bits=layer.value_bits,
            **bake.codec_index(plan, "key_", layer.key_of),
            **bake.codec_index(plan, "value_", layer.value_of),
        )

    def _no_bias(self) -> ir.Value:
        dtype = self.site.dtype
        return self.build.constant(
            f"tq.{dtype.name}.no_bias", np.zeros((1, 1, 1, 1), dtype.numpy())
        )

    def _no_sinks(self) -> ir.Value:
        dtype, heads = self.site.dtype, self.site.num_heads
        none = np.full(heads, -np.inf).astype(dtype.numpy())
        return self.build.constant(f"tq.{dtype.name}.no_sinks_of_{heads}", none)
