"""Dialect ``decomposed``: attention in standard operators, as torch's dynamo exporter makes it.

Anchored on the caches, never on names or on a sequence of operators::

    present = Concat(past, new, axis=2)                       [B, N, S, D]
    keys    = present, repeated to H heads, transposed        [B, H, D, S]
    scores  = MatMul(query, keys)                             [B, H, T, S]
    scores  = scores * scale; softcap * tanh(scores / softcap); + mask, or Where(mask, scores, -inf)
    output  = MatMul(Softmax(scores), repeated values)        [B, H, T, D]

The scale may sit on the query, on the keys and on the scores: their product counts. Float16
exports round it, so a product near D^-0.5 is taken for D^-0.5 there. A guard that turns NaN
into 0 after the softmax goes with it, because the operator gives 0 for a row without visible keys.
The mask is kept as an additive bias, and causality with it (``causal`` is off); a Boolean mask
becomes a bias once per model. A scale after the mask counts for both. A column of sinks beside the
scores (``sinks.py``) goes into the operator. A single key/value head may meet all query heads
unrepeated. Batch and heads may be one dimension (``merged.py``).

Refused: new rows before old ones, heads repeated in another order, any other operator on the way,
scores or probabilities used elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

import onnx_ir as ir

from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import PRODUCTS, kind
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.attention.masks import Mask
from tq_onnx.recognise.attention.merged import Merged, by_heads, merged_result, whole_query
from tq_onnx.recognise.attention.products import product
from tq_onnx.recognise.attention.queries import check_folded, unfolded, without_scale
from tq_onnx.recognise.attention.rows import check_slots, rows, sizes, snapped
from tq_onnx.recognise.attention.scores import (
    Scores,
    follow_scores,
    probabilities_above,
    spelled_out,
)
from tq_onnx.recognise.attention.sinks import one_of_each_head
from tq_onnx.recognise.attention.tokens import check_tokens
from tq_onnx.recognise.caches import Reach, head_sizes, one_of, updated_cache
from tq_onnx.recognise.site import GraphView, Operands, Site


@dataclass(frozen=True, eq=False, kw_only=True)
class _Decomposed(Site):
    dialect: ClassVar[str] = "decomposed"

    query: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    masks: tuple[Mask, ...]
    sinks: ir.Value | None
    folded: bool
    """True if the old attention computes ``[B, N, G, D]`` for one token."""
    merged: Merged | None
    """Its values with batch and heads in one dimension."""

    def inputs(self) -> Collection[ir.Value]:
        sinks = () if self.sinks is None else (self.sinks,)
        return [self.query, self.new_key, self.new_value, *self.mask_sources(), *sinks]

    def mask_sources(self) -> Collection[ir.Value]:
        return [mask.value for mask in self.masks]

    def token_axes(self) -> Collection[tuple[ir.Value, int]]:
        return [
            (self.query, 2),
            (self.new_key, self.key.row_axis(self.new_key)),
            (self.new_value, self.value.row_axis(self.new_value)),
            *(() if self.merged is None else self.merged.token_axes()),
        ]

    def batch_axes(self) -> Collection[tuple[ir.Value, int]]:
        return () if self.merged is None else self.merged.batch_axes(self.num_heads)

    def operands(self, build: Builder) -> Operands:
        bias: ir.Value | None = None
        for mask in by_heads(build, self.masks, self.query, self.num_heads):
            term = mask.bias(build, self.dtype)
            bias = term if bias is None else self._sum(build, bias, term)
        sinks = self.sinks
        if sinks is not None:
            sinks = one_of_each_head(build, sinks, self.num_heads, self.dtype)
        return Operands(self.query, self.new_key, self.new_value, bias, sinks)

    def _sum(self, build: Builder, left: ir.Value, right: ir.Value) -> ir.Value:
        def make() -> ir.Value:
            return build.op("Add", [left, right], "bias_sum", dtype=self.dtype, shape=[None] * 4)

        return build.once(("sum", left, right), make)

    def result(self, build: Builder, attention_BHTD: ir.Value) -> ir.Value:
        result, wanted = attention_BHTD, self.output.dtype
        if wanted is not None and wanted != self.dtype:
            result = build.op(
                "Cast",
                [result],
                "cast_output",
                dtype=wanted,
                shape=[None, self.num_heads, None, self.result_size],
                to=int(wanted),
            )
        if self.folded:
            sizes = [self.kv_num_heads, self.num_heads // self.kv_num_heads, self.result_size]
            result = build.op(
                "Reshape",
                [result, build.integers(0, *sizes)],
                "fold_output",
                dtype=wanted or self.dtype,
                shape=[None, *sizes],
            )
        if self.merged is not None:
            result = merged_result(build, result, self.result_size, wanted or self.dtype)
        return result


class _Dialect:
    name: Final = _Decomposed.dialect

    def claims(self, reach: Reach) -> bool:
        return reach.route is not None and kind(reach.reader) in PRODUCTS

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        matmul = reach.reader
        _refuse_latent(reach)
        left = matmul.inputs[product(matmul).left]
        softmax = probabilities_above(left, view)
        if softmax is None:
            if spelled_out(left, view):
                raise NoMatch(
                    "the softmax is spelled out in other operators: "
                    "convert the model as it was before an optimizer did that",
                    matmul,
                )
            softmax = follow_scores(matmul, view).softmax
        return softmax

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        above = [
            probabilities_above(reach.reader.inputs[product(reach.reader).left], view)
            for reach in reaches
        ]
        if (above[0] is None) == (above[1] is None):
            raise NoMatch(
                "the two caches are not the keys and the values of one attention",
                reaches[0].reader,
            )
        at = 0 if above[0] is None else 1
        key, value = reaches[at], reaches[1 - at]
        for reach in reaches:
            if reach.route is None or reach.route.index != product(reach.reader).right:
                raise NoMatch("the cache is the first operand of a matrix product", reach.reader)
        scores = follow_scores(key.reader, view)
        if scores.output_matmul is not value.reader:
            raise NoMatch("the keys and the values belong to different attentions", key.reader)
        return _site(layer, key, value, scores)


def _site(layer: int, key: Reach, value: Reach, scores: Scores) -> Site:
    node = value.reader
    assert key.route is not None and value.route is not None
    new_key, new_value = rows(key), rows(value)
    multiplied = key.reader.inputs[product(key.reader).left]
    if multiplied is None:
        raise NoMatch("the keys are multiplied with nothing", key.reader)
    query, query_scale = without_scale(multiplied)
    together = _merged(query, key, value, scores)
    if together is not None:
        query, more = without_scale(whole_query(query) or query)
        query_scale *= more
    if value.route.factor != 1.0:
        raise NoMatch("the values are scaled after they were cached", node)
    check_slots(key, value, masked=bool(scores.masks))
    kv_num_heads = one_of("number of key/value heads", *sizes("N", key, value))
    head_size, value_size = head_sizes([static_dim(query, 3), *sizes("D", key)], sizes("D", value))
    apart = None if together else unfolded(query, kv_num_heads, head_size)
    if apart is not None:
        check_folded(scores.masks, node)
    num_heads = _num_heads(
        apart or query, key, value, kv_num_heads, folded=bool(apart), merged=bool(together)
    )
    query = apart or query
    _check_tokens(query, key)
    check_tokens(query, (new_key, new_value), key.reader)
    if scores.sinks is not None and static_dim(scores.sinks, 1) != num_heads:
        raise NoMatch(f"the sinks are not one for each of {num_heads} heads", node)
    dtype = query.dtype
    if dtype is None or dtype not in FLOATS:
        raise NoMatch(f"the query has the element type {dtype}", key.reader)
    scale = snapped(query_scale * key.route.factor * scores.scale, head_size, dtype)
    if node.outputs[0].is_graph_output():
        raise NoMatch("the result is an output of the model", node)
    if rank(node.outputs[0]) not in (3 if together else 4, None):
        raise NoMatch(f"the result is of rank {rank(node.outputs[0])}", node)
    return _Decomposed(
        layer=layer,
        node=node,
        key=updated_cache(key),
        value=updated_cache(value),
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
        sinks=scores.sinks,
        has_sink=scores.sinks is not None,
        value_size=value_size,
        folded=apart is not None,
        merged=together,
    )


def _refuse_latent(reach: Reach) -> None:
    """Refuse a cache of vectors that weights turn into keys and values.

    Raises:
        NoMatch: a matrix multiplies the cache from the right.
    """
    assert reach.route is not None
    node, how = reach.reader, product(reach.reader)
    other = node.inputs[how.right]
    if reach.route.index == how.left and other is not None and rank(other) == 2:
        raise NoMatch(
            "the cache holds latent vectors, which weights turn into keys and values (multi-head "
            "latent attention, MLA): such a cache cannot be converted",
            node,
        )


def _merged(query: ir.Value, key: Reach, value: Reach, scores: Scores) -> Merged | None:
    """Return the values of attention with batch and heads in one dimension; None without."""
    assert key.route is not None and value.route is not None
    if rank(query) != 3 and not scores.reshaped:
        return None
    if whole_query(query) is None:
        raise NoMatch(
            "batch and heads are one dimension of the scores, and not of the query", key.reader
        )
    return Merged(query, (key.route.operand, value.route.operand), scores.reshaped)


def _num_heads(
    query: ir.Value,
    key: Reach,
    value: Reach,
    kv_num_heads: int,
    *,
    folded: bool,
    merged: bool,
) -> int:
    assert key.route is not None and value.route is not None
    node = value.reader
    if rank(query) is None:
        raise NoMatch(
            "the graph does not declare the shape of the query; run ONNX shape inference first",
            key.reader,
        )
    if rank(query) != 4:
        raise NoMatch(f"the query is of rank {rank(query)}, not [B, H, T, D]", key.reader)
    keys = product(key.reader).layout(key.route.dims)
    values = product(node).layout(value.route.dims)
    wide, narrow = (("BH",), ("BN",)) if merged else (("B", "H"), ("B", "N"))
    if keys not in ((*wide, "D", "S"), (*narrow, "D", "S")):
        raise NoMatch(f"the keys have the layout {', '.join(keys)}", key.reader)
    if values not in ((*wide, "S", "D"), (*narrow, "S", "D")):
        raise NoMatch(f"the values have the layout {', '.join(values)}", node)
    repeated = [
        static_dim(reach.route.operand, reach.route.dims.index("H"))
        for reach in (key, value)
        if reach.route is not None and "H" in reach.route.dims
    ]
    num_heads = one_of("number of query heads", static_dim(query, 1), *repeated)
    if num_heads % kv_num_heads:
        raise NoMatch(f"{num_heads} heads do not share {kv_num_heads} key/value heads", node)
    if folded and repeated:
        raise NoMatch("the heads are repeated although the query is folded", node)
    if merged and num_heads != kv_num_heads and {keys[0], values[0]} != {*wide}:
        raise NoMatch(f"{num_heads} heads meet {kv_num_heads} key/value heads unrepeated", node)
    if not (folded or merged) and num_heads != kv_num_heads != 1 and len(repeated) < 2:
        raise NoMatch(f"{num_heads} heads meet {kv_num_heads} key/value heads unrepeated", node)
    return num_heads


def _check_tokens(query: ir.Value, key: Reach) -> None:
    """Check the tokens of the query: in unknown forms, heads may stand in their place."""
    asked, cached = static_dim(query, 2), None if key.update is None else key.update.size("T")
    if asked != cached and (asked is not None or cached is not None):
        raise NoMatch(
            f"the query has {asked or 'any number of'} tokens, the new keys "
            f"{cached or 'any number'}",
            key.reader,
        )


DIALECT = _Dialect()
