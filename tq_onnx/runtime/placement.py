"""Check that a provider runs all of a model, by ONNX Runtime's record and the file's types.

The record names the nodes that are left after optimisation and the provider of each, but not what
they compute. That is told by the file: a node belongs on the device if it gives floats or touches a
cache. A node that the file does not have by that name was made by ONNX Runtime; it is taken for
one of floats unless the file has its operator, and for other numbers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.files.load import load
from tq_onnx.graph.copying import copy_graph
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.runtime.providers import ExecutionProvider, provider_of
from tq_onnx.runtime.session import PlacedNode, make_session, placement
from tq_onnx.targets.registry import target_of_plan


@dataclass(frozen=True)
class PlacementReport:
    """The providers of a model's nodes.

    Attributes:
        provider: the execution provider that was asked for.
        nodes: nodes after optimisation; 0 where ONNX Runtime keeps no record.
        on_provider: those that it runs.
        elsewhere: the others by operator, and how many there are of each.
        misplaced: those among them that compute floats or touch a cache.
        encode: ``TurboQuantEncode`` nodes that run on the library's kernels.
        attention: likewise ``TurboQuantDequantAttention``.
        layers: attention layers with TurboQuant operators; none in an original, nor for a target
            that has standard operators in their places.
    """

    provider: str
    nodes: int
    on_provider: int
    elsewhere: Mapping[str, int]
    misplaced: tuple[PlacedNode, ...]
    encode: int
    attention: int
    layers: int

    def __str__(self) -> str:
        """Return one line for a report."""
        if self.nodes == 0:
            return f"{self.provider}; this onnxruntime keeps no record of nodes"
        elsewhere = ", ".join(f"{count} {op}" for op, count in self.elsewhere.items())
        on_it = f"{self.on_provider} of {self.nodes} nodes on {self.provider}"
        return f"{on_it}; on the CPU: {elsewhere}" if elsewhere else on_it


def report_placement(session: Any, model: ir.Model) -> PlacementReport:
    """Tell where the nodes of a session run.

    Args:
        model: the graph that it was opened from; it is not changed.
    """
    placed = placement(session)
    provider = provider_of(session).provider
    text = model.metadata_props.get(METADATA_PLAN)
    misassigned = [node for node in placed.assigned if node.provider != provider]
    misplaced: tuple[PlacedNode, ...] = ()
    if misassigned:
        belongs = _Belonging(copy_graph(model))
        misplaced = tuple(node for node in misassigned if belongs.on_device(node))
    return PlacementReport(
        provider,
        placed.nodes,
        placed.nodes - len(misassigned),
        dict(sorted(Counter(node.op_type for node in misassigned).items())),
        misplaced,
        placed.encode,
        placed.attention,
        0 if text is None else _layers(Plan.from_json(text)),
    )


def _layers(plan: Plan) -> int:
    return len(plan.layers) if target_of_plan(plan).has_operators else 0


def problem_of(report: PlacementReport) -> str | None:
    """Return the problem of a placement as a clause; None if there is none."""
    if report.misplaced:
        first, *further = report.misplaced
        plural = "" if len(further) == 1 else "s"
        suffix = f" (and {len(further)} more node{plural})" if further else ""
        return f"node {first.name} ({first.op_type}) runs on {first.provider}{suffix}"
    if (report.encode, report.attention) != (2 * report.layers, report.layers):
        return (
            f"{report.encode} {ENCODE} and {report.attention} {ATTENTION} nodes of "
            f"{report.layers} layers run on kernels"
        )
    return None


def refuse_misplaced(session: Any, model: ir.Model, where: Path) -> None:
    """Refuse a model of which the provider does not run every node that it should.

    Args:
        model: the graph that it was opened from; it is not changed.
    """
    problem = problem_of(report_placement(session, model))
    if problem is not None:
        raise UnsupportedModelError(problem, where=str(where), fix=provider_of(session).export)


def open_placed(path: Path, ep: ExecutionProvider) -> PlacementReport:
    """Open a model on a provider and tell where its nodes run."""
    loaded = load(path)
    converted = METADATA_PLAN in loaded.model.metadata_props
    session = make_session(loaded.path, library=converted, ep=ep)
    with located(path):
        return report_placement(session, loaded.model)


class _Belonging:
    """The nodes of a model that belong on the device."""

    def __init__(self, model: ir.Model) -> None:
        fill_shapes(model)
        caches = {value for value in model.graph.inputs if value.dtype is ir.DataType.UINT8}
        self._by_name: dict[str, bool] = {}
        self._by_operator: dict[tuple[str, str], bool] = {}
        for node in model.graph:
            # Bytes are caches and nothing else; a shortened cache is bytes, too.
            belongs = any(value in caches for value in node.inputs) or any(
                value.dtype is None
                or value.dtype.is_floating_point()
                or value.dtype is ir.DataType.UINT8
                for value in node.outputs
            )
            if node.name:
                self._by_name[node.name] = belongs
            key = (node.domain, node.op_type)
            self._by_operator[key] = self._by_operator.get(key, False) or belongs

    def on_device(self, node: PlacedNode) -> bool:
        known = self._by_name.get(node.name)
        return self._by_operator.get((node.domain, node.op_type), True) if known is None else known


def try_provider(ep: ExecutionProvider) -> PlacementReport:
    """Open a model of one node on a provider."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.node("Neg", [x], name="negated")
    (y,) = node.outputs
    y.name, y.type, y.shape = "y", x.type, x.shape
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 18}, name="one_node")
    model = ir.Model(graph, ir_version=9)
    session = make_session(ir.to_proto(model).SerializeToString(), library=ep.has_own_memory, ep=ep)
    return report_placement(session, model)
