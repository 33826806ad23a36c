"""The body of TurboQuantEncode: normalise, rotate, quantise, pack, and put the rows in their slots.

Formulas: ``tq_onnx/codec/spec.py`` and the codec section of the specification. A row whose norm is
not finite is encoded as the zero vector, so that one bad token cannot spoil a sequence.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504, PLR0917

from __future__ import annotations

from typing import Final

from onnxscript import FLOAT, INT64, UINT8, script

from tq_onnx.ops.bodies import BOOLEAN, F32, I32, TURBOQUANT, U8, op
from tq_onnx.ops.bodies.half import scale_to_bytes
from tq_onnx.ops.bodies.planes import pack_codes

_LARGEST: Final = 3.4028234663852886e38


@script(TURBOQUANT, default_opset=op)
def quantise(directions: FLOAT[...], rotation: FLOAT[...], boundaries: FLOAT[...]) -> FLOAT[...]:
    """Codes [B, N, T, D] of unit vectors: how many boundaries each rotated coordinate reaches."""
    rotated = op.MatMul(directions, rotation)
    levels_first = op.Reshape(boundaries, op.Constant(value_ints=[-1, 1, 1, 1, 1]))
    reached = op.Cast(op.GreaterOrEqual(rotated, levels_first), to=F32)
    codes = op.ReduceSum(reached, op.Constant(value_ints=[0]), keepdims=0)
    return codes


@script(TURBOQUANT, default_opset=op)
def encode_rows(
    vectors: FLOAT[...],
    rotation: FLOAT[...],
    centroids: FLOAT[...],
    boundaries: FLOAT[...],
    bits: int,
    norm_correction: int,
) -> UINT8[...]:
    """Rows [B, N, T, W] of vectors [B, N, T, D]: the planes of the codes, then the scale.

    scale = norm / |centroids[codes]| with norm correction, else norm; float16.
    """
    last = op.Constant(value_ints=[-1])
    zero = op.Constant(value_float=0.0)
    one = op.Constant(value_float=1.0)
    measured = op.Sqrt(op.ReduceSum(op.Mul(vectors, vectors), last, keepdims=1))
    # Comparisons with NaN are false: NaN, Inf and overflow all fail the second one.
    usable = op.And(
        op.Greater(measured, zero),
        op.LessOrEqual(measured, op.Constant(value_float=_LARGEST)),
    )
    norm = op.Where(usable, measured, zero)
    directions = op.Where(usable, op.Div(vectors, op.Where(usable, measured, one)), zero)
    codes = quantise(directions, rotation, boundaries)
    quantised = op.Gather(centroids, op.Cast(codes, to=I32))
    length = op.Sqrt(op.ReduceSum(op.Mul(quantised, quantised), last, keepdims=1))
    corrected = op.Cast(op.Constant(value_int=norm_correction), to=BOOLEAN)
    scale = op.Div(norm, op.Where(corrected, length, one))
    rows = op.Concat(pack_codes(codes, bits), scale_to_bytes(scale), axis=-1)
    return rows


@script(TURBOQUANT, default_opset=op)
def append_rows(past: UINT8[...], rows: UINT8[...], past_length: INT64[...]) -> UINT8[...]:
    """Cache [B, N, S, W] with row t of sequence b in slot past_length[b] + t.

    S is the capacity of past, or what the longest sequence needs if that is more; slots that no row
    was written to keep what past holds, or zero bytes.
    """
    first = op.Constant(value_ints=[0])
    new = op.Shape(rows, start=2, end=3)
    longest = op.ReduceMax(past_length, keepdims=1)
    missing = op.Max(op.Sub(op.Add(longest, new), op.Shape(past, start=2, end=3)), first)
    row_bytes = op.Shape(rows, start=3)
    room_shape = op.Concat(op.Shape(past, start=0, end=2), missing, row_bytes, axis=0)
    room = op.Expand(op.Cast(op.Constant(value_int=0), to=U8), room_shape)
    steps = op.Range(op.Constant(value_int=0), op.Squeeze(new), op.Constant(value_int=1))
    slots = op.Add(
        op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1, 1])),
        op.Unsqueeze(steps, op.Constant(value_ints=[1])),
    )
    present = op.ScatterElements(
        op.Concat(past, room, axis=2), op.Expand(slots, op.Shape(rows)), rows, axis=2
    )
    return present


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
    """Quantises new key or value vectors and appends them to a compressed cache (TurboQuant)."""
    rows = encode_rows(
        op.Cast(vectors, to=F32), rotation, centroids, boundaries, bits, norm_correction
    )
    present = append_rows(past, rows, past_length)
    return present
