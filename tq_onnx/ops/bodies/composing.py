"""Functions put together from pieces: calls, attributes of the operator, choices between codecs.

The operators' bodies are not onnxscript, because their inputs, and what is called for which codec,
depend on the model, and onnxscript reads one text. What they call is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import OnnxFunction

from tq_onnx.ops.domain import BODY_OPSET, DOMAIN, VERSION
from tq_onnx.ops.features import Features
from tq_onnx.ops.operator import Attribute, Operator

Make = Callable[["Composer"], ir.Value]
"""Add nodes and return the result."""


def operator_style(name: str) -> str:
    """Return a Python name in the style of ONNX operators."""
    return "".join(word.capitalize() for word in name.split("_"))


class Composer:
    """Nodes of a function, or of a branch in it."""

    def __init__(self, suffix: str = "") -> None:
        """Store the suffix, which keeps the names of branches apart."""
        self.nodes: list[ir.Node] = []
        self._suffix = suffix

    def call(
        self,
        result: str,
        piece: OnnxFunction[..., Any],
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, int] | None = None,
        forwarded: Sequence[Attribute] = (),
    ) -> ir.Value:
        """Call a piece."""
        given = [ir.AttrInt64(name, value) for name, value in (attributes or {}).items()]
        given += [_forwarded(each.name, each) for each in forwarded]
        return self._node(result, operator_style(piece.name), inputs, given, domain=DOMAIN)

    def standard(
        self, result: str, op_type: str, inputs: Sequence[ir.Value], **attributes: int
    ) -> ir.Value:
        """Return a node of standard ONNX."""
        given = [ir.AttrInt64(name, value) for name, value in attributes.items()]
        return self._node(result, op_type, inputs, given)

    def choose(
        self, result: str, index: Attribute, cases: Mapping[int, Make], past_length: ir.Value
    ) -> ir.Value:
        """Return the outputs of one case, chosen by the operator's attribute.

        A case must not capture the result of a Cast: where that follows another Cast, onnxruntime
        without optimisations drops both, as it does not look into branches.

        Args:
            cases: by number; the last one is not asked for. A single one needs no attribute.
            past_length: int64 ``[B]`` or ``[1]``, not negative. It makes the choice one of run
                time: onnxruntime 1.24 loses the constants of a branch that it picks beforehand.
        """
        if len(cases) == 1:
            (make,) = cases.values()
            return make(self)
        said = self._node(index.name, "Constant", [], [_forwarded("value_int", index)])
        zero = self.standard(f"{result}_zero", "Constant", [], value_int=0)
        longest = self.standard(f"{result}_longest", "ReduceMax", [past_length], keepdims=0)
        nothing = self.standard(f"{result}_nothing", "Min", [longest, zero])
        number = self.standard(f"{result}_number", "Add", [said, nothing])
        return self._choose(result, number, list(cases.items()))

    def _choose(self, result: str, index: ir.Value, cases: list[tuple[int, Make]]) -> ir.Value:
        (number, make), *others = cases
        wanted = self.standard(f"{result}_{number}", "Constant", [], value_int=number)
        is_it = self.standard(f"{result}_is_{number}", "Equal", [index, wanted])

        def rest(composer: Composer) -> ir.Value:
            if len(others) == 1:
                return others[0][1](composer)
            return composer._choose(result, index, others)

        branches = [
            ir.AttrGraph(name, self._branch(result, f"{self._suffix}_{number}{letter}", made))
            for name, letter, made in (("then_branch", "a", make), ("else_branch", "b", rest))
        ]
        return self._node(result, "If", [is_it], branches)

    def _branch(self, result: str, suffix: str, make: Make) -> ir.Graph:
        composer = Composer(suffix)
        made = make(composer)
        return ir.Graph([], [made], nodes=composer.nodes, name=f"{result}{suffix}")

    def _node(
        self,
        result: str,
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: Sequence[ir.Attr],
        domain: str = "",
    ) -> ir.Value:
        output = ir.Value(name=f"{result}{self._suffix}")
        self.nodes.append(ir.Node(domain, op_type, inputs, attributes, outputs=[output]))
        return output

    def function(
        self,
        operator: type[Operator],
        features: Features,
        inputs: Sequence[ir.Value],
        output: ir.Value,
    ) -> ir.Function:
        """Return the function of all nodes so far, for models with these features."""
        graph = ir.Graph(
            inputs,
            [output],
            nodes=self.nodes,
            opset_imports={"": BODY_OPSET, DOMAIN: VERSION},
            doc_string=operator.documentation(features),
        )
        attributes = operator.attributes_with(features)
        declared = [ir.Attr(each.name, each.kind, None) for each in attributes]
        return ir.Function(DOMAIN, operator.name, graph=graph, attributes=declared)


def _forwarded(name: str, attribute: Attribute) -> ir.Attr:
    return ir.RefAttr(name, attribute.name, attribute.kind)
