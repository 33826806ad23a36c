"""The bodies of both operators, in the variant that a model needs.

A function's inputs are not optional, so there is a variant of the attention with ``attention_bias``
and one without. The codecs decide how rows are written and read: see ``_Reader``. The attributes
``key_codec`` to ``value_bits`` belong to the signature, which the kernels share; an attention body
is made for one choice and does not read them. A model has one encoder for keys and values: where
only one of them is ``raw``, it tells by ``bits`` which it is called for.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from onnxscript import FLOAT, INT64, UINT8, OnnxFunction, script

from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, I64, TURBOQUANT, attention, elements, encode, op, planes
from tq_onnx.ops.bodies.attention import (
    hidden_by_bias,
    key_scores,
    live_rows,
    masked_softmax,
    of_all_heads,
    total_length,
    value_weights,
    visible_keys,
)
from tq_onnx.ops.bodies.encode import append_rows, encode_rows
from tq_onnx.ops.bodies.half import row_scales

_CENTROIDS: Final[dict[int, Any]] = {
    2: planes.centroids_of_2_bits,
    3: planes.centroids_of_3_bits,
    4: planes.centroids_of_4_bits,
}
_WRITE_RAW: Final[dict[str, Any]] = {
    "float32": elements.float_rows,
    "float16": elements.half_rows,
    "bfloat16": elements.bfloat_rows,
}
_READ_RAW: Final[dict[str, Any]] = {
    "float32": elements.floats_of_rows,
    "float16": elements.halves_of_rows,
    "bfloat16": elements.bfloats_of_rows,
}


@dataclass(frozen=True)
class _Reader:
    """How attention reads the rows of a codec.

    Attributes:
        coordinates: rows and centroids to coordinates, scales left out.
        scales: rows to their scales.
        turn: brings queries to where the coordinates are; takes the rotation.
        turn_back: brings sums of coordinates back; takes the rotation.
        add: weighted sum of coordinates.
    """

    coordinates: Any
    scales: Any
    turn: Any
    turn_back: Any
    add: Any


def _reader(codec: Codec, element: str) -> _Reader:
    if codec.is_raw:
        same = elements.not_rotated
        return _Reader(_READ_RAW[element], elements.no_scales, same, same, elements.sum_of_floats)
    return _Reader(
        _CENTROIDS[codec.bits],
        row_scales,
        attention.rotated,
        attention.rotated_back,
        attention.sum_of_centroids,
    )


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
    key: Codec, value: Codec, element: str, *, has_bias: bool
) -> OnnxFunction[..., Any]:
    """The attention operator's body for caches of these codecs and this element type."""
    build = _with_bias if has_bias else _without_bias
    return build(_reader(key, element), _reader(value, element))


def _without_bias(key: _Reader, value: _Reader) -> OnnxFunction[..., Any]:
    key_coordinates, key_scales, key_turn = key.coordinates, key.scales, key.turn
    value_coordinates, value_scales = value.coordinates, value.scales
    value_sums, value_turn_back = value.add, value.turn_back

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
        keys = live_rows(key_cache, total)
        values = live_rows(value_cache, total)
        turned = key_turn(op.Cast(query, to=F32), key_rotation)
        coordinates = key_coordinates(keys, key_centroids)
        scores = key_scores(turned, coordinates, key_scales(keys), scale, softcap)
        softened = masked_softmax(scores, visible)
        weights = value_weights(softened, visible, value_scales(values))
        sums = value_sums(weights, value_coordinates(values, value_centroids))
        context = value_turn_back(of_all_heads(sums, query), value_rotation)
        output = op.CastLike(context, query)
        return output

    return turboquant_attention


def _with_bias(key: _Reader, value: _Reader) -> OnnxFunction[..., Any]:
    key_coordinates, key_scales, key_turn = key.coordinates, key.scales, key.turn
    value_coordinates, value_scales = value.coordinates, value.scales
    value_sums, value_turn_back = value.add, value.turn_back

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
        turned = key_turn(op.Cast(query, to=F32), key_rotation)
        coordinates = key_coordinates(keys, key_centroids)
        scores = key_scores(turned, coordinates, key_scales(keys), scale, softcap)
        softened = masked_softmax(op.Add(scores, op.Cast(bias, to=F32)), visible)
        weights = value_weights(softened, visible, value_scales(values))
        sums = value_sums(weights, value_coordinates(values, value_centroids))
        context = value_turn_back(of_all_heads(sums, query), value_rotation)
        output = op.CastLike(context, query)
        return output

    return turboquant_attention
