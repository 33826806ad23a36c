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

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import PRODUCTS, kind
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.attention.merged import Merged, whole_query
from tq_onnx.recognise.attention.products import product
from tq_onnx.recognise.attention.queries import check_folded, unfolded, without_scale
from tq_onnx.recognise.attention.rows import check_slots, rows, sizes, snapped
from tq_onnx.recognise.attention.scores import (
    Scores,
    follow_scores,
    probabilities_above,
    spelled_out,
)
from tq_onnx.recognise.attention.tokens import check_tokens
from tq_onnx.recognise.caches import Reach, head_sizes, one_of, updated_cache
from tq_onnx.recognise.operands import FOLDED_HEADS, HEADS, MERGED_HEADS, Vectors
from tq_onnx.recognise.site import GraphView, Site


class _Dialect:
    name: Final = "decomposed"

    def claims(self, reach: Reach) -> bool:
        return reach.route is not None and kind(reach.reader) in PRODUCTS

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        matmul = reach.reader
        _refuse_latent(reach)
        probabilities = matmul.inputs[product(matmul).left]
        softmax = probabilities_above(probabilities, view)
        if softmax is None:
            if spelled_out(probabilities, view):
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
    assert key.update is not None and value.update is not None
    new_key, new_value = rows(key), rows(value)
    multiplied = key.reader.inputs[product(key.reader).left]
    if multiplied is None:
        raise NoMatch("the keys are multiplied with nothing", key.reader)
    query, query_scale = without_scale(multiplied)
    together = _merged(query, key, value, scores)
    if together is not None:
        query, factor = without_scale(whole_query(query) or query)
        query_scale *= factor
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
    output_dims = HEADS if together is None else MERGED_HEADS
    return Site(
        dialect=DIALECT.name,
        layer=layer,
        node=node,
        key=updated_cache(key),
        value=updated_cache(value),
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        dtype=dtype,
        scale=scale,
        query=Vectors(query, HEADS),
        new_key=Vectors(new_key, key.update.rows_dims),
        new_value=Vectors(new_value, value.update.rows_dims),
        output=node.outputs[0],
        output_dims=output_dims if apart is None else FOLDED_HEADS,
        softcap=scores.softcap,
        masks=scores.masks,
        has_sink=scores.sinks is not None,
        sinks=scores.sinks,
        value_size=value_size,
        inner_token_axes=() if together is None else together.token_axes,
        batch_axes=() if together is None else together.batch_axes(num_heads),
    )


def _refuse_latent(reach: Reach) -> None:
    """Refuse a cache of vectors that weights turn into keys and values."""
    assert reach.route is not None
    node, how = reach.reader, product(reach.reader)
    weights = node.inputs[how.right] if how.right < len(node.inputs) else None
    if reach.route.index == how.left and weights is not None and rank(weights) == 2:
        raise NoMatch(
            "the cache holds latent vectors, which weights turn into keys and values (multi-head "
            "latent attention, MLA): export with mobius or optimum, which cache keys and values",
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
    queries, keys = static_dim(query, 2), None if key.update is None else key.update.size("T")
    if queries != keys and (queries is not None or keys is not None):
        raise NoMatch(
            f"the query has {queries or 'any number of'} tokens, the new keys "
            f"{keys or 'any number'}",
            key.reader,
        )


DIALECT = _Dialect()
