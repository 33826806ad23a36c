"""The body of TurboQuantDequantAttention, in the variant that a model needs.

A function's inputs are not optional, so there is a variant with ``attention_bias`` and one without.
The codecs decide how rows are unpacked. The attributes ``key_codec`` to ``value_bits`` belong to
the signature, which the kernels share; a body is made for one choice and does not read them.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from functools import cache
from typing import Any, Final

from onnxscript import FLOAT, INT64, UINT8, OnnxFunction, script

from tq_onnx.ops.bodies import F32, TURBOQUANT, op, planes
from tq_onnx.ops.bodies.attention import (
    attend,
    hidden_by_bias,
    live_rows,
    total_length,
    visible_keys,
)
from tq_onnx.ops.bodies.half import row_scales

_UNPACK: Final[dict[int, Any]] = {
    2: planes.unpack_codes_2,
    3: planes.unpack_codes_3,
    4: planes.unpack_codes_4,
}


@cache
def attention_body(key_bits: int, value_bits: int, has_bias: bool) -> OnnxFunction[..., Any]:
    """The attention operator's body for lloyd_max codecs of these bits."""
    build = _with_bias if has_bias else _without_bias
    return build(_UNPACK[key_bits], _UNPACK[value_bits])


def _without_bias(unpack_key: Any, unpack_value: Any) -> OnnxFunction[..., Any]:
    @script(TURBOQUANT, default_opset=op)
    def turboquant_attention(
        query: FLOAT[...],
        key_cache: UINT8[...],
        value_cache: UINT8[...],
        past_length: INT64[...],
        key_rotation: FLOAT[...],
        key_centroids: FLOAT[...],
        value_rotation: FLOAT[...],
        value_centroids: FLOAT[...],
        scale: float,
        causal: int,
        sliding_window: int,
        softcap: float,
        key_codec: str,
        key_bits: int,
        value_codec: str,
        value_bits: int,
    ) -> FLOAT[...]:
        total = total_length(query, past_length)
        visible = visible_keys(query, past_length, total, causal, sliding_window)
        no_bias = op.Constant(value_float=0.0)
        keys = live_rows(key_cache, total)
        values = live_rows(value_cache, total)
        output = attend(
            query,
            unpack_key(keys),
            row_scales(keys),
            key_rotation,
            key_centroids,
            unpack_value(values),
            row_scales(values),
            value_rotation,
            value_centroids,
            visible,
            no_bias,
            scale,
            softcap,
        )
        return output

    return turboquant_attention


def _with_bias(unpack_key: Any, unpack_value: Any) -> OnnxFunction[..., Any]:
    @script(TURBOQUANT, default_opset=op)
    def turboquant_attention(
        query: FLOAT[...],
        key_cache: UINT8[...],
        value_cache: UINT8[...],
        past_length: INT64[...],
        key_rotation: FLOAT[...],
        key_centroids: FLOAT[...],
        value_rotation: FLOAT[...],
        value_centroids: FLOAT[...],
        attention_bias: FLOAT[...],
        scale: float,
        causal: int,
        sliding_window: int,
        softcap: float,
        key_codec: str,
        key_bits: int,
        value_codec: str,
        value_bits: int,
    ) -> FLOAT[...]:
        total = total_length(query, past_length)
        first = op.Constant(value_ints=[0])
        bias = op.Slice(attention_bias, first, total, op.Constant(value_ints=[3]))
        by_position = visible_keys(query, past_length, total, causal, sliding_window)
        visible = op.And(by_position, op.Not(hidden_by_bias(bias)))
        keys = live_rows(key_cache, total)
        values = live_rows(value_cache, total)
        output = attend(
            query,
            unpack_key(keys),
            row_scales(keys),
            key_rotation,
            key_centroids,
            unpack_value(values),
            row_scales(values),
            value_rotation,
            value_centroids,
            visible,
            op.Cast(bias, to=F32),
            scale,
            softcap,
        )
        return output

    return turboquant_attention
