"""Find recurrent states, and keys and values of an encoder, which a conversion leaves unchanged.

Neither is a cache that grows with the tokens:

* The *state* of a recurrent layer or of a convolution: an output of a size that never changes,
  which an input of the same size and name continues; in a graph for a first prompt, one whose size
  is the same for any number of tokens. If it were a cache, its attention would be left over, and is
  refused (``tq_onnx.recognise.leftovers``).
* What comes from an *encoder*: keys and values that do not depend on the token ids, and attention
  over them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.liveness import nested_nodes
from tq_onnx.graph.operators import FUSED, PRODUCTS
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.plan import ENCODER, CachePair, ExtraInput, Interface
from tq_onnx.recognise.interface import dimension, token_ids, token_input
from tq_onnx.recognise.site import GraphView

_PASTS: Final = ("past_key_values", "past", "past_key_value")
_PRESENT: Final = "present"
_IN, _OUT = "input.", "output."
"""What the exporter of transformers puts before the names of what goes in and comes out."""
_OPERANDS: Final = {"Attention": (1, 2, 4, 5), "MultiHeadAttention": (1, 2, 6, 7)}
"""Inputs of fused attention that are keys and values, new and old."""
_ENCODER_MASK: Final = "encoder_attention_mask"
"""Its length has another name than that of the keys in some exports."""
_MAX_STEPS: Final = 8
_MASKS: Final = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def find_states(
    view: GraphView, exclusions: Collection[ir.Value], encoder: Encoder
) -> tuple[CachePair, ...]:
    """Return the states: inputs and outputs of one fixed size, by their names.

    A graph for a first prompt takes no states. Those that it returns have no input.
    """
    inputs = {value.name: value for value in view.graph.inputs if value not in exclusions}
    tokens = token_input(view.graph.inputs)
    begins = not view.takes_caches and tokens is not None and static_dim(tokens, 1) is None
    states = []
    for present in view.graph.outputs:
        if present in exclusions or present.name is None or not _keeps_its_size(present):
            continue
        past = next((inputs[name] for name in _names(present.name) if name in inputs), None)
        if past is not None and _alike(past, present):
            states.append(CachePair(past.name, present.name))
        elif begins and past is None and rank(present) != 2 and not encoder.makes(present):
            states.append(CachePair(None, present.name))
    return tuple(states)


def _names(present: str) -> list[str]:
    """Return names that the input may have which an output continues."""
    if present.startswith(_OUT):
        return [_IN + present.removeprefix(_OUT)]
    return [present.replace(_PRESENT, past) for past in _PASTS if _PRESENT in present]


def _keeps_its_size(present: ir.Value) -> bool:
    """Return True for floats of a size that is known as a number, but for the batch."""
    size = rank(present) or 0
    sizes = [static_dim(present, axis) for axis in range(1, size)]
    return present.dtype in FLOATS and bool(sizes) and None not in sizes


def _alike(past: ir.Value, present: ir.Value) -> bool:
    """Return True if an input may have the size of an output, as far as the graph tells it."""
    size = rank(present)
    sizes = [(static_dim(past, axis), static_dim(present, axis)) for axis in range(1, size or 0)]
    fits = all(before in (None, after) for before, after in sizes)
    return fits and rank(past) == size and past.dtype is present.dtype


def encoder_inputs(
    graph: ir.Graph, interface: Interface, caches: Collection[ir.Value]
) -> tuple[ExtraInput, ...]:
    """Return the inputs that an encoder makes, by their types and sizes.

    They are hidden states, or keys and values, with a number of heads and a size that the graph
    tells; and a mask over as many tokens.
    """
    named = {interface.tokens, interface.attention_mask, interface.position_ids}
    named |= {entry.name for entry in interface.fed} | {pair.past for pair in interface.states}
    inputs = [value for value in graph.inputs if value not in caches and value.name not in named]
    states = [value for value in inputs if _of_an_encoder(value)]
    lengths = {dimension(value, -2) for value in states} - {None}
    states += [
        value
        for value in inputs
        if rank(value) == 2
        and value.dtype in _MASKS
        and (dimension(value) in lengths or _ENCODER_MASK in (value.name or ""))
    ]
    return tuple(ExtraInput(value.name or "", ENCODER) for value in inputs if value in states)


def _of_an_encoder(value: ir.Value) -> bool:
    fixed = {3: (2,), 4: (1, 3)}.get(rank(value) or 0, ())
    return (
        value.dtype in FLOATS
        and bool(fixed)
        and all((static_dim(value, axis) or 0) > (axis > 1) for axis in fixed)
    )


class Encoder:
    """What of a graph does not depend on token ids."""

    def __init__(self, view: GraphView) -> None:
        """Follow the ids; without any, everything counts as dependent on tokens."""
        self._view = view
        ids = token_ids(view.graph)
        self._told = bool(ids)
        self._of_tokens = set(ids)
        for node in view.graph:
            read = (value for item in (node, *nested_nodes(node)) for value in item.inputs)
            if node.op_type not in ("Shape", "Size") and not self._of_tokens.isdisjoint(read):
                self._of_tokens.update(node.outputs)

    def makes(self, value: ir.Value | None) -> bool:
        """Return True if a value is one and the same whatever the tokens are."""
        return value is not None and self._told and value not in self._of_tokens

    def is_attended_by(self, node: ir.Node) -> bool:
        """Return True if attention takes keys and values that an encoder makes."""
        if node.op_type != "Softmax":
            slots = _OPERANDS.get(node.op_type, ())
            operands = [node.inputs[slot] for slot in slots if slot < len(node.inputs)]
            sources = [value for value in operands if value is not None]
            return len(sources) > 1 and all(self.makes(value) for value in sources)
        keys, values = _product_above(node), self._product_below(node)
        if keys is None or values is None:
            return False
        # One of two operands is the query, or the probabilities, and depends on tokens.
        return all(any(self.makes(value) for value in item.inputs) for item in (keys, values))

    def _product_below(self, softmax: ir.Node) -> ir.Node | None:
        value = softmax.outputs[0]
        for _ in range(_MAX_STEPS):
            readers = [node for node, _ in self._view.consumers(value)]
            products = [node for node in readers if _is_product(node)]
            if products:
                return products[0]
            following = [node for node in readers if node.op_type not in ("IsNaN", "Shape")]
            if not following:
                return None
            value = following[0].outputs[0]
        return None


def _is_product(node: ir.Node) -> bool:
    return node.op_type in {name.rpartition(".")[2] for name in PRODUCTS | FUSED}


def _product_above(softmax: ir.Node) -> ir.Node | None:
    value = softmax.inputs[0]
    for _ in range(_MAX_STEPS):
        node = None if value is None else value.producer()
        if node is None or _is_product(node):
            return node
        at = 1 if node.op_type == "Where" else 0
        value = node.inputs[at] if at < len(node.inputs) else None
    return None
