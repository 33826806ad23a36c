"""Caches with codes and fields apart as caches of rows, and back (``tq_onnx/codec/planes.py``)."""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from onnxscript import UINT8, script

from tq_onnx.ops.bodies import TURBOQUANT, op


@script(TURBOQUANT, default_opset=op)
def rows_of_planes(cache: UINT8[...], field_bytes: int, overlay_rows: int) -> UINT8[...]:
    """Rows [B, N, S, W] of planes, whose bytes of a sequence are [N, S - R, W - F], [N, S - R, F]
    and the overlay [N, R, W].
    """
    unit = op.Constant(value_ints=[1])
    leading = op.Shape(cache, start=0, end=2)
    batch = op.Shape(cache, start=0, end=1)
    heads = op.Shape(cache, start=1, end=2)
    rows_in_all = op.Shape(cache, start=2, end=3)
    width = op.Shape(cache, start=3)
    fields = op.Mul(op.Constant(value_int=field_bytes), unit)
    overlay = op.Min(op.Mul(op.Constant(value_int=overlay_rows), unit), rows_in_all)
    slots = op.Sub(rows_in_all, overlay)
    codes = op.Sub(width, fields)
    zero = op.Constant(value_ints=[0])
    fields_begin = op.Mul(heads, op.Mul(slots, codes))
    overlay_begin = op.Mul(heads, op.Mul(slots, width))
    bytes_in_all = op.Mul(heads, op.Mul(rows_in_all, width))
    flat = op.Reshape(cache, op.Concat(batch, bytes_in_all, axis=0), allowzero=1)
    coded = op.Slice(flat, zero, fields_begin, unit)
    behind = op.Slice(flat, fields_begin, overlay_begin, unit)
    front = op.Slice(flat, overlay_begin, bytes_in_all, unit)
    tokens = op.Concat(
        op.Reshape(coded, op.Concat(leading, slots, codes, axis=0), allowzero=1),
        op.Reshape(behind, op.Concat(leading, slots, fields, axis=0), allowzero=1),
        axis=-1,
    )
    overlay_shape = op.Concat(leading, overlay, width, axis=0)
    rows = op.Concat(op.Reshape(front, overlay_shape, allowzero=1), tokens, axis=2)
    return rows


@script(TURBOQUANT, default_opset=op)
def planes_of_rows(rows: UINT8[...], field_bytes: int, overlay_rows: int) -> UINT8[...]:
    """Planes of rows [B, N, S, W]: the inverse of RowsOfPlanes."""
    zero = op.Constant(value_ints=[0])
    unit = op.Constant(value_ints=[1])
    two = op.Constant(value_ints=[2])
    last = op.Constant(value_ints=[-1])
    batch = op.Shape(rows, start=0, end=1)
    rows_in_all = op.Shape(rows, start=2, end=3)
    width = op.Shape(rows, start=3)
    overlay = op.Min(op.Mul(op.Constant(value_int=overlay_rows), unit), rows_in_all)
    codes = op.Sub(width, op.Mul(op.Constant(value_int=field_bytes), unit))
    front = op.Slice(rows, zero, overlay, two)
    behind = op.Slice(rows, overlay, rows_in_all, two)
    heads = op.Shape(rows, start=1, end=2)
    slots = op.Sub(rows_in_all, overlay)
    fields = op.Sub(width, codes)
    coded_size = op.Mul(heads, op.Mul(slots, codes))
    field_size = op.Mul(heads, op.Mul(slots, fields))
    front_size = op.Mul(heads, op.Mul(overlay, width))
    coded = op.Slice(behind, zero, codes, last)
    of_fields = op.Slice(behind, codes, width, last)
    flat = op.Concat(
        op.Reshape(coded, op.Concat(batch, coded_size, axis=0), allowzero=1),
        op.Reshape(of_fields, op.Concat(batch, field_size, axis=0), allowzero=1),
        op.Reshape(front, op.Concat(batch, front_size, axis=0), allowzero=1),
        axis=1,
    )
    planes = op.Reshape(flat, op.Shape(rows), allowzero=1)
    return planes
