"""Make a site of the standard operator ``Attention``.

The slots of its inputs are described in ``tq_onnx.recognise.dialects.onnx_attention``.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.attention.rows import snapped
from tq_onnx.recognise.attention.tokens import check_tokens
from tq_onnx.recognise.caches import ROWS, Cache, Dims, Route, head_sizes, one_of
from tq_onnx.recognise.operands import FLAT_HEADS, HEADS, Mask, Vectors
from tq_onnx.recognise.site import Site

SLOTS: Final = 7
QUERY, KEY, VALUE, MASK, PAST_KEY, PAST_VALUE, VALID = range(SLOTS)
DIALECT_NAME: Final = "onnx"


def make_site(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    caches: tuple[Cache, Cache],
    new_rows: tuple[ir.Value | None, ir.Value | None],
    *,
    routes: tuple[Route, ...] = (),
) -> Site:
    """Check sizes and types, and make a layer.

    Args:
        slots: its inputs, None where left out.
        routes: the ways of the caches to the operator if it does not update them itself.
    """
    query, valid = slots[QUERY], slots[VALID]
    key_rows, value_rows = new_rows
    if query is None or key_rows is None or value_rows is None:
        raise NoMatch("the query, the keys or the values are missing", node)
    if any(rank(value) not in (3, 4) for value in (query, key_rows, value_rows)):
        raise NoMatch("the query, keys and values are not of rank 3 or 4", node)
    dtype = query.dtype or key_rows.dtype
    if dtype is None or dtype not in FLOATS:
        raise NoMatch(f"the query has the element type {dtype}", node)
    num_heads, kv_num_heads = _heads(node, query, key_rows, caches, routes)
    keys, values = (
        [_share(value, kv_num_heads) for value in (new, cache.past) if value is not None]
        for new, cache in zip((key_rows, value_rows), caches, strict=True)
    )
    head_size, value_size = head_sizes([_share(query, num_heads), *keys], values)
    scale = attribute_float(node, "scale", head_size**-0.5) * (routes[0].factor if routes else 1.0)
    if not scale > 0:
        raise NoMatch(f"the scale is {scale}", node)
    mask = _mask(node, slots[MASK])
    check_tokens(query, (key_rows, value_rows), node)
    query_dims = FLAT_HEADS if rank(query) == 3 else HEADS
    return Site(
        dialect=DIALECT_NAME,
        layer=layer,
        node=node,
        key=caches[0],
        value=caches[1],
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        dtype=dtype,
        scale=snapped(scale, head_size, dtype),
        query=Vectors(query, query_dims),
        new_key=Vectors(key_rows, _rows_dims(caches[0], key_rows)),
        new_value=Vectors(value_rows, _rows_dims(caches[1], value_rows)),
        output=node.outputs[0],
        output_dims=query_dims,
        causal=attribute_int(node, "is_causal", 0) != 0,
        softcap=attribute_float(node, "softcap", 0.0),
        masks=() if mask is None else (mask,),
        valid_keys=valid,
        value_size=value_size,
    )


def _rows_dims(cache: Cache, rows: ir.Value) -> Dims:
    """Return the meaning of the dimensions of new rows."""
    if cache.update is not None:
        return cache.update.rows_dims
    return ROWS if rank(rows) == 4 else ("B", "T", "ND")


def _heads(
    node: ir.Node,
    query: ir.Value,
    key_rows: ir.Value,
    caches: tuple[Cache, Cache],
    routes: tuple[Route, ...],
) -> tuple[int, int]:
    """Return H and N: attributes with operands of rank 3, otherwise dimensions."""
    flat = rank(query) == 3
    for route in routes:
        if route.dims not in (
            (("B", "S", "ND"),) if flat else (("B", "N", "S", "D"), ("B", "H", "S", "D"))
        ):
            raise NoMatch(f"the cache has the layout {', '.join(route.dims)}", node)
    if flat:
        num_heads = attribute_int(node, "q_num_heads", 0)
        kv_num_heads = attribute_int(node, "kv_num_heads", 0)
    else:
        repeated = [static_dim(route.operand, 1) for route in routes if route.dims[1] == "H"]
        num_heads = one_of("number of query heads", static_dim(query, 1), *repeated)
        kv_num_heads = one_of(
            "number of key/value heads",
            static_dim(key_rows, 1) if rank(key_rows) == 4 else None,
            *(static_dim(cache.past, 1) for cache in caches if cache.past is not None),
        )
    if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
        raise NoMatch(f"{num_heads} heads do not share {kv_num_heads} key/value heads", node)
    return num_heads, kv_num_heads


def _share(value: ir.Value, heads: int) -> int | None:
    """Return D, from ``[B, heads, T, D]`` or ``[B, T, heads * D]``."""
    width = static_dim(value, -1)
    if rank(value) != 3 or width is None:
        return width
    if width % heads:
        raise NoMatch(f"the width {width} is not a multiple of {heads} heads")
    return width // heads


def _mask(node: ir.Node, value: ir.Value | None) -> Mask | None:
    if value is None:
        return None
    size = rank(value)
    if size is None or not 1 <= size <= 4:
        raise NoMatch(f"the mask is of rank {'unknown' if size is None else size}", node)
    if static_dim(value, -1) == 1:
        raise NoMatch("the mask has one column, which may stand for one key or for all", node)
    if value.dtype is ir.DataType.BOOL:
        return Mask(value, keeps=True)
    if value.dtype not in FLOATS:
        raise NoMatch(f"the mask has the element type {value.dtype}", node)
    return Mask(value)
