"""Dialect ``gqa``: com.microsoft GroupQueryAttention, as onnxruntime-genai's builder makes it.

The operator's inputs, by slot:

====  ======================  ==============================================================
0     query                   ``[B, T, H * D]``; or Q, K and V side by side when 1, 2 are empty
1, 2  key, value              ``[B, T, N * D]``
3, 4  past_key, past_value    ``[B, N, P, D]``: must be graph inputs; empty in a first prompt
5     seqlens_k               int32, ``[B]`` or ``[B, 1]``: tokens of each sequence - 1
6     total_sequence_length   not needed
7, 8  cos_cache, sin_cache    ``[positions, D / 2]`` or less for a partial rotation
9     position_ids            ``[B, T]``; otherwise past length, past length + 1, ...
10    attention_bias          ``[B or 1, H or 1, T, S]``
11    head_sink               ``[H]``: one more score per head in the softmax, without a value
12    k_scale                 refused: the cache is quantised already
13    v_scale                 refused: the cache is quantised already
14    q_norm_weight           ``[D]``: RMS norm of every head before the rotation
15    k_norm_weight           likewise
16    query_seqlens           int32 ``[B]``: new tokens of each sequence, padding behind them; or T
====  ======================  ==============================================================

A graph for a first prompt takes no caches: inputs 3 and 4 are empty, and the new rows are returned
by the operator, or by what makes them if the operator neither norms nor rotates them.

What the operator does inside is taken out of it: Split, SimplifiedLayerNormalization (the name by
which genai itself calls RMS norm), RotaryEmbedding. The past length of a sequence is
``max(seqlens_k + 1 - T, 0)``: never negative in a first prompt that is padded on the right, where
seqlens_k counts less than T tokens. With query_seqlens that takes the place of T. The length does
not depend on the size of the caches, so growing caches and caches of fixed capacity both work, and
so does a number of slots that was fixed when exporting.

A smooth softmax (1) has a sink of 0 in every head; where there are both, head_sink counts.

With ``sliding_window_cache`` the caches are rings: they hold the newest tokens, at least those of
the window, and the operator drops others. It computes what it would over all tokens: lengths,
rotation and the columns of a bias count from the first token of the text. So the converted caches
hold all tokens.

Refused: a window of 0, for which versions of ONNX Runtime hide every key or none; rings of a fixed
size, which do not hold all tokens; caches that are quantised.

Meaning of the attributes: the operator's documentation and ONNX Runtime's
``core/providers/cpu`` and ``contrib_ops/cpu/bert/gqa_attention_base.h``.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.recognise.caches import Cache, Reach, by_input, one_of, own_cache, updated_cache
from tq_onnx.recognise.operands import FLAT_HEADS, Mask, Norm, Rotation, Vectors
from tq_onnx.recognise.site import GraphView, Site

SLOTS: Final = 17
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, SEQLENS_K = range(6)
COS, SIN, POSITION_IDS, BIAS, SINK, K_SCALE, V_SCALE, Q_NORM, K_NORM, QUERY_SEQLENS = range(
    7, SLOTS
)
_FLAT_ROWS: Final = ("B", "T", "ND")
_RING: Final = "sliding_window_cache"
_ATTRIBUTES: Final = frozenset(
    {
        "num_heads",
        "kv_num_heads",
        "scale",
        "softcap",
        "local_window_size",
        "causal",
        "do_rotary",
        "rotary_interleaved",
        "qk_norm_epsilon",
        "q_norm_epsilon",
        "k_norm_epsilon",
        "smooth_softmax",
        _RING,
        "qk_output",
        "k_quant_type",
        "v_quant_type",
        "kv_cache_bit_width",
    }
)
_REFUSED_INPUTS: Final = {
    K_SCALE: "the key cache is quantised already (k_scale)",
    V_SCALE: "the value cache is quantised already (v_scale)",
}


class _Dialect:
    name: Final = "gqa"

    def claims(self, reach: Reach) -> bool:
        return kind(reach.reader) == f"{MICROSOFT}.GroupQueryAttention"

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        del view
        return reach.reader

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        node = reaches[0].reader
        slots = _slots(node)
        _refuse(node, slots, view)
        key_cache, value_cache = _caches(node, slots, reaches, view)
        num_heads = attribute_int(node, "num_heads", 0)
        kv_num_heads = attribute_int(node, "kv_num_heads", 0)
        if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
            raise NoMatch(f"{num_heads} heads do not share {kv_num_heads} key/value heads", node)
        query, last_key = slots[QUERY], slots[SEQLENS_K]
        assert query is not None and last_key is not None
        rotary_dim = _rotary_dim(node, slots)
        head_size = _head_size(slots, num_heads, kv_num_heads, rotary_dim)
        if rotary_dim > head_size:
            raise NoMatch(f"the operator rotates {rotary_dim} of {head_size} coordinates", node)
        dtype = query.dtype or key_cache.present.dtype
        if dtype is None or dtype not in FLOATS:
            raise NoMatch(f"the query has the element type {dtype}", node)
        causal = attribute_int(node, "causal", 1) != 0
        window = attribute_int(node, "local_window_size", -1)
        if window == 0:
            raise NoMatch("the sliding window (local_window_size) has no room for a key", node)
        if window > 0 and not causal:
            raise NoMatch("the operator has a sliding window without causality", node)
        ring = attribute_int(node, _RING, 0) > 0
        if ring:
            _check_ring(node, slots, window)
        key, value, bias = slots[KEY] or query, slots[VALUE] or query, slots[BIAS]
        return Site(
            dialect=self.name,
            layer=layer,
            node=node,
            key=key_cache,
            value=value_cache,
            num_heads=num_heads,
            kv_num_heads=kv_num_heads,
            head_size=head_size,
            dtype=dtype,
            scale=attribute_float(node, "scale", 0.0) or head_size**-0.5,
            causal=causal,
            sliding_window=max(window, 0),
            ring=ring,
            softcap=attribute_float(node, "softcap", 0.0),
            query=Vectors(query, FLAT_HEADS, _norm(node, slots[Q_NORM], "q_norm_epsilon")),
            new_key=Vectors(key, _FLAT_ROWS, _norm(node, slots[K_NORM], "k_norm_epsilon")),
            new_value=Vectors(value, _FLAT_ROWS),
            output=node.outputs[0],
            output_dims=FLAT_HEADS,
            masks=() if bias is None else (Mask(bias),),
            has_sink=_has_sink(node, slots, num_heads),
            sinks=slots[SINK],
            packed=slots[KEY] is None,
            rotation=_rotation(node, slots, rotary_dim),
            last_key=last_key,
            query_lengths=slots[QUERY_SEQLENS],
        )


def _caches(
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    reaches: tuple[Reach, Reach],
    view: GraphView,
) -> tuple[Cache, Cache]:
    """Return the caches of the keys and of the values."""
    pasts = slots[PAST_KEY], slots[PAST_VALUE]
    if (pasts[0] is None) != (pasts[1] is None):
        raise NoMatch("the operator takes past keys or past values, but not both", node)
    if all(reach.update is None for reach in reaches):
        if pasts[0] is None and view.takes_caches:
            raise NoMatch("the operator takes no past, though the model takes caches", node)
        by_slot = {reach.anchor.state.index(): reach.anchor for reach in reaches}
        if set(by_slot) != {1, 2}:
            raise NoMatch("the key cache or the value cache is not a graph output", node)
        key, value = (
            own_cache(anchor, past, fixed_length=True)
            for anchor, past in zip((by_slot[1], by_slot[2]), pasts, strict=True)
        )
        return key, value
    if pasts[0] is not None or any(
        reach.update is None or reach.update.past is not None or reach.update.slots
        for reach in reaches
    ):
        raise NoMatch("the cache is updated outside of the operator", node)
    read = by_input(node, reaches, KEY, VALUE)
    if slots[K_NORM] is not None or attribute_int(node, "do_rotary", 0):
        raise NoMatch("the keys are cached before the operator norms or rotates them", node)
    for reach in read:
        route = reach.route
        if route is None or route.dims != ("B", "S", "ND") or route.factor != 1.0:
            raise NoMatch("the cache is repeated or scaled before the operator reads it", node)
    # What is cached is what the operator reads: the new rows of inputs 1 and 2.
    key, value = (
        Cache(None, cache.present, cache.node, cache.views, cache.cut)
        for cache in map(updated_cache, read)
    )
    return key, value


def _slots(node: ir.Node) -> tuple[ir.Value | None, ...]:
    inputs = tuple(node.inputs)
    return inputs + (None,) * (SLOTS - len(inputs))


def _refuse(node: ir.Node, slots: tuple[ir.Value | None, ...], view: GraphView) -> None:
    unknown = sorted(set(node.attributes) - _ATTRIBUTES)
    if unknown:
        raise NoMatch(f"the attribute {unknown[0]} is not known", node)
    if attribute_int(node, "qk_output", 0) > 0:
        raise NoMatch("the operator returns the scores (qk_output)", node)
    for name in ("k_quant_type", "v_quant_type"):
        if node.attributes.get_string(name, "NONE") not in ("NONE", ""):
            raise NoMatch(f"the cache is quantised already ({name})", node)
    _refuse_inputs(node, slots)
    if any(view.consumers(output) for output in node.outputs[3:]):
        raise NoMatch("the scores are used elsewhere", node)
    if node.outputs[0].is_graph_output():
        raise NoMatch("the result is an output of the model", node)


def _refuse_inputs(node: ir.Node, slots: tuple[ir.Value | None, ...]) -> None:
    for slot, reason in _REFUSED_INPUTS.items():
        if slots[slot] is not None:
            raise NoMatch(reason, node)
    if any(value is not None for value in slots[SLOTS:]):
        raise NoMatch(
            f"the operator has {len(slots)} inputs, of which only {SLOTS} are known", node
        )
    if slots[QUERY] is None or slots[SEQLENS_K] is None:
        raise NoMatch("the query or the seqlens_k is missing", node)
    # ONNX Runtime asks for the same; columns of a bias would count from an upper bound.
    if slots[QUERY_SEQLENS] is not None and (
        slots[PAST_KEY] is None or slots[BIAS] is not None or not attribute_int(node, "causal", 1)
    ):
        raise NoMatch(
            "the operator counts new tokens (query_seqlens) without a past, or beside a bias or "
            "keys that are not causal: export without query_seqlens",
            node,
        )
    for first, second in ((KEY, VALUE), (Q_NORM, K_NORM), (COS, SIN)):
        if (slots[first] is None) != (slots[second] is None):
            raise NoMatch(f"of the inputs {first} and {second} the operator has only one", node)


def _check_ring(node: ir.Node, slots: tuple[ir.Value | None, ...], window: int) -> None:
    """Refuse a ring without a window, and one that cannot become a cache of all tokens."""
    if window < 0:
        raise NoMatch("the cache is a ring (sliding_window_cache) without a sliding window", node)
    pasts = slots[PAST_KEY], slots[PAST_VALUE]
    rows = [static_dim(past, 2) for past in pasts if past is not None]
    fixed = next((count for count in rows if count is not None), None)
    if fixed is not None:
        raise NoMatch(
            f"the cache is a ring (sliding_window_cache) of {fixed} rows, and a converted cache "
            "holds all tokens: export without a fixed size",
            node,
        )


def _has_sink(node: ir.Node, slots: tuple[ir.Value | None, ...], num_heads: int) -> bool:
    sink = slots[SINK]
    if sink is None:
        return attribute_int(node, "smooth_softmax", 0) == 1
    sinks = static_dim(sink, 0)
    if rank(sink) not in (None, 1) or sinks not in (None, num_heads):
        raise NoMatch(f"the sinks (head_sink) are not one for each of {num_heads} heads", node)
    return True


def _norm(node: ir.Node, weight: ir.Value | None, name: str) -> Norm | None:
    epsilon = attribute_float(node, name, attribute_float(node, "qk_norm_epsilon", 1e-6))
    return None if weight is None else Norm(weight, epsilon)


def _rotation(
    node: ir.Node, slots: tuple[ir.Value | None, ...], rotary_dim: int
) -> Rotation | None:
    cos, sin = slots[COS], slots[SIN]
    if not rotary_dim or cos is None or sin is None:
        return None
    interleaved = attribute_int(node, "rotary_interleaved", 0)
    return Rotation(cos, sin, slots[POSITION_IDS], rotary_dim, interleaved)


def _rotary_dim(node: ir.Node, slots: tuple[ir.Value | None, ...]) -> int:
    if not attribute_int(node, "do_rotary", 0):
        return 0
    cos, sin = slots[COS], slots[SIN]
    if cos is None or sin is None:
        raise NoMatch("the operator rotates without cos_cache or sin_cache", node)
    return 2 * one_of("width of cos_cache", static_dim(cos, -1), static_dim(sin, -1))


def _head_size(
    slots: tuple[ir.Value | None, ...], num_heads: int, kv_num_heads: int, rotary_dim: int
) -> int:
    query, key, value, *pasts = slots[: PAST_VALUE + 1]
    assert query is not None
    packed_heads = num_heads + 2 * kv_num_heads

    def share(packed: ir.Value | None, heads: int) -> int | None:
        width = None if packed is None else static_dim(packed, 2)
        if width is None:
            return None
        if width % heads:
            raise NoMatch(f"the width {width} is not a multiple of {heads} heads")
        return width // heads

    sizes = [
        share(query, num_heads if key is not None else packed_heads),
        share(key, kv_num_heads),
        share(value, kv_num_heads),
        *(static_dim(past, 3) for past in pasts if past is not None),
        *(static_dim(norm, 0) for norm in slots[Q_NORM:QUERY_SEQLENS] if norm is not None),
    ]
    # Without shapes of the projections a full rotation still tells the head size.
    known = any(size is not None for size in sizes)
    return one_of("head size", *(sizes if known else [rotary_dim or None]))


DIALECT = _Dialect()
