"""Make the nodes of a rewrite: readable unique names, known types, shared constants.

Nodes go before a node of the graph that the caller names (``before``), so the graph stays in
topological order and is never sorted. What several layers need is made once (``once``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.ops.domain import DOMAIN
from tq_onnx.ops.operator import Input, Operator

Dim = int | str | None
AttributeValue = int | float | str | Sequence[int]


class Builder:
    """Inserts nodes into one graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._place: ir.Node | None = None
        self._scope = ""
        self._made: dict[Hashable, ir.Value] = {}
        self._names = {value.name for value in (*graph.inputs, *graph.initializers.values())}
        for node in graph.all_nodes():
            self._names.add(node.name)
            self._names.update(value.name for value in node.outputs)
        self.domains: set[str] = set()

    @contextmanager
    def before(self, node: ir.Node, scope: str) -> Iterator[None]:
        """Put new nodes before ``node``, with names that begin with ``scope``."""
        outer = self._place, self._scope
        self._place, self._scope = node, scope
        try:
            yield
        finally:
            self._place, self._scope = outer

    def once(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """Return the value that ``make`` made when it was first asked for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        label: str,
        *,
        dtype: ir.DataType | None,
        shape: Sequence[Dim] | None = None,
        domain: str = "",
        **attributes: AttributeValue,
    ) -> ir.Value:
        """Insert a node with one output."""
        (output,) = self.ops(
            op_type,
            inputs,
            label,
            dtype=dtype,
            shapes=[shape],
            domain=domain,
            attributes=attributes,
        )
        return output

    def operator(
        self,
        operator: type[Operator],
        inputs: Mapping[Input, ir.Value | None],
        *,
        dtype: ir.DataType | None,
        shape: Sequence[Dim] | None = None,
        **attributes: AttributeValue,
    ) -> ir.Value:
        """Insert a node of a TurboQuant operator with one output, named after the operator."""
        return self.op(
            operator.name,
            operator.arguments(inputs),
            operator.name,
            dtype=dtype,
            shape=shape,
            domain=DOMAIN,
            **attributes,
        )

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        label: str,
        *,
        dtype: ir.DataType | None,
        shapes: Sequence[Sequence[Dim] | None],
        domain: str = "",
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> tuple[ir.Value, ...]:
        """Insert a node with one output per entry of ``shapes``."""
        if self._place is None:
            raise RuntimeError("nodes are made inside of Builder.before")
        name = self.unique(f"{self._scope}/{label}")
        outputs = [
            ir.Value(
                name=self.unique(f"{name}/output_{index}"),
                type=None if dtype is None else ir.TensorType(dtype),
                shape=None if shape is None else ir.Shape(shape),
            )
            for index, shape in enumerate(shapes)
        ]
        node = ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name)
        self._graph.insert_before(self._place, node)
        self.domains.add(domain)
        return tuple(outputs)

    def dim(self, value: ir.Value, axis: int, label: str) -> ir.Value:
        """Return one dimension of a value, int64 ``[1]``."""
        return self.op(
            "Shape", [value], label, dtype=ir.DataType.INT64, shape=[1], start=axis, end=axis + 1
        )

    def integers(self, *numbers: int) -> ir.Value:
        """Return a constant int64 list."""
        name = "tq.int64." + "_".join(str(number) for number in numbers)
        return self.constant(name, np.array(numbers, np.int64))

    def number(self, number: int) -> ir.Value:
        """Return a constant int64 scalar."""
        return self.constant(f"tq.int64.scalar.{number}", np.array(number, np.int64))

    def constant(self, name: str, array: npt.ArrayLike) -> ir.Value:
        """Return an initializer; the same name gives the same one."""

        def make() -> ir.Value:
            unique = self.unique(name)
            numbers = np.asarray(array)
            tensor = ir.tensor(numbers, name=unique)
            value = ir.Value(
                name=unique,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(numbers.shape),
                const_value=tensor,
            )
            self._graph.register_initializer(value)
            return value

        return self.once(("constant", name), make)

    def unique(self, name: str) -> str:
        """Return the name, or the name with a number if the graph has it already."""
        candidate, count = name, 0
        while candidate in self._names:
            count += 1
            candidate = f"{name}_{count}"
        self._names.add(candidate)
        return candidate
