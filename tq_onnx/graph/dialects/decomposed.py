"""Dialect ``decomposed``: attention in standard operators, as torch's dynamo exporter makes it.

Anchored on the caches, never on names or on a sequence of operators::

    present = Concat(past, new, axis=2)                       [B, N, S, D]
    keys    = present, repeated to H heads, transposed        [B, H, D, S]
    scores  = MatMul(query, keys)                             [B, H, T, S]
    scores  = scores * scale; softcap * tanh(scores / softcap); + mask, or Where(mask, scores, -inf)
    output  = MatMul(Softmax(scores), repeated values)        [B, H, T, D]

The scale may sit on the query, on the keys and on the scores: their product counts. Float16
exports round it, so a product within 2e-3 of D^-0.5 is taken for D^-0.5. A guard that turns NaN
into 0 after the softmax goes with it, because the operator gives 0 for a row without visible keys.
The mask is kept as an additive bias, and causality with it (``causal`` is off); a Boolean mask
becomes a bias once per model.

Refused: new rows before old ones, heads repeated in another order, any other operator on the way,
scores or probabilities used elsewhere, a scale after the mask.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.dialects.cacheviews import Route, follow
from tq_onnx.graph.dialects.constants import attribute_int, scalar
from tq_onnx.graph.dialects.scores import Mask, Scores, follow_scores, probabilities_above
from tq_onnx.graph.dialects.site import (
    FLOATS,
    Anchor,
    Cache,
    GraphView,
    NoMatch,
    Operands,
    Site,
    make_cache,
    one_of,
    rank,
    static_dim,
)

_SCALE_SNAP: Final = 2e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class _Decomposed(Site):
    dialect: ClassVar[str] = "decomposed"

    query: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    masks: tuple[Mask, ...]

    def inputs(self) -> Collection[ir.Value]:
        return [self.query, self.new_key, self.new_value, *self.mask_sources()]

    def mask_sources(self) -> Collection[ir.Value]:
        return [mask.value for mask in self.masks]

    def operands(self, build: Builder) -> Operands:
        bias: ir.Value | None = None
        for mask in self.masks:
            term = mask.bias(build, self.dtype)
            bias = term if bias is None else self._sum(build, bias, term)
        return Operands(self.query, self.new_key, self.new_value, bias)

    def _sum(self, build: Builder, left: ir.Value, right: ir.Value) -> ir.Value:
        def make() -> ir.Value:
            return build.op("Add", [left, right], "bias_sum", dtype=self.dtype, shape=[None] * 4)

        return build.once(("sum", left, right), make)

    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        wanted = self.output.dtype
        if wanted is None or wanted == self.dtype:
            return attention_BHTD
        return build.op(
            "Cast",
            [attention_BHTD],
            "cast_output",
            dtype=wanted,
            shape=[None, self.num_heads, None, self.head_size],
            to=int(wanted),
        )


class _Dialect:
    name: Final = _Decomposed.dialect

    def claims(self, anchor: Anchor) -> bool:
        return (anchor.node.domain, anchor.node.op_type) == ("", "Concat")

    def match(self, anchors: tuple[Anchor, Anchor], view: GraphView) -> Site:
        routes = tuple(_route(anchor, view) for anchor in anchors)
        above = tuple(probabilities_above(route.matmul.inputs[0], view) for route in routes)
        if (above[0] is None) == (above[1] is None):
            raise NoMatch(
                "its two caches are not the keys and the values of one attention",
                routes[0].matmul,
            )
        at = 0 if above[0] is None else 1
        key, value = routes[at], routes[1 - at]
        scores = follow_scores(key.matmul, view)
        if scores.output_matmul is not value.matmul:
            raise NoMatch("its keys and its values belong to different attentions", key.matmul)
        return _site(anchors[at], anchors[1 - at], key, value, scores)


def _route(anchor: Anchor, view: GraphView) -> Route:
    node = anchor.node
    axis = attribute_int(node, "axis", 0)
    if len(node.inputs) != 2 or None in node.inputs or axis not in (2, -2):
        raise NoMatch(f"its cache is made by a Concat along axis {axis}", node)
    return follow(anchor.state, view)


def _site(
    key_anchor: Anchor, value_anchor: Anchor, key: Route, value: Route, scores: Scores
) -> Site:
    node = value.matmul
    past_key, new_key = key_anchor.node.inputs
    past_value, new_value = value_anchor.node.inputs
    assert past_key is not None and new_key is not None
    assert past_value is not None and new_value is not None
    key_cache = make_cache(key_anchor, past_key, key.views)
    value_cache = make_cache(value_anchor, past_value, value.views)
    product = key.matmul.inputs[0]
    if product is None:
        raise NoMatch("its keys are multiplied with nothing", key.matmul)
    query, query_scale = _without_scale(product)
    if value.factor != 1.0:
        raise NoMatch("its values are scaled after they were cached", node)
    kv_num_heads = one_of(
        "number of key/value heads",
        *(static_dim(v, 1) for v in (past_key, new_key, past_value, new_value)),
    )
    head_size = one_of(
        "head size",
        *(static_dim(v, 3) for v in (past_key, new_key, past_value, new_value, query)),
    )
    num_heads = _num_heads(query, key, value, kv_num_heads, node)
    _check_tokens(query, new_key, key.matmul)
    dtype = query.dtype
    if dtype is None or dtype not in FLOATS:
        raise NoMatch(f"its query has the element type {dtype}", key.matmul)
    for cache in (key_cache, value_cache):
        _check_rows(cache, new_key if cache is key_cache else new_value)
    scale = query_scale * key.factor * scores.scale
    usual = head_size**-0.5
    if abs(scale - usual) <= _SCALE_SNAP * usual:
        scale = usual
    if node.outputs[0].is_graph_output():
        raise NoMatch("its result is an output of the model", node)
    return _Decomposed(
        layer=key_anchor.layer,
        node=node,
        key=key_cache,
        value=value_cache,
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        dtype=dtype,
        scale=scale,
        causal=False,
        sliding_window=0,
        softcap=scores.softcap,
        has_bias=bool(scores.masks),
        output=node.outputs[0],
        query=query,
        new_key=new_key,
        new_value=new_value,
        masks=scores.masks,
    )


def _without_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """The query before its constant factors, and their product."""
    factor = 1.0
    while True:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in ("Mul", "Div"):
            return value, factor
        left, right = node.inputs
        number, source = scalar(right), left
        if number is None and node.op_type == "Mul":
            number, source = scalar(left), right
        if not number or source is None or rank(source) != 4:
            return value, factor
        factor *= number if node.op_type == "Mul" else 1 / number
        value = source


def _num_heads(query: ir.Value, key: Route, value: Route, kv_num_heads: int, node: ir.Node) -> int:
    if rank(query) is None:
        raise NoMatch(
            "the graph does not tell the shape of its query; run ONNX shape inference first",
            key.matmul,
        )
    if rank(query) != 4:
        raise NoMatch(f"its query is of rank {rank(query)}, not [B, H, T, D]", key.matmul)
    repeated = [r.matmul.inputs[1] for r in (key, value) if r.dims[1] == "H"]
    num_heads = one_of(
        "number of query heads",
        static_dim(query, 1),
        *(static_dim(operand, 1) for operand in repeated if operand is not None),
    )
    if key.dims not in (("B", "H", "D", "S"), ("B", "N", "D", "S")):
        raise NoMatch(f"its keys have the layout {', '.join(key.dims)}", key.matmul)
    if value.dims not in (("B", "H", "S", "D"), ("B", "N", "S", "D")):
        raise NoMatch(f"its values have the layout {', '.join(value.dims)}", node)
    if num_heads % kv_num_heads:
        raise NoMatch(f"{num_heads} heads do not share {kv_num_heads} key/value heads", node)
    if "N" in (key.dims[1], value.dims[1]) and num_heads != kv_num_heads:
        raise NoMatch(f"{num_heads} heads meet {kv_num_heads} key/value heads unrepeated", node)
    return num_heads


def _check_tokens(query: ir.Value, new_key: ir.Value, node: ir.Node) -> None:
    """A graph traced with one token may fold heads into the place of the tokens."""
    asked, cached = static_dim(query, 2), static_dim(new_key, 2)
    if asked != cached and (asked is not None or cached is not None):
        raise NoMatch(
            f"its query has {asked or 'any number of'} tokens, its new keys "
            f"{cached or 'any number'}",
            node,
        )


def _check_rows(cache: Cache, rows: ir.Value) -> None:
    if rank(rows) not in (4, None):
        raise NoMatch(f"its new rows are of rank {rank(rows)}", cache.node)
    dtype = rows.dtype or cache.past.dtype
    if dtype not in FLOATS:
        raise NoMatch(f"cache {cache.past.name} has the element type {dtype}", cache.node)


DIALECT = _Dialect()
