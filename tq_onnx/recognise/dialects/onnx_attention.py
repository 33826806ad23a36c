"""Dialect ``onnx``: the standard operator Attention, opset 23 and 24.

The operator's inputs, by slot:

====  ======================  ==============================================================
0     Q                       ``[B, H, T, D]``, or ``[B, T, H * D]`` with q_num_heads
1, 2  K, V                    new rows, or whole caches: ``[B, N, T or S, D]`` or
                              ``[B, T or S, N * D]`` with kv_num_heads
3     attn_mask               Boolean (True keeps a key) or float (added); broadcasts to
                              ``[B, H, T, S]``
4, 5  past_key, past_value    ``[B, N, P, D]``: must be graph inputs; present at outputs 1, 2
6     nonpad_kv_seqlen        int64 ``[B]``: slots of each sequence that hold a key
====  ======================  ==============================================================

Three forms:

* The operator appends to the cache itself (mobius): pasts at 4 and 5, presents at 1 and 2. In a
  graph for a first prompt the pasts are missing.
* A Concat appends, outside (torch's dynamo exporter): K and V are the caches, perhaps with their
  heads repeated. In a graph for a first prompt they are the new rows.
* A TensorScatter writes into caches of a fixed size (mobius ``--static-cache``), and
  nonpad_kv_seqlen or a mask hides the slots that hold no key.

Causality (``is_causal``): query ``t`` sees the keys up to ``offset + t``. The offset is the past
length in the first form, nonpad_kv_seqlen - T in the third, and 0 where neither is given: right in
a first prompt, refused with a cache. A mask acts on top of it; the scores get scale, softcap and
mask in this order, as in ``TurboQuantDequantAttention``, and a query that sees no key gives 0.

What nonpad_kv_seqlen says is kept as a bias, once per model: slots from nonpad_kv_seqlen on are
hidden, and so is what lies behind the causal frontier, which may differ from the last row written.
Slots behind the rows just written are seen where it, or the mask, shows them.

Refused: ``qk_matmul_output`` in use, windows of opset 25, values wider than keys, and a softmax in
double precision; in half precision it becomes more exact. A mask shorter than the keys
is an error when the model runs, as it is in ONNX Runtime.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank
from tq_onnx.recognise.attention.rows import rows
from tq_onnx.recognise.attention.standard import (
    DIALECT_NAME,
    KEY,
    MASK,
    PAST_KEY,
    PAST_VALUE,
    SLOTS,
    VALID,
    VALUE,
    make_site,
)
from tq_onnx.recognise.caches import Reach, Update, by_input, own_cache, updated_cache
from tq_onnx.recognise.site import GraphView, Site

_SCORES_OUTPUT: Final = 3
_ATTRIBUTES: Final = frozenset(
    {
        "is_causal",
        "kv_num_heads",
        "q_num_heads",
        "qk_matmul_output_mode",
        "scale",
        "softcap",
        "softmax_precision",
        "left_window_size",
        "right_window_size",
    }
)
_WINDOWS: Final = ("left_window_size", "right_window_size")


class _Dialect:
    name: Final = DIALECT_NAME

    def claims(self, reach: Reach) -> bool:
        return kind(reach.reader) == "Attention"

    def attention(self, reach: Reach, view: GraphView) -> ir.Node:
        del view
        return reach.reader

    def match(self, layer: int, reaches: tuple[Reach, Reach], view: GraphView) -> Site:
        node = reaches[0].reader
        slots = _slots(node)
        _refuse(node, view)
        outside = [reach.update is not None for reach in reaches]
        if any(outside) != all(outside):
            raise NoMatch("the operator updates one of the caches, but not the other", node)
        if all(outside):
            return _updated_outside(layer, node, slots, reaches)
        return _updated_inside(layer, node, slots, reaches)


def _slots(node: ir.Node) -> tuple[ir.Value | None, ...]:
    if any(value is not None for value in node.inputs[SLOTS:]):
        raise NoMatch(
            f"the operator has {len(node.inputs)} inputs, of which only {SLOTS} are known", node
        )
    inputs = tuple(node.inputs)[:SLOTS]
    return inputs + (None,) * (SLOTS - len(inputs))


def _refuse(node: ir.Node, view: GraphView) -> None:
    unknown = sorted(set(node.attributes) - _ATTRIBUTES)
    if unknown:
        raise NoMatch(f"the attribute {unknown[0]} is not known", node)
    for name in _WINDOWS:
        if attribute_int(node, name, -1) >= 0:
            raise NoMatch(f"the {name} is not supported", node)
    if attribute_int(node, "softmax_precision", 0) == int(ir.DataType.DOUBLE):
        raise NoMatch("the softmax is computed in double precision", node)
    for output in node.outputs[_SCORES_OUTPUT:]:
        if output.is_graph_output() or view.consumers(output):
            raise NoMatch("the operator returns the scores (qk_matmul_output)", node)
    if node.outputs[0].is_graph_output():
        raise NoMatch("the result is an output of the model", node)


def _updated_inside(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    reaches: tuple[Reach, Reach],
) -> Site:
    by_output = {reach.anchor.state.index(): reach.anchor for reach in reaches}
    if set(by_output) != {1, 2}:
        raise NoMatch("the key cache or the value cache is not a graph output", node)
    if slots[VALID] is not None:
        raise NoMatch("the operator has nonpad_kv_seqlen besides a cache of its own", node)
    key, value = (
        own_cache(by_output[output], slots[past])
        for output, past in ((1, PAST_KEY), (2, PAST_VALUE))
    )
    if (key.past is None) != (value.past is None):
        raise NoMatch("the operator takes past keys or past values, but not both", node)
    return make_site(layer, node, slots, (key, value), (slots[KEY], slots[VALUE]))


def _updated_outside(
    layer: int,
    node: ir.Node,
    slots: tuple[ir.Value | None, ...],
    reaches: tuple[Reach, Reach],
) -> Site:
    key, value = by_input(node, reaches, KEY, VALUE)
    if slots[PAST_KEY] is not None or slots[PAST_VALUE] is not None:
        raise NoMatch(
            "the operator takes a past besides a cache that is updated outside of it", node
        )
    assert key.update is not None and key.route is not None
    assert value.update is not None and value.route is not None
    if value.route.factor != 1.0:
        raise NoMatch("the values are scaled after they were cached", node)
    update = key.update
    if update.sources != value.update.sources:
        raise NoMatch("the keys and the values are written to different slots", node)
    _check_visibility(node, slots, update)
    return make_site(
        layer,
        node,
        slots,
        (updated_cache(key), updated_cache(value)),
        (_rows(key), _rows(value)),
        routes=(key.route, value.route),
    )


def _check_visibility(node: ir.Node, slots: tuple[ir.Value | None, ...], update: Update) -> None:
    """Return True if it is told which keys count, where the size of the cache does not say."""
    scattered, valid = update.past_length is not None, slots[VALID]
    if valid is not None and not scattered:
        raise NoMatch("the operator has nonpad_kv_seqlen, but the cache has no fixed size", node)
    if update.past is None or valid is not None:
        return
    if attribute_int(node, "is_causal", 0):
        raise NoMatch("the operator is causal, but has no input for the number of past keys", node)
    if scattered and slots[MASK] is None:
        raise NoMatch("nothing hides the slots of the cache that hold no key", node)


def _rows(reach: Reach) -> ir.Value:
    """Return the new rows, ``[B, N, T, D]`` or ``[B, T, N * D]``."""
    update = reach.update
    assert update is not None
    if update.rows_dims != ("B", "T", "ND"):
        return rows(reach)
    if rank(update.rows) != 3:
        raise NoMatch("the new rows are of unknown rank", reach.anchor.node)
    return update.rows


DIALECT = _Dialect()
