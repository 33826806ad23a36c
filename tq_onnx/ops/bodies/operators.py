"""The bodies of both operators, in the variant that a model needs.

A function's inputs are not optional, so there are variants of the attention: without
``attention_bias``, with it, and with ``head_sink`` as well. What depends on the codecs is in two
pieces that the variants share (``tq_onnx.ops.bodies.readers``). The attributes ``key_codec`` to
``value_bits`` belong to the signature, which the kernels share; an attention body is made for one
choice and does not read them. A model has one encoder for keys and values: where only one of them
is ``raw``, it tells by ``bits`` which it is called for.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from functools import cache
from typing import Any, Final

from onnxscript import FLOAT, INT64, UINT8, OnnxFunction, script

from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, I64, TURBOQUANT, elements, encode, op
from tq_onnx.ops.bodies.attention import (
    hidden_by_bias,
    live_bias,
    masked_softmax,
    masked_softmax_with_sink,
    total_length,
    visible_keys,
)
from tq_onnx.ops.bodies.encode import append_rows, encode_rows
from tq_onnx.ops.bodies.readers import cache_readers

_WRITE_RAW: Final[dict[str, Any]] = {
    "float32": elements.float_rows,
    "float16": elements.half_rows,
    "bfloat16": elements.bfloat_rows,
}


@cache
def encode_body(key: Codec, value: Codec, element: str) -> OnnxFunction[..., Any]:
    """The encoder's body for a model with these codecs and this element type."""
    coded = [codec.bits for codec in (key, value) if not codec.is_raw]
    if len(coded) == 2:
        return encode.turboquant_encode
    if coded:
        return _encode_either(_WRITE_RAW[element], coded[0])
    return _encode_raw(_WRITE_RAW[element])


def _encode_raw(raw_rows: Any) -> OnnxFunction[..., Any]:
    @script(TURBOQUANT, default_opset=op)
    def turboquant_encode(
        vectors: FLOAT[...],
        past: UINT8[...],
        past_length: INT64[...],
        rotation: FLOAT[...],
        centroids: FLOAT[...],
        boundaries: FLOAT[...],
        codec: str,
        bits: int,
        norm_correction: int,
    ) -> UINT8[...]:
        rows = raw_rows(op.Cast(vectors, to=F32))
        present = append_rows(past, rows, past_length)
        return present

    return turboquant_encode


def _encode_either(raw_rows: Any, coded_bits: int) -> OnnxFunction[..., Any]:
    levels = 1 << coded_bits
    inner_boundaries = levels - 1

    @script(TURBOQUANT, default_opset=op)
    def turboquant_encode(
        vectors: FLOAT[...],
        past: UINT8[...],
        past_length: INT64[...],
        rotation: FLOAT[...],
        centroids: FLOAT[...],
        boundaries: FLOAT[...],
        codec: str,
        bits: int,
        norm_correction: int,
    ) -> UINT8[...]:
        wide = op.Cast(vectors, to=F32)
        raw = raw_rows(wide)
        # Where the codec is raw, one number stands for each of the tables, and what comes of it is
        # dropped.
        size = op.Shape(vectors, start=3)
        coded = encode_rows(
            wide,
            op.Expand(rotation, op.Concat(size, size, axis=0)),
            op.Expand(centroids, op.Constant(value_ints=[levels])),
            op.Expand(boundaries, op.Constant(value_ints=[inner_boundaries])),
            coded_bits,
            norm_correction,
        )
        eight = op.Constant(value_int=8)
        is_raw = op.Cast(op.Greater(op.Constant(value_int=bits), eight), to=I64)
        is_coded = op.Sub(op.Constant(value_int=1), is_raw)
        first = op.Constant(value_ints=[0])
        last = op.Constant(value_ints=[-1])
        coded_bytes = op.Mul(op.Shape(coded, start=3), is_coded)
        raw_bytes = op.Mul(op.Shape(raw, start=3), is_raw)
        rows = op.Concat(
            op.Slice(coded, first, coded_bytes, last),
            op.Slice(raw, first, raw_bytes, last),
            axis=-1,
        )
        present = append_rows(past, rows, past_length)
        return present

    return turboquant_encode


@cache
def attention_body(
    key: Codec, value: Codec, element: str, *, has_bias: bool, has_sink: bool = False
) -> OnnxFunction[..., Any]:
    """The attention operator's body for caches of these codecs and this element type.

    A body with a sink has a bias too.
    """
    scores, sums = cache_readers(key, value, element)
    if has_sink:
        return _with_sink(scores, sums)
    return (_with_bias if has_bias else _without_bias)(scores, sums)


def _without_bias(
    scores_of_cache: OnnxFunction[..., Any], sums_of_cache: OnnxFunction[..., Any]
) -> OnnxFunction[..., Any]:
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
        scores = scores_of_cache(
            query, key_cache, key_rotation, key_centroids, total, scale, softcap
        )
        weights = masked_softmax(scores, visible)
        output = sums_of_cache(
            query, weights, visible, value_cache, value_rotation, value_centroids, total
        )
        return output

    return turboquant_attention


def _with_bias(
    scores_of_cache: OnnxFunction[..., Any], sums_of_cache: OnnxFunction[..., Any]
) -> OnnxFunction[..., Any]:
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
        bias = live_bias(attention_bias, total)
        by_position = visible_keys(query, past_length, total, causal, sliding_window)
        visible = op.And(by_position, op.Not(hidden_by_bias(bias)))
        scores = scores_of_cache(
            query, key_cache, key_rotation, key_centroids, total, scale, softcap
        )
        biased = op.Add(scores, op.Cast(bias, to=F32))
        weights = masked_softmax(biased, visible)
        output = sums_of_cache(
            query, weights, visible, value_cache, value_rotation, value_centroids, total
        )
        return output

    return turboquant_attention


def _with_sink(
    scores_of_cache: OnnxFunction[..., Any], sums_of_cache: OnnxFunction[..., Any]
) -> OnnxFunction[..., Any]:
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
        head_sink: FLOAT[...],
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
        bias = live_bias(attention_bias, total)
        by_position = visible_keys(query, past_length, total, causal, sliding_window)
        visible = op.And(by_position, op.Not(hidden_by_bias(bias)))
        scores = scores_of_cache(
            query, key_cache, key_rotation, key_centroids, total, scale, softcap
        )
        biased = op.Add(scores, op.Cast(bias, to=F32))
        weights = masked_softmax_with_sink(biased, visible, op.Cast(head_sink, to=F32))
        output = sums_of_cache(
            query, weights, visible, value_cache, value_rotation, value_centroids, total
        )
        return output

    return turboquant_attention
