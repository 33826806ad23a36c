"""The form of an operator's record: its inputs, outputs and attributes, and what is made of them.

An operator is a class that derives from ``Operator``; ``tq_onnx.ops.operators`` has all. The
order of the inputs in the class is the order of their slots. The class is never instantiated: its
members name slots and attributes, so a misspelt one is an error of the type checker:

    Encode.past_length.slot            2
    Encode.rotation.of(node)           the value that a node has there, or None
    Encode.nodes(model.graph)          the nodes of the operator in a graph
    Encode.arguments({Encode.past: past, ...})    a node's inputs, in the order of the slots
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import onnx_ir as ir

from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.features import Features

FLOATS: Final = "T"
"""The element type of the model's activations: float32, float16 or bfloat16."""
BYTES: Final = "tensor(uint8)"
INT64: Final = "tensor(int64)"
INT32: Final = "tensor(int32)"
FLOAT32: Final = "tensor(float)"


@dataclass(eq=False)
class Parameter:
    """One input or output.

    Attributes:
        element: ``FLOATS`` or the only element type, as ``onnx.defs`` spells it.
        meaning: its shape and what it holds, in Markdown.
        when: the features of a model that bring an optional input, all of them; empty if it is
            required.
        name: its name, that of the class member.
        slot: its place among the operator's inputs or outputs, from 0.
    """

    element: str
    meaning: str
    when: Features = frozenset()
    name: str = field(init=False)
    slot: int = field(init=False)

    def __set_name__(self, owner: type[object], name: str) -> None:
        self.name = name

    @property
    def is_optional(self) -> bool:
        """True if a node may lack it."""
        return bool(self.when)


class Input(Parameter):
    """One input.

    Attributes:
        operator: whose input it is.
    """

    operator: type[Operator]

    def of(self, node: ir.Node) -> ir.Value | None:
        """Return the value that a node reads here; None if the node lacks the input.

        Inputs of the same names are the same in all forms of an operator, whatever their slots.
        """
        slot = self._slot(node)
        return None if slot is None or slot >= len(node.inputs) else node.inputs[slot]

    def replace(self, node: ir.Node, value: ir.Value | None) -> None:
        """Make a node read another value, or none.

        The node gets as many inputs as the last one that is there needs.
        """
        slot = self._slot(node)
        assert slot is not None
        if slot >= len(node.inputs):
            node.resize_inputs(slot + 1)
        node.replace_input_with(slot, value)
        slots = [slot for slot, each in enumerate(node.inputs) if each is not None]
        node.resize_inputs(max(slots, default=-1) + 1)

    def _slot(self, node: ir.Node) -> int | None:
        operator = Operator.known.get(node.op_type, self.operator)
        return operator.by_name[self.name].slot if self.name in operator.by_name else None


class Output(Parameter):
    """One output."""


@dataclass(eq=False)
class Attribute:
    """One attribute.

    Attributes:
        kind: the type of its value.
        meaning: what it says, in Markdown.
        default: the value where a node lacks it; None if it is required.
        when: the features of a model whose nodes have it; empty if all nodes do.
        name: its name, that of the class member.
    """

    kind: ir.AttributeType
    meaning: str
    default: int | None = None
    when: Features = frozenset()
    name: str = field(init=False)

    def __set_name__(self, owner: type[object], name: str) -> None:
        self.name = name


class Operator:
    """One operator of the domain.

    Attributes:
        name: its name in ONNX.
        summary: what it computes, in Markdown.
        inputs: by slot; the optional ones come last.
        outputs: by slot.
        attributes: the required ones first.
        by_name: the inputs.
        known: all operators, by name.
    """

    known: ClassVar[dict[str, type[Operator]]] = {}
    name: ClassVar[str]
    summary: ClassVar[str]
    inputs: ClassVar[tuple[Input, ...]]
    outputs: ClassVar[tuple[Output, ...]]
    attributes: ClassVar[tuple[Attribute, ...]]
    by_name: ClassVar[Mapping[str, Input]]

    def __init_subclass__(cls) -> None:
        Operator.known[cls.name] = cls
        members = tuple(vars(cls).values())
        cls.inputs = tuple(each for each in members if isinstance(each, Input))
        cls.outputs = tuple(each for each in members if isinstance(each, Output))
        cls.attributes = tuple(each for each in members if isinstance(each, Attribute))
        cls.by_name = {each.name: each for each in cls.inputs}
        for each in cls.inputs:
            each.operator = cls
        for parameters in (cls.inputs, cls.outputs):
            for slot, parameter in enumerate(parameters):
                parameter.slot = slot

    @classmethod
    def is_node(cls, node: ir.Node) -> bool:
        """Return True if a node is one of this operator."""
        return node.domain == DOMAIN and node.op_type == cls.name

    @classmethod
    def nodes(cls, graph: Iterable[ir.Node]) -> list[ir.Node]:
        """Return the nodes of this operator, in the order of the graph."""
        return [node for node in graph if cls.is_node(node)]

    @classmethod
    def arguments(cls, values: Mapping[Input, ir.Value | None]) -> list[ir.Value | None]:
        """Return the inputs of a new node, in the order of the slots.

        Args:
            values: by input; None, or no entry, for an input that the node lacks. The node ends
                with the last that is there, and those that it lacks before it are empty.
        """
        inputs = [values.get(each) for each in cls.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs

    @classmethod
    def inputs_with(cls, features: Features) -> tuple[Input, ...]:
        """Return the inputs up to the last one that a model with these features uses.

        Those in the middle that the model lacks are among them: a function has no optional inputs,
        and a node has as many as its function.
        """
        used = (each.slot for each in cls.inputs if each.when <= features)
        return cls.inputs[: max(used, default=-1) + 1]

    @classmethod
    def attributes_with(cls, features: Features) -> tuple[Attribute, ...]:
        """Return the attributes that the nodes of a model with these features have."""
        return tuple(each for each in cls.attributes if each.when <= features)

    @classmethod
    def documentation(cls, features: Features = frozenset()) -> str:
        """Return the summary, inputs, outputs and attributes as Markdown.

        Args:
            features: of the model that the text is for.
        """
        sections: dict[str, Iterable[Parameter | Attribute]] = {
            "Inputs": cls.inputs_with(features),
            "Outputs": cls.outputs,
            "Attributes": cls.attributes_with(features),
        }
        parts = [cls.summary]
        for title, entries in sections.items():
            lines = [f"- `{each.name}`: {each.meaning}" for each in entries]
            if lines:
                parts.append("\n".join([f"**{title}**", "", *lines]))
        return "\n\n".join(parts)
