"""Make the nodes around a converted cache: its input, its output, and nodes that read its shape.

A cache becomes uint8 ``[B, N, S, W]`` under the names of its input and output. Nodes that
read the shape of the old one get it from the new one, or, if the graph has the number of past
tokens, from that number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.past_length import LengthNodes, tokens_of_rows
from tq_onnx.files.declarations import MAX_DIMENSION
from tq_onnx.graph.builder import Builder
from tq_onnx.recognise.caches import PAST, Cache
from tq_onnx.recognise.leftovers import ShapeRead
from tq_onnx.recognise.site import Site

SCOPE: Final = "turboquant"
"""Names of nodes that belong to no layer begin with it."""


def rows_of_slots(slots: int | str | None, overlay_rows: int) -> int | str | None:
    """Return the size of a cache of so many slots behind an overlay: a number or a name."""
    if not overlay_rows or slots is None:
        return slots
    if isinstance(slots, int) and slots + overlay_rows <= MAX_DIMENSION:
        return slots + overlay_rows
    return f"{slots} + {overlay_rows}"


def leading(cache: Cache, site: Site, overlay_rows: int) -> list[int | str | None]:
    """Return batch, heads and rows of what a layer encodes."""
    sizes = _sizes(cache.present)
    if len(sizes) == 4 and cache.cut is None:
        return [sizes[0], sizes[1], rows_of_slots(sizes[2], overlay_rows)]
    slots = None if cache.cut else rows_of_slots(sizes[1], overlay_rows)
    return [sizes[0], site.kv_num_heads, slots]


def past_bytes(
    build: Builder, cache: Cache, site: Site, rows: ir.Value, *, width: int, overlay_rows: int
) -> ir.Value:
    """Return the bytes to append to: the graph input, retyped, or no rows at all."""
    if cache.past is None:
        capacity = 0 if cache.update is None else cache.update.slots
        capacity += overlay_rows if capacity else 0
        size = (site.kv_num_heads, capacity, width)
        return build.once(("empty", *size), lambda: _empty(build, size, rows))
    sizes = _sizes(cache.past)
    slots = sizes[2] if len(sizes) == 4 else sizes[1]
    cache.past.type = ir.TensorType(ir.DataType.UINT8)
    cache.past.shape = ir.Shape(
        [sizes[0], site.kv_num_heads, rows_of_slots(slots, overlay_rows), width]
    )
    return cache.past


def turned(build: Builder, cache: Cache, site: Site, rows: ir.Value, role: str) -> ir.Value:
    """Return new rows as ``[B, N, T, D]``."""
    if cache.turn is None:
        return rows
    return build.op(
        "Transpose",
        [rows],
        f"turn_{role}",
        dtype=rows.dtype,
        shape=[None, site.kv_num_heads, None, site.size_of(role)],
        perm=cache.turn,
    )


def as_query(build: Builder, site: Site, rows: ir.Value, role: str) -> ir.Value:
    """Return rows of the query's element type: bytes of the codec raw do not tell theirs."""
    if rows.dtype in (None, site.dtype):
        return rows
    shape = [None, site.kv_num_heads, None, site.size_of(role)]
    cast = f"cast_{role}"
    return build.op("Cast", [rows], cast, dtype=site.dtype, shape=shape, to=int(site.dtype))


def padded(build: Builder, site: Site, rows: ir.Value) -> ir.Value:
    """Return rows as wide as keys: narrower values get zeros, which attention leaves zeros."""
    missing = site.head_size - site.result_size
    if not missing:
        return rows
    return build.op(
        "Pad",
        [rows, build.integers(0, 0, 0, 0, 0, 0, 0, missing)],
        "pad_value",
        dtype=rows.dtype,
        shape=[None, site.kv_num_heads, None, site.head_size],
    )


def unpadded(build: Builder, site: Site, attention_BHTD: ir.Value) -> ir.Value:
    """Return attention without the coordinates that narrower values do not have."""
    size = site.result_size
    if size == site.head_size:
        return attention_BHTD
    return build.op(
        "Slice",
        [attention_BHTD, build.integers(0), build.integers(size), build.integers(3)],
        "unpad_output",
        dtype=site.dtype,
        shape=[None, site.num_heads, None, size],
    )


