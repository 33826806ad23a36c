"""Show that nothing but attention mixes tokens, so that tokens of many requests may lie in a row.

Every node between token ids and logits has to be of a form that is known to leave tokens apart,
along the dimension that the tokens lie on. Where they lie is told by the sizes of one call, whose
number of tokens no other dimension has. What is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.evaluate import Array, evaluate
from tq_onnx.graph.liveness import live_nodes, nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import REDUCTIONS, Size, operand
from tq_onnx.graph.values import label
from tq_onnx.ops.operators import PagedAttention, PagedEncode
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.callsizes import (
    numbers_of_call,
    shapes_behind,
    sizes_from,
    sizes_of_call,
)
from tq_onnx.targets.paged.selections import Selection, listed, places_of
from tq_onnx.targets.paged.states import STATE_SLOTS
from tq_onnx.targets.paged.tokenrules import RULES, is_fill

_COUNTS: Final = (1, 2, 7, 1009, 1_000_003)
"""Numbers of tokens that a value is computed for, to see whether it differs."""
_MICROSOFT: Final = "com.microsoft"

_ELEMENTWISE: Final = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "Clip"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Xor"),
        *("Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Tanh", "Sigmoid", "Erf"),
        *("Relu", "LeakyRelu", "Elu", "Gelu", "Softplus", "Softsign", "HardSigmoid", "HardSwish"),
        *("Swish", "Mish", "PRelu", "Sign", "Floor", "Ceil", "Round", "IsNaN", "IsInf", "Cast"),
        *("CastLike", "Identity", "Expand", "QuantizeLinear", "DequantizeLinear"),
        *(f"{_MICROSOFT}.{name}" for name in ("FastGelu", "QuickGelu", "BiasGelu", "Gelu")),
    }
)
_MOVES: Final = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_ABSENT: Final = object()
_ROTARY: Final = frozenset({"RotaryEmbedding", f"{_MICROSOFT}.RotaryEmbedding"})
_ALL_TOKENS: Final = _ROTARY | STATE_SLOTS.keys()
"""These read positions or states, of all tokens in their order."""
_EXPERTS: Final = frozenset({f"{_MICROSOFT}.MoE", f"{_MICROSOFT}.QMoE"})
_SHAPE_SLOTS: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Reshape", "Expand", "Split", "Tile", "Squeeze", "Unsqueeze"), (1,)),
    **dict.fromkeys(REDUCTIONS, (1,)),
    "Slice": (1, 2, 3, 4),
    "TopK": (1,),
    "Pad": (1, 3),
    "OneHot": (1, 2),
    "CastLike": (1,),
    **{name.rpartition(".")[2]: slots for name, slots in STATE_SLOTS.items()},
    PagedEncode.name: tuple(range(1, len(PagedEncode.inputs))),
    PagedAttention.name: tuple(
        slot.slot
        for slot in PagedAttention.inputs
        if slot not in (PagedAttention.query, PagedAttention.key_cache, PagedAttention.value_cache)
    ),
}
"""Inputs that say what is done, and are no numbers to compute with."""


class Tokenwise:
    """The values of a paged model that hold something of tokens, shown to leave them apart."""

    def __init__(self, model: ir.Model, plan: Plan, sources: Iterable[ir.Value]) -> None:
        """Walk all nodes that an output needs; see the class for arguments."""
        self._tokens, self._entries = numbers_of_call(model)
        held = set(sources)
        self._sizes = sizes_of_call(model, plan, held, self._tokens, self._entries)
        self._holding: dict[ir.Value, Selection | None] = dict.fromkeys(held)
        self._counted: set[ir.Value] = set()
        self._sized: set[ir.Value] = set()
        self._differs: dict[ir.Value, bool] = {}
        self._copies: dict[ir.Value, int] = {}
        live = live_nodes(model.graph.outputs)
        # What makes the positions of the packed tokens is known.
        known = live_nodes(held)
        for node in model.graph:
            if node in live and node not in known:
                self._visit(node)

    def holds(self, value: ir.Value | None) -> bool:
        """Return True if a value holds something of each token."""
        return value in self._holding

    def has_row_of_each(self, value: ir.Value) -> bool:
        """Return True if a value holds all tokens, once."""
        return self._holding.get(value, _ABSENT) is None and value not in self._copies

    def is_counted(self, value: ir.Value | None) -> bool:
        """Return True if a value is computed from the number of tokens, and differs with it."""
        if value is None or value not in self._counted:
            return False
        if value not in self._differs:
            self._differs[value] = self._differs_with_tokens(value)
        return self._differs[value]

    def is_order(self, value: ir.Value | None) -> bool:
        """Return True if a value counts the tokens of a call from 0."""
        if value is None or value not in self._counted:
            return False
        found = [self._computed(value, tokens) for tokens in _COUNTS]
        return all(
            numbers is not None and np.array_equal(numbers.reshape(-1), np.arange(tokens))
            for numbers, tokens in zip(found, _COUNTS, strict=True)
        )

    def _differs_with_tokens(self, value: ir.Value) -> bool:
        numbers = [self._computed(value, tokens) for tokens in _COUNTS]
        first = numbers[0]
        return first is None or any(
            other is None or not np.array_equal(first, other) for other in numbers
        )

    def _computed(self, value: ir.Value, tokens: int) -> Array | None:
        """Return a value in a call with so many tokens; None if sizes alone do not tell it."""
        arrays: dict[ir.Value, Array] = {}
        for node in shapes_behind(value):
            answer = sizes_from(node, self._sizes)
            if answer is None:
                return None
            if any(_is_multiple(size, self._entries) for size in answer):
                return None  # as many as a mask selects
            factor = self._tokens
            scaled = [size if size % factor else size // factor * tokens for size in answer]
            arrays[node.outputs[0]] = np.array(scaled, np.int64)
        try:
            return evaluate([value], arrays)[0]
        except NoMatch:
            return None

    def axis(self, value: ir.Value) -> int:
        """Return the axis that tokens lie on in a value that holds something of them.

        A token may have several rows there, such as those of its heads, also rows of no numbers.
        """
        if value in self._copies:
            raise NoMatch(f"{value.name} repeats all tokens, and is read by more than a Reshape")
        return self._axis(value)

    def _axis(self, value: ir.Value) -> int:
        shape = self._sizes.get(value.name or "")
        if shape is None or None in shape:
            raise NoMatch(f"the graph does not show the shape of {value.name}")
        rows, entries = self._tokens, self._entries
        if self._holding.get(value) is not None:
            rows, entries = entries, rows
        found = [axis for axis, size in enumerate(shape) if _is_multiple(size, rows)]
        count = prod(size or 1 for size in self.shape(value))
        if len(found) != 1 or count % rows**2 == 0 or count % entries == 0:
            raise NoMatch(f"{value.name} does not have rows for each token")
        return found[0]

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Return the sizes of a value in the call that was looked at."""
        return tuple(size for size in self._sizes[value.name or ""] if isinstance(size, int))

    def _visit(self, node: ir.Node) -> None:
        if self._gives_sizes_only(node):
            self._holding.update(dict.fromkeys(node.outputs))
            return
        inner = {value for one in nested_nodes(node) for value in one.inputs}
        read = [value for value in (*node.inputs, *inner) if value is not None]
        for value in () if PagedAttention.is_node(node) else read:
            maker = value.producer()
            if maker is not None and PagedEncode.is_node(maker):
                raise NoMatch(f"{_described(node)} reads a cache besides attention")
        if node.op_type in ("Shape", "Size") and node.domain == "":
            if any(value in self._holding or value in self._counted for value in read):
                self._counted.update(node.outputs)
            return
        data = self._data(node)
        if not any(value in self._holding for value in (*data, *inner)):
            self._count(node, data, read)
            return
        if inner:
            raise NoMatch(f"{_described(node)} computes with tokens in branches of its own")
        self._refuse_counts(node, data)
        # Behind the results of an operator with a state is the state.
        outputs = node.outputs[:1] if kind(node) in STATE_SLOTS else node.outputs
        selections = self._selected(node, data)
        if selections is None:
            selections = [self._common(node, data)] * len(outputs)
            self._holding.update(zip(outputs, selections, strict=True))
            if not self._is_tokenwise(node, data):
                raise NoMatch(f"{_described(node)} is not known to leave the tokens apart")
        self._holding.update(zip(outputs, selections, strict=True))
        if PagedEncode.is_node(node):
            return  # pages hold tokens by their places
        for value in outputs:
            if value.uses() or value.is_graph_output():
                self._axis(value)

    def _data(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs that a node computes with; the others say what is done."""
        slots = _SHAPE_SLOTS.get(node.op_type, ())
        inputs = [(slot in slots, value) for slot, value in enumerate(node.inputs)]
        if node.domain == "" and any(self.holds(value) for says, value in inputs if says):
            raise NoMatch(f"what {_described(node)} does depends on tokens")
        return [value for says, value in inputs if value is not None and not says]

    def _gives_sizes_only(self, node: ir.Node) -> bool:
        """Return True if nothing but the shape of what a node makes of tokens is read.

        Of operators whose sizes do not depend on contents.
        """
        if kind(node) not in ("Slice", "Gather") or not self.holds(node.inputs[0]):
            return False
        output = node.outputs[0]
        readers = [use.node for use in output.uses()]
        is_shape = all(kind(reader) == "Shape" for reader in readers)
        operands = node.inputs[1:]
        return is_shape and not output.is_graph_output() and not any(map(self.holds, operands))

    def _common(self, node: ir.Node, data: list[ir.Value]) -> Selection | None:
        """Return what all values that a node reads have rows of: one list of entries, or tokens."""
        held = [self._holding[value] for value in data if value in self._holding]
        if any(selection is not None and selection.places for selection in held):
            raise NoMatch(f"{_described(node)} computes with the places of tokens in a call")
        first, name = held[0], kind(node)
        if first is not None and (node.domain not in ("", _MICROSOFT) or name in _ALL_TOKENS):
            raise NoMatch(f"{_described(node)} computes with some of the tokens")
        for selection in held:
            is_same = selection is first or (
                selection is not None and first is not None and selection.is_same_list(first)
            )
            if not is_same:
                raise NoMatch(f"{_described(node)} mixes tokens with some of them")
        return first

    def _selected(self, node: ir.Node, data: list[ir.Value]) -> list[Selection | None] | None:
        """Return what a node makes that lists tokens, or works with such lists; else None."""
        name = kind(node)
        selections = [None if value is None else self._holding.get(value) for value in node.inputs]
        if name == "NonZero" and selections[0] is None:
            mask = data[0]
            shape, axis = self.shape(mask), self.axis(mask)
            return [listed(mask, axis, shape)] if shape[axis] == self._tokens else None
        if not any(selection is not None and selection.places for selection in selections):
            return None
        if name == "Gather" and self.holds(data[0]) and selections[0] is None:
            axis, by = attribute_int(node, "axis", 0), selections[1]
            table = self.shape(data[0])
            along = axis % len(table) == self.axis(data[0])
            if by is not None and along and by.chooses(table[axis] // self._tokens):
                return [by.contents]
        elif name == "ScatterElements":
            return [None] if self._puts_back(node, selections) else None
        else:
            numbers = [self._number(value) for value in node.inputs]
            axis = self.axis(data[0]) if selections[0] is not None else 0
            return list(places_of(node, selections, numbers, axis) or ()) or None
        return None

    def _puts_back(self, node: ir.Node, selections: list[Selection | None]) -> bool:
        """Return True if each entry of a list goes to the row of its token."""
        base, indices, updates = (operand(node, slot) for slot in range(3))
        by, rows = selections[1:3]
        if base is None or indices is None or updates is None or selections[0] is not None:
            return False
        if by is None or rows is None or rows.places or not by.is_same_list(rows):
            return False
        output = node.outputs[0]
        self._holding[output] = None
        axis = self.axis(output)
        is_base = self.axis(base) == axis if self.holds(base) else is_fill(base)
        are_rows = self.axis(indices) == self.axis(updates) == axis
        along = attribute_int(node, "axis", 0) % len(self.shape(output)) == axis
        is_each = self.shape(output)[axis] == self._tokens and by.chooses(1)
        return is_base and are_rows and along and is_each

    def _number(self, value: ir.Value | None) -> int | None:
        """Return the one integer that a value is in every call."""
        numbers = None if value is None or self.holds(value) else self.fixed(value)
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def _refuse_counts(self, node: ir.Node, data: list[ir.Value]) -> None:
        """Refuse a node that computes with the number of tokens, or with their places in a call."""
        for value in data:
            if kind(node) in _ROTARY and self.is_order(value):
                continue
            if self.is_counted(value):
                raise NoMatch(f"{_described(node)} computes with the number of tokens")
            if value not in self._holding and self._has_tokens(value):
                raise NoMatch(f"{_described(node)} numbers the tokens of a call")

    def _has_tokens(self, value: ir.Value) -> bool:
        """Return True if a value that holds nothing of tokens may have as many numbers."""
        if value not in self._sized or is_fill(value):
            return False
        shape = self._sizes.get(value.name or "")
        return shape is None or any(
            size is None or _is_multiple(size, self._tokens) for size in shape
        )

    def _count(self, node: ir.Node, data: list[ir.Value], read: list[ir.Value]) -> None:
        """Follow the number of tokens; a constant that is repeated as often has none of it."""
        repeats = node.op_type in ("Expand", "ConstantOfShape")
        if any(value in self._counted or value in self._sized for value in read):
            self._sized.update(node.outputs)
        counted = any(value in self._counted for value in (data[:1] if repeats else read))
        if counted and node.op_type != "ConstantOfShape":
            self._counted.update(node.outputs)

    def _is_tokenwise(self, node: ir.Node, data: list[ir.Value]) -> bool:
        name = kind(node)
        if PagedEncode.is_node(node) or PagedAttention.is_node(node):
            return self.axis(data[0]) == 2
        if name in _ELEMENTWISE:
            return self._is_aligned(node.outputs[0], data)
        if name in _MOVES:
            return self._keeps_order(data[0], node.outputs[0])
        if name in _EXPERTS:
            held = [value for value in data if value in self._holding]
            return all(self.axis(value) >= 0 for value in held) and self._is_row(data[0])
        if name in _ROTARY:
            return self._is_row(data[0]) and self._turns_by_positions(node)
        rule = RULES.get(name)
        return rule is not None and rule(self, node, data)

    def _is_row(self, value: ir.Value) -> bool:
        """Return True if tokens are not the last axis of a value."""
        return self.holds(value) and self.axis(value) < len(self.shape(value)) - 1

    def _turns_by_positions(self, node: ir.Node) -> bool:
        """Return True if each token reads its own row of the tables of a rotation."""
        cos, sin, ids = (operand(node, slot) for slot in ((2, 3, 1) if node.domain else (1, 2, 3)))
        if self.holds(ids):
            return not self.holds(cos) and not self.holds(sin)
        if not self.holds(cos) or not self.holds(sin):
            return False
        # Tables of the tokens themselves, read in their order.
        return ids is None or self.is_order(ids)

    def _is_aligned(self, output: ir.Value, data: list[ir.Value]) -> bool:
        """Return True if operands that are broadcast have their tokens on one axis, or none."""
        behind = len(self.shape(output)) - self.axis(output)
        for value in data:
            if value in self._holding:
                if len(self.shape(value)) - self.axis(value) != behind:
                    return False
                continue
            shape = self._sizes.get(value.name or "")
            is_alike = shape is not None and (len(shape) < behind or shape[-behind] == 1)
            if not is_alike and not is_fill(value):
                return False
        return True

    def _keeps_order(self, value: ir.Value, output: ir.Value) -> bool:
        before, after = self._axis(value), self.axis(output)
        blocks = prod(self.shape(value)[:before]) * self._copies.get(value, 1)
        return blocks == prod(self.shape(output)[:after])

    def fixed(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Return the integers that a value is in every call; None if they are not known."""
        if value is None or self.holds(value) or self.is_counted(value):
            return None
        numbers = self._computed(value, _COUNTS[0])
        return None if numbers is None else tuple(int(number) for number in numbers.reshape(-1))

    def repeats_tokens(self, value: ir.Value, copies: int) -> None:
        """Note that all tokens follow one another so often on their axis; 1 for once.

        Only a Reshape may read such a value, and give the copies an axis of their own.
        """
        if copies > 1:
            self._copies[value] = copies


def _is_multiple(size: Size, tokens: int) -> bool:
    return isinstance(size, int) and size > 0 and size % tokens == 0


def _described(node: ir.Node) -> str:
    return f"{label(node)} ({node.op_type})"
