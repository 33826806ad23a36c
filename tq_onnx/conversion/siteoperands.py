"""Make the nodes around attention that a site calls for: its operands, and the form of its result.

What a fused operator does inside is made of nodes of its own: it splits heads, norms and rotates
them (``tq_onnx.recognise.operands``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.bias import make_bias
from tq_onnx.conversion.past_length import new_tokens, stated_length, steps
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.values import rank
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.recognise.operands import FLAT_HEADS, FOLDED_HEADS, MERGED_HEADS, Rotation, Vectors
from tq_onnx.recognise.site import Site

_I64 = ir.DataType.INT64


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of attention: query ``[B, H, T, D]``, new rows ``[B, N, T, D]``, additive bias.

    The sink, ``[H]``, is a further score of each head that has no value.

    New rows of an update may have its layout: see ``Cache.turn``.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    sink: ir.Value | None = None


def make_operands(build: Builder, site: Site) -> Operands:
    """Make the operands, before the nodes that will read them."""
    scope = f"layers.{site.layer}.attention"
    values = [vectors.value for vectors in site.vectors]
    if site.packed:
        values = _unpacked(build, site)
    query = _heads(build, site, values[0], site.query, "query")
    with build.before(site.key.node, scope):
        key = _heads(build, site, values[1], site.new_key, "key")
    with build.before(site.value.node, scope):
        value = _heads(build, site, values[2], site.new_value, "value")
    if site.rotation is not None:
        query = _rotated(build, site, site.rotation, query, "query")
        key = _rotated(build, site, site.rotation, key, "key")
    return Operands(query, key, value, make_bias(build, site), _sinks(build, site))


def _unpacked(build: Builder, site: Site) -> list[ir.Value]:
    widths = [_count(site, role) * site.head_size for role in ("query", "key", "value")]
    return list(
        build.ops(
            "Split",
            [site.query.value, build.integers(*widths)],
            "split_qkv",
            dtype=site.dtype,
            shapes=[[None, None, width] for width in widths],
            attributes={"axis": -1},
        )
    )


def _count(site: Site, role: str) -> int:
    return site.num_heads if role == "query" else site.kv_num_heads


def _heads(build: Builder, site: Site, value: ir.Value, vectors: Vectors, role: str) -> ir.Value:
    """Return ``[B, heads, T, D]``, also of heads side by side."""
    if not vectors.is_flat:
        return value
    heads, size = _count(site, role), site.size_of(role)
    if vectors.bias is not None:
        bias = build.constant(f"layers.{site.layer}.attention.bias_{role}", vectors.bias)
        flat = [None, None, heads * size]
        value = build.op("Add", [value, bias], f"add_bias_{role}", dtype=site.dtype, shape=flat)
    shape = [None, None, heads, size]
    rows_BTHD = build.op(
        "Reshape",
        [value, build.integers(0, 0, heads, size)],
        f"split_heads_{role}",
        dtype=site.dtype,
        shape=shape,
    )
    if vectors.norm is not None:
        rows_BTHD = build.op(
            "SimplifiedLayerNormalization",
            [rows_BTHD, vectors.norm.weight],
            f"norm_{role}",
            dtype=site.dtype,
            shape=shape,
            axis=-1,
            epsilon=vectors.norm.epsilon,
            stash_type=1,
        )
    return build.op(
        "Transpose",
        [rows_BTHD],
        f"transpose_{role}",
        dtype=site.dtype,
        shape=[None, heads, None, size],
        perm=[0, 2, 1, 3],
    )


def _rotated(
    build: Builder, site: Site, rotation: Rotation, heads_BHTD: ir.Value, role: str
) -> ir.Value:
    partial: dict[str, int] = {}
    if rotation.width != site.head_size:
        partial = {"rotary_embedding_dim": rotation.width, "num_heads": _count(site, role)}
    positions = rotation.positions
    if positions is None:
        key = "positions", site.last_key, site.query_lengths
        positions = build.once(key, lambda: _positions(build, site))
    return build.op(
        "RotaryEmbedding",
        [heads_BHTD, positions, rotation.cos, rotation.sin],
        f"rotary_{role}",
        dtype=site.dtype,
        shape=[None, _count(site, role), None, site.head_size],
        domain=MICROSOFT,
        interleaved=rotation.interleaved,
        **partial,
    )


def _positions(build: Builder, site: Site) -> ir.Value:
    """Return the past length and the numbers that follow it: int64 ``[B, T]``."""
    past_length = stated_length(build, site)
    assert past_length is not None  # an operator that rotates counts tokens
    column = build.op(
        "Unsqueeze",
        [past_length, build.integers(1)],
        "past_length_column",
        dtype=_I64,
        shape=[None, 1],
    )
    numbers = steps(build, new_tokens(build, site), "new_tokens_scalar", "steps")
    return build.op("Add", [column, numbers], "positions", dtype=_I64, shape=[None, None])


def _sinks(build: Builder, site: Site) -> ir.Value | None:
    """Return the sinks ``[H]``, in the query's type; None if there are none."""
    if not site.has_sink:
        return None
    sinks, dtype, heads = site.sinks, site.dtype, site.num_heads
    if sinks is None:
        zeros = np.zeros(heads, dtype.numpy())
        return build.constant(f"tq.{dtype.name}.sinks_of_zero_{heads}", zeros)
    if rank(sinks) != 4:
        return sinks
    if sinks.dtype is not dtype:
        shape = [1, heads, 1, 1]
        sinks = build.op("Cast", [sinks], "cast_sinks", dtype=dtype, shape=shape, to=int(dtype))
    return build.op("Reshape", [sinks, build.integers(-1)], "sinks", dtype=dtype, shape=[heads])


def make_result(build: Builder, site: Site, attention_BHTD: ir.Value) -> ir.Value:
    """Give the operator's result the form of ``site.output``."""
    result, dtype = attention_BHTD, site.output.dtype or site.dtype
    heads, size = site.num_heads, site.result_size
    if dtype != site.dtype:
        shape = [None, heads, None, size]
        result = build.op("Cast", [result], "cast_output", dtype=dtype, shape=shape, to=int(dtype))
    if site.output_dims == FLAT_HEADS:
        result = build.op(
            "Transpose",
            [result],
            "transpose_output",
            dtype=dtype,
            shape=[None, None, heads, size],
            perm=[0, 2, 1, 3],
        )
        sizes, label = [heads * size], "merge_heads"
        target, shape = build.integers(0, 0, *sizes), [None, None, *sizes]
    elif site.output_dims == FOLDED_HEADS:
        sizes, label = [site.kv_num_heads, heads // site.kv_num_heads, size], "fold_output"
        target, shape = build.integers(0, *sizes), [None, *sizes]
    elif site.output_dims == MERGED_HEADS:
        tokens = build.dim(result, 2, "merged_tokens")
        parts = [build.integers(-1), tokens, build.integers(size)]
        target = build.op("Concat", parts, "merged_shape", dtype=_I64, shape=[3], axis=0)
        shape, label = [None, None, size], "merge_output"
    else:
        return result
    return build.op("Reshape", [result, target], label, dtype=dtype, shape=shape)
