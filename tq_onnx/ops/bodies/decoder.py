"""Bodies of the decoder's own operators: normalisation, rotation of positions, activation, layout.

Each is one function, polymorphic in its element type: what computes does so in float32 and rounds
once. Bodies check nothing; the kernels refuse positions and indices that are out of range.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Sequence  # noqa: UP035 - onnxscript reads it on Python 3.10

from onnxscript import FLOAT, INT64, OnnxFunction, script

from tq_onnx.ops import domain
from tq_onnx.ops.bodies import F32, TURBOQUANT, op


@script(TURBOQUANT, default_opset=op)
def rms_normalization(X: FLOAT[...], scale: FLOAT[...], epsilon: float) -> FLOAT[...]:
    """X / sqrt(mean(X * X) + epsilon) * scale over the last dimension."""
    wide = op.Cast(X, to=F32)
    last = op.Constant(value_ints=[-1])
    squares = op.ReduceSum(op.Mul(wide, wide), last, keepdims=1)
    mean = op.Div(squares, op.Cast(op.Shape(scale), to=F32))
    length = op.Sqrt(op.Add(mean, op.Constant(value_float=epsilon)))
    scaled = op.Mul(op.Div(wide, length), op.Cast(scale, to=F32))
    Y = op.CastLike(scaled, X)
    return Y


@script(TURBOQUANT, default_opset=op)
def rotary_embedding(
    X: FLOAT[...], cos_cache: FLOAT[...], sin_cache: FLOAT[...], position_ids: INT64[...]
) -> FLOAT[...]:
    """X [B, N, T, D] turned by the angles of its positions [B or 1, T], halves form."""
    heads = op.Constant(value_ints=[1])
    cosines = op.Unsqueeze(op.Gather(cos_cache, position_ids, axis=0), heads)
    sines = op.Unsqueeze(op.Gather(sin_cache, position_ids, axis=0), heads)
    wide = op.Cast(X, to=F32)
    last = op.Constant(value_ints=[3])
    half = op.Shape(cos_cache, start=1)
    first = op.Slice(wide, op.Constant(value_ints=[0]), half, last)
    second = op.Slice(wide, half, op.Shape(X, start=3), last)
    turned_first = op.Sub(op.Mul(first, cosines), op.Mul(second, sines))
    turned_second = op.Add(op.Mul(second, cosines), op.Mul(first, sines))
    Y = op.CastLike(op.Concat(turned_first, turned_second, axis=-1), X)
    return Y


@script(TURBOQUANT, default_opset=op)
def swish(X: FLOAT[...]) -> FLOAT[...]:
    """X / (1 + exp(-X))."""
    wide = op.Cast(X, to=F32)
    denominator = op.Add(op.Exp(op.Neg(wide)), op.Constant(value_float=1.0))
    Y = op.CastLike(op.Div(wide, denominator), X)
    return Y


@script(TURBOQUANT, default_opset=op)
def transpose(X: FLOAT[...], perm: Sequence[int]) -> FLOAT[...]:
    """The dimensions of X in the order perm."""
    Y = op.Transpose(X, perm=perm)
    return Y


@script(TURBOQUANT, default_opset=op)
def gather(data: FLOAT[...], indices: INT64[...]) -> FLOAT[...]:
    """Rows of data [V, E]."""
    Y = op.Gather(data, indices, axis=0)
    return Y


BODIES: Final[Mapping[str, OnnxFunction[..., Any]]] = {
    domain.RMS_NORMALIZATION: rms_normalization,
    domain.ROTARY_EMBEDDING: rotary_embedding,
    domain.SWISH: swish,
    domain.TRANSPOSE: transpose,
    domain.GATHER: gather,
}
"""The bodies by the operators' names."""
