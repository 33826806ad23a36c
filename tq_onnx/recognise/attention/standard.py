"""Spell out the inner steps of the standard operator ``Attention`` as nodes of their own.

The slots of its inputs are described in ``tq_onnx.recognise.dialects.onnx_attention``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.attention.heads import merged, split
from tq_onnx.recognise.attention.masks import Mask
from tq_onnx.recognise.attention.rows import snapped
from tq_onnx.recognise.attention.tokens import check_tokens
from tq_onnx.recognise.attention.validkeys import valid_keys
from tq_onnx.recognise.behind import attended_length
from tq_onnx.recognise.caches import Cache, Route, head_sizes, one_of
from tq_onnx.recognise.site import Operands, Site

SLOTS: Final = 7
QUERY, KEY, VALUE, MASK, PAST_KEY, PAST_VALUE, VALID = range(SLOTS)


@dataclass(frozen=True, eq=False, kw_only=True)
class StandardAttention(Site):
    """A layer of the dialect ``onnx``.

    Attributes:
        query: ``[B, H, T, D]`` or ``[B, T, H * D]``.
        key_rows: new rows ``[B, N, T, D]`` or ``[B, T, N * D]``.
        value_rows: likewise.
        mask: what hides keys; None if nothing does.
        valid: int64 ``[B]``, the slots of each sequence that hold a key (nonpad_kv_seqlen).
    """

    dialect: ClassVar[str] = "onnx"

    query: ir.Value
    key_rows: ir.Value
    value_rows: ir.Value
    mask: Mask | None
    valid: ir.Value | None

    def inputs(self) -> Collection[ir.Value]:
        """Return query, new rows, mask, and what tells the number of tokens."""
        return [self.query, self.key_rows, self.value_rows, *self.mask_sources()]

    def mask_sources(self) -> Collection[ir.Value]:
        """Return the mask and the number of valid keys."""
        mask = None if self.mask is None else self.mask.value
        return [value for value in (mask, self.valid) if value is not None]

    def token_axes(self) -> Collection[tuple[ir.Value, int]]:
        """Return query and new rows."""
        return [
            (self.query, 2 if rank(self.query) == 4 else 1),
            (self.key_rows, self.key.row_axis(self.key_rows)),
            (self.value_rows, self.value.row_axis(self.value_rows)),
        ]

    def operands(self, build: Builder) -> Operands:
        """Split heads that stand side by side, and make one bias of mask and valid keys."""
        query_BHTD = self._heads(build, self.query, "query", self.num_heads)
        with build.before(self.key.node, f"layers.{self.layer}.attention"):
            key_BNTD = self._heads(build, self.key_rows, "key", self.kv_num_heads)
        with build.before(self.value.node, f"layers.{self.layer}.attention"):
            value_BNTD = self._heads(build, self.value_rows, "value", self.kv_num_heads)
        mask = self.mask
        if self.valid is not None:
            past_length = self.past_length(build)
            assert past_length is not None  # only caches of a fixed size have valid keys
            attended = self.attended_length(build, past_length, None)
            mask = valid_keys(build, self.valid, mask, self.query, attended, causal=self.causal)
        bias = None if mask is None else mask.bias(build, self.dtype)
        return Operands(query_BHTD, key_BNTD, value_BNTD, bias)

    def attended_length(
        self, build: Builder, past_length: ir.Value, bias: ir.Value | None
    ) -> ir.Value:
        """Return the tokens before the new ones, by the number of valid keys if there is one."""
        if self.valid is None:
            return super().attended_length(build, past_length, bias)
        query, axis = next(iter(self.token_axes()))
        return attended_length(build, past_length, query, axis, self.valid)

    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        """Return the result as ``[B, H, T, D]``, or ``[B, T, H * D]`` like the query."""
        if rank(self.query) == 4:
            return attention_BHTD
        return merged(build, self, attention_BHTD)

    def _heads(self, build: Builder, rows: ir.Value, role: str, heads: int) -> ir.Value:
        """Return ``[B, heads, T, D]``, also from heads side by side."""
        return rows if rank(rows) == 4 else split(build, self, rows, role, heads)


def make_site(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    caches: tuple[Cache, Cache],
    new_rows: tuple[ir.Value | None, ir.Value | None],
    *,
    routes: tuple[Route, ...] = (),
) -> StandardAttention:
    """Check sizes and types, and make a layer.

    Args:
        layer: index of the layer.
        node: the operator.
        slots: its inputs, None where left out.
        caches: of keys and of values.
        new_rows: of keys and of values.
        routes: the ways of the caches to the operator if it does not update them itself.

    Raises:
        NoMatch: they do not fit together.
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
    return StandardAttention(
        layer=layer,
        node=node,
        key=caches[0],
        value=caches[1],
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        dtype=dtype,
        scale=snapped(scale, head_size, dtype),
        causal=attribute_int(node, "is_causal", 0) != 0,
        sliding_window=0,
        softcap=attribute_float(node, "softcap", 0.0),
        has_bias=mask is not None or valid is not None,
        output=node.outputs[0],
        value_size=value_size,
        query=query,
        key_rows=key_rows,
        value_rows=value_rows,
        mask=mask,
        valid=valid,
    )


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
        return Mask(value, True)
    if value.dtype not in FLOATS:
        raise NoMatch(f"the mask has the element type {value.dtype}", node)
    return Mask(value, None)
