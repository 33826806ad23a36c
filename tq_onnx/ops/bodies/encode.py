"""The piece of TurboQuantEncode that all codecs share: rows go into the cache."""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from onnxscript import INT64, UINT8, script

from tq_onnx.ops.bodies import TURBOQUANT, U8, op


@script(TURBOQUANT, default_opset=op)
def append_rows(past: UINT8[...], rows: UINT8[...], past_length: INT64[...]) -> UINT8[...]:
    """Cache [B, N, S, W] with row t of sequence b in slot past_length[b] + t.

    S is the capacity of past, or what the longest sequence needs if that is more; slots that no row
    was written to keep what past holds, or zero bytes. Rows that are narrower than those of past
    are filled up with zero bytes.
    """
    first = op.Constant(value_ints=[0])
    nothing = op.Cast(op.Constant(value_int=0), to=U8)
    new = op.Shape(rows, start=2, end=3)
    longest = op.ReduceMax(past_length, keepdims=1)
    missing = op.Max(op.Sub(op.Add(longest, new), op.Shape(past, start=2, end=3)), first)
    width = op.Shape(past, start=3)
    room_shape = op.Concat(op.Shape(past, start=0, end=2), missing, width, axis=0)
    room = op.Expand(nothing, room_shape)
    free_bytes = op.Sub(width, op.Shape(rows, start=3))
    fill_shape = op.Concat(op.Shape(rows, start=0, end=3), free_bytes, axis=0)
    filled = op.Concat(rows, op.Expand(nothing, fill_shape), axis=-1)
    steps = op.Range(op.Constant(value_int=0), op.Squeeze(new), op.Constant(value_int=1))
    slots = op.Add(
        op.Reshape(past_length, op.Constant(value_ints=[-1, 1, 1, 1])),
        op.Unsqueeze(steps, op.Constant(value_ints=[1])),
    )
    present = op.ScatterElements(
        op.Concat(past, room, axis=2), op.Expand(slots, op.Shape(filled)), filled, axis=2
    )
    return present