def _empty(build: Builder, sizes: tuple[int, int, int], rows: ir.Value) -> ir.Value:
    """Return a cache ``[B, N, slots, bytes]`` that holds no token."""
    batch = build.dim(rows, 0, "batch")
    inner = build.integers(*sizes)
    shape = build.op(
        "Concat", [batch, inner], "no_past_shape", dtype=ir.DataType.INT64, shape=[4], axis=0
    )
    no_bytes = build.constant("tq.uint8.none", np.zeros((1, 1, 1, 1), np.uint8))
    return build.op(
        "Expand",
        [no_bytes, shape],
        "no_past",
        dtype=ir.DataType.UINT8,
        shape=[None, *sizes],
    )


def shortened(build: Builder, cache: Cache, present: ir.Value) -> ir.Value:
    """Return the part of a new cache that the Slice of the old one leaves."""
    cut = cache.cut
    if cut is None:
        return present
    batch, heads, _, width = _sizes(present)
    length = _sizes(cache.present)[2]
    starts, ends, _, *steps = cut.inputs[1:]
    with build.before(cut, SCOPE):
        return build.op(
            "Slice",
            # The old cache may have had its tokens along another axis there.
            [present, starts, ends, build.integers(2), *steps],
            "shortened",
            dtype=ir.DataType.UINT8,
            shape=[batch, heads, length, width],
        )


def publish(graph: ir.Graph, cache: Cache, present: ir.Value) -> None:
    """Put a new cache in the place of an old output, under its name."""
    name = cache.present.name
    index = next(i for i, value in enumerate(graph.outputs) if value is cache.present)
    cache.present.name = f"{name}/replaced"
    graph.outputs[index] = present
    present.name = name


def answer(
    build: Builder,
    read: ShapeRead,
    presents: Mapping[Cache, ir.Value],
    lengths: LengthNodes | None,
    overlay_rows: int,
) -> None:
    """Answer a question for the shape of an old cache."""
    site = read.site
    cache = site.key if read.is_key else site.value
    if cache.past is None:
        return  # the new rows stay where they are
    moved = len(cache.views[cache.past]) != len(PAST)
    is_unchanged = set(read.dims) <= {"B", "N"} or (
        read.dims == ("P",) and not lengths and not moved and not overlay_rows
    )
    if read.of_past and is_unchanged:
        return
    numbers = {
        "N": site.kv_num_heads,
        "G": site.num_heads // site.kv_num_heads,
        "H": site.num_heads,
        "D": site.size_of("key" if read.is_key else "value"),
        "1": 1,
    }
    numbers |= {pair: numbers[pair[0]] * numbers["D"] for pair in ("ND", "HD")}
    label = f"{cache.present.name}_{'_'.join(read.dims)}"
    with build.before(read.node, SCOPE):
        parts = []
        for dim in read.dims:
            if dim in numbers:
                parts.append(build.integers(numbers[dim]))
            elif dim[0] == "B":
                parts.append(_batch(build, cache.past, numbers.get(dim[1:])))
            elif lengths is None:
                source = cache.past if dim == "P" else None
                rows = build.dim(source or presents[cache], 2, "cached_tokens")
                parts.append(tokens_of_rows(build, rows, overlay_rows))
            elif dim == "P":
                parts.append(lengths.past_length(build))
            else:
                parts.append(lengths.total_length(build))
        shape = parts[0]
        if len(parts) > 1:
            shape = build.op(
                "Concat",
                parts,
                f"shape_of_{label}",
                dtype=ir.DataType.INT64,
                shape=[len(parts)],
                axis=0,
            )
    read.node.outputs[0].replace_all_uses_with(shape)


def _batch(build: Builder, past: ir.Value, heads: int | None) -> ir.Value:
    """Return the number of sequences, or of their heads, int64 ``[1]``."""
    batch = build.dim(past, 0, "batch")
    if heads is None:
        return batch
    sizes = [batch, build.integers(heads)]
    return build.op("Mul", sizes, "batch_of_heads", dtype=ir.DataType.INT64, shape=[1])


def _sizes(value: ir.Value) -> list[int | str | None]:
    assert value.shape is not None  # a cache has a rank
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]
