"""Dialect ``mha``: com.microsoft MultiHeadAttention, which knows no heads that share keys.

The operator's inputs, by slot:

====  ======================  ==============================================================
0     query                   ``[B, T, H * D]``
1, 2  key, value              ``[B, T or S, H * D]``: new rows, or whole caches
3     bias                    of the projections, ``[3 * H * D]``; refused where a cache comes from
                              outside: it would be added to keys that are cached already
4     key_padding_mask        refused
5     attention_bias          ``[B or 1, H or 1, T, S]``, added to the scores
6, 7  past_key, past_value    ``[B, H, P, D]``: must be graph inputs; present at outputs 1, 2
8     past_sequence_length    refused: past and present share one buffer
9     cache_indirection       refused: beam search
====  ======================  ==============================================================

Three forms:

* A Concat or a ScatterND appends, outside, and heads are repeated outside too (onnxruntime-genai
  for float16 on a CPU, transformers' exporter with its fusions for CUDA): N may be less than H.
* The operator appends (inputs 6 and 7).
* A graph for a first prompt takes no caches: key and value are the new rows.

Causality (``unidirectional``) counts keys from the first one that the operator sees. So it means
what it should where the operator knows the past, and is refused where a cache comes from outside.
Packed projections (one input for query, key and value, or for key and value) are refused.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.recognise.attention.rows import check_slots, rows, sizes, snapped
from tq_onnx.recognise.attention.tokens import check_tokens
from tq_onnx.recognise.caches import (
    Cache,
    Dims,
    Reach,
    by_input,
    one_of,
    own_cache,
    updated_cache,
)
from tq_onnx.recognise.operands import FLAT_HEADS, Mask, Vectors
from tq_onnx.recognise.site import GraphView, Site

_SLOTS: Final = 10
_QUERY, _KEY, _VALUE, _PACKED_BIAS, _PADDING, _BIAS, _PAST_KEY, _PAST_VALUE = range(8)
_LENGTH, _BEAMS = 8, 9
_FLAT: Final[Dims] = ("B", "T", "ND")
"""New rows as the operator takes them."""
_ATTRIBUTES: Final = frozenset({"num_heads", "scale", "unidirectional", "mask_filter_value"})
_REFUSED_INPUTS: Final = {
    _PADDING: "the operator has a key_padding_mask: export it with an attention bias",
    _LENGTH: "the past and the present share one buffer (past_sequence_length)",
    _BEAMS: "the operator searches with beams (cache_indirection)",
}


class _Dialect:
    name: Final = "mha"

    def claims(self, reach: Reach) -> bool:
        return kind(reach.reader) == f"{MICROSOFT}.MultiHeadAttention"

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        del view
        return reach.reader

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        node = reaches[0].reader
        slots = tuple(node.inputs) + (None,) * (_SLOTS - len(node.inputs))
        _refuse(node, slots, view)
        outside = [reach.update is not None for reach in reaches]
        if any(outside) != all(outside):
            raise NoMatch("the operator updates one of the caches, but not the other", node)
        if all(outside):
            return _updated_outside(layer, node, slots, reaches)
        if view.takes_caches and slots[_PAST_KEY] is None:
            raise NoMatch("the operator takes no past, though the model takes caches", node)
        return _updated_inside(layer, node, slots, reaches)


def _refuse(node: ir.Node, slots: tuple[ir.Value | None, ...], view: GraphView) -> None:
    unknown = sorted(set(node.attributes) - _ATTRIBUTES)
    if unknown:
        raise NoMatch(f"the attribute {unknown[0]} is not known", node)
    for slot, reason in _REFUSED_INPUTS.items():
        if slots[slot] is not None:
            raise NoMatch(reason, node)
    if any(value is not None for value in slots[_SLOTS:]):
        raise NoMatch(
            f"the operator has {len(slots)} inputs, of which only {_SLOTS} are known", node
        )
    if any(view.consumers(output) or output.is_graph_output() for output in node.outputs[3:]):
        raise NoMatch("the operator returns the scores", node)
    if node.outputs[0].is_graph_output():
        raise NoMatch("the result is an output of the model", node)
    for slot in (_QUERY, _KEY, _VALUE):
        value = slots[slot]
        if value is None:
            raise NoMatch("the query, keys and values are packed into less than three inputs", node)
        if rank(value) not in (3, None):
            raise NoMatch(
                f"the query, keys and values are packed, or not [B, T, H * D]: "
                f"input {slot} is of rank {rank(value)}",
                node,
            )


def _updated_inside(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    reaches: tuple[Reach, Reach],
) -> Site:
    by_output = {reach.anchor.state.index(): reach.anchor for reach in reaches}
    if set(by_output) != {1, 2}:
        raise NoMatch("the key cache or the value cache is not a graph output", node)
    pasts = (slots[_PAST_KEY], slots[_PAST_VALUE])
    if (pasts[0] is None) != (pasts[1] is None):
        raise NoMatch("the operator takes past keys or past values, but not both", node)
    return _site(
        layer,
        node,
        slots,
        (own_cache(by_output[1], pasts[0]), own_cache(by_output[2], pasts[1])),
        slots[_KEY : _VALUE + 1],
        kv_num_heads=attribute_int(node, "num_heads", 0),
        head_sizes=[static_dim(past, 3) for past in pasts if past is not None],
    )


def _updated_outside(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    reaches: tuple[Reach, Reach],
) -> Site:
    key, value = by_input(node, reaches, _KEY, _VALUE)
    if slots[_PACKED_BIAS] is not None:
        raise NoMatch("the operator adds biases to keys that are cached already (bias)", node)
    if slots[_PAST_KEY] is not None or slots[_PAST_VALUE] is not None:
        raise NoMatch(
            "the operator takes a past besides a cache that is updated outside of it", node
        )
    check_slots(key, value, masked=slots[_BIAS] is not None)
    first_prompt = all(
        reach.update is not None and reach.update.past is None and not reach.update.slots
        for reach in (key, value)
    )
    if attribute_int(node, "unidirectional", 0) and not first_prompt:
        raise NoMatch(
            "the operator is unidirectional, but has no input for the number of past keys", node
        )
    num_heads = attribute_int(node, "num_heads", 0)
    returned = [static_dim(reach.anchor.present, 1) for reach in (key, value)]
    kv_num_heads = one_of("number of key/value heads", *returned, *sizes("N", key, value))
    for reach in (key, value):
        assert reach.route is not None
        dims = reach.route.dims
        repeated = dims == ("B", "S", "HD")
        if not repeated and (dims != ("B", "S", "ND") or kv_num_heads != num_heads):
            raise NoMatch(
                f"the {num_heads} heads meet {kv_num_heads} key/value heads with the layout "
                f"{', '.join(dims)}",
                node,
            )
    assert key.route is not None and value.route is not None
    if value.route.factor != 1.0:
        raise NoMatch("the values are scaled after they were cached", node)
    return _site(
        layer,
        node,
        slots,
        (updated_cache(key), updated_cache(value)),
        (_rows(key), _rows(value)),
        kv_num_heads=kv_num_heads,
        head_sizes=sizes("D", key, value),
        factor=key.route.factor,
    )


def _rows(reach: Reach) -> ir.Value:
    """Return the new rows, as their update has them, or as the operator takes them."""
    assert reach.update is not None
    return reach.update.rows if reach.update.rows_dims == _FLAT else rows(reach)


def _site(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    caches: tuple[Cache, Cache],
    new_rows: tuple[ir.Value | None, ...],
    *,
    kv_num_heads: int,
    head_sizes: list[int | None],
    factor: float = 1.0,
) -> Site:
    query, bias, (key_rows, value_rows) = slots[_QUERY], slots[_BIAS], new_rows
    key_dims, value_dims = (
        _FLAT if cache.update is None else cache.update.rows_dims for cache in caches
    )
    assert query is not None and key_rows is not None and value_rows is not None
    num_heads = attribute_int(node, "num_heads", 0)
    if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
        raise NoMatch(f"{num_heads} heads do not share {kv_num_heads} key/value heads", node)
    check_tokens(query, (key_rows, value_rows), node)
    shares = [_share(value, num_heads, node) for value in slots[: _VALUE + 1]]
    head_size = one_of("head size", *head_sizes, *shares)
    dtype = query.dtype or key_rows.dtype
    if dtype is None or dtype not in FLOATS:
        raise NoMatch(f"the query has the element type {dtype}", node)
    if bias is not None and (rank(bias) not in (4, None) or bias.dtype not in (dtype, None)):
        raise NoMatch(f"the attention_bias is of rank {rank(bias)} and type {bias.dtype}", node)
    scale = attribute_float(node, "scale", 0.0) or head_size**-0.5
    added = _added(slots[_PACKED_BIAS], num_heads * head_size, node)
    return Site(
        dialect=DIALECT.name,
        layer=layer,
        node=node,
        key=caches[0],
        value=caches[1],
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        dtype=dtype,
        scale=snapped(scale * factor, head_size, dtype),
        causal=attribute_int(node, "unidirectional", 0) != 0,
        query=Vectors(query, FLAT_HEADS, bias=added[0]),
        new_key=Vectors(key_rows, key_dims, bias=added[1]),
        new_value=Vectors(value_rows, value_dims, bias=added[2]),
        output=node.outputs[0],
        output_dims=FLAT_HEADS,
        masks=() if bias is None else (Mask(bias),),
    )


def _added(bias: ir.Value | None, width: int, node: ir.Node) -> tuple[npt.NDArray[Any] | None, ...]:
    """Return what is added to queries, keys and values, ``[H * D]`` each."""
    if bias is None:
        return None, None, None
    tensor = ir.convenience.get_const_tensor(bias)
    if tensor is None or tensor.size != 3 * width:
        raise NoMatch("the biases of the projections are no constant with 3 * H * D numbers", node)
    return tuple(np.split(tensor.numpy().reshape(-1), 3))


def _share(value: ir.Value | None, num_heads: int, node: ir.Node) -> int | None:
    """Return D, from ``[B, T, H * D]``."""
    width = None if value is None else static_dim(value, 2)
    if width is None:
        return None
    if width % num_heads:
        raise NoMatch(f"the width {width} is not a multiple of {num_heads} heads", node)
    return width // num_heads


DIALECT = _Dialect()
