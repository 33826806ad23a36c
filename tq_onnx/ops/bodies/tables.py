"""Resize tables for the branches of a body that serves several codecs.

If a model mixes codecs, runtimes type-check the branch of one codec with the tables of another,
often with the placeholder of one number. So a table of another size is resized to that of the
branch; the branch is not taken then. A table of the right size is not changed.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns; its parameters are inputs and attributes, positional by nature.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from onnxscript import FLOAT, INT64, script

from tq_onnx.ops.bodies import TURBOQUANT, op


@script(TURBOQUANT, default_opset=op)
def in_shape(table: FLOAT[...], shape: INT64[...]) -> FLOAT[...]:
    """The first numbers of a table in a shape, zeros where it has too few."""
    flat = op.Constant(value_ints=[-1])
    first = op.Constant(value_ints=[0])
    count = op.ReduceProd(shape, keepdims=1)
    room = op.Expand(op.Constant(value_float=0.0), count)
    numbers = op.Concat(op.Reshape(table, flat), room, axis=0)
    sized = op.Reshape(op.Slice(numbers, first, count, first), shape)
    return sized


@script(TURBOQUANT, default_opset=op)
def rotation_of_codec(
    rotation: FLOAT[...], head_size: INT64[...], per_coordinate: int
) -> FLOAT[...]:
    """A rotation [D, C], C = per_coordinate * D."""
    columns = op.Mul(head_size, op.Constant(value_int=per_coordinate))
    matrix = in_shape(rotation, op.Concat(head_size, columns, axis=0))
    return matrix


@script(TURBOQUANT, default_opset=op)
def matrices_of_heads(table: FLOAT[...], of_heads: FLOAT[...], head_size: INT64[...]) -> FLOAT[...]:
    """Matrices [N, D, D], N of a tensor [B, N, ...]."""
    heads = op.Shape(of_heads, start=1, end=2)
    matrices = in_shape(table, op.Concat(heads, head_size, head_size, axis=0))
    return matrices
