"""The two pieces of the attention operator's body that depend on the codecs of the caches.

One makes scores of a query and the key cache, the other weighted sums of the value cache; the
variants of the body share them (``tq_onnx.ops.bodies.operators``).
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from onnxscript import BOOL, FLOAT, INT64, UINT8, OnnxFunction, script

from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import F32, TURBOQUANT, attention, elements, op, planes
from tq_onnx.ops.bodies.attention import key_scores, live_rows, of_all_heads, value_weights
from tq_onnx.ops.bodies.half import row_scales

_CENTROIDS: Final[dict[int, Any]] = {
    2: planes.centroids_of_2_bits,
    3: planes.centroids_of_3_bits,
    4: planes.centroids_of_4_bits,
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
def cache_readers(
    key: Codec, value: Codec, element: str
) -> tuple[OnnxFunction[..., Any], OnnxFunction[..., Any]]:
    """The pieces of the attention operator's body that depend on the codecs."""
    return _scores(_reader(key, element)), _sums(_reader(value, element))


def _scores(key: _Reader) -> OnnxFunction[..., Any]:
    coordinates_of, scales_of, turn = key.coordinates, key.scales, key.turn

    @script(TURBOQUANT, default_opset=op)
    def scores_of_cache(
        query: FLOAT[...],
        key_cache: UINT8[...],
        key_rotation: FLOAT[...],
        key_centroids: FLOAT[...],
        total: INT64[...],
        scale: float,
        softcap: float,
    ) -> FLOAT[...]:
        """Scores [B, H, T, total] of queries against the rows of a cache."""
        keys = live_rows(key_cache, total)
        turned = turn(op.Cast(query, to=F32), key_rotation)
        coordinates = coordinates_of(keys, key_centroids)
        scores = key_scores(turned, coordinates, scales_of(keys), scale, softcap)
        return scores

    return scores_of_cache


def _sums(value: _Reader) -> OnnxFunction[..., Any]:
    coordinates_of, scales_of, add, turn_back = (
        value.coordinates,
        value.scales,
        value.add,
        value.turn_back,
    )

    @script(TURBOQUANT, default_opset=op)
    def sums_of_cache(
        query: FLOAT[...],
        weights: FLOAT[...],
        visible: BOOL[...],
        value_cache: UINT8[...],
        value_rotation: FLOAT[...],
        value_centroids: FLOAT[...],
        total: INT64[...],
    ) -> FLOAT[...]:
        """Weighted sums [B, H, T, D] of the rows of a cache, in the type of the query."""
        values = live_rows(value_cache, total)
        scaled = value_weights(weights, visible, scales_of(values))
        sums = add(scaled, coordinates_of(values, value_centroids))
        context = turn_back(of_all_heads(sums, query), value_rotation)
        output = op.CastLike(context, query)
        return output

    return sums_of_cache
