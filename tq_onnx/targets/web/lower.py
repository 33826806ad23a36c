"""A converted decoder for JavaScript runtimes: few standard operators in the operators' places.

Function bodies are general: they are read by every runtime, serve every codec, and every layer
asks for lengths, masks and shapes anew. Runtimes inline them when they open a model, node by node.
Here that is done in advance: the bodies of ``tq_onnx.targets.web.bodies`` are inlined, tables
replace arithmetic, and what layers share is made once. Rows are the same, so that caches of such a
model go on in one with operators, and back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    RemoveUnusedNodesPass,
)

from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.target import Lowering
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import BODY_OPSET, DOMAIN, VERSION
from tq_onnx.plan import Plan
from tq_onnx.targets import restore
from tq_onnx.targets.web.layer import LayerCalls
from tq_onnx.targets.web.shared import Calls, Shared

TARGET: Final = "web"


def lowering_of(plan: Plan) -> Lowering:
    """Return the passes that rewrite a converted model, and the plan of what they leave."""
    return Lowering(replace(plan, target=TARGET), (InlineOperatorsPass(plan),))


class InlineOperatorsPass(ir.passes.InPlacePass):
    """Puts standard operators in the places of ours."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def requires(self, model: ir.Model) -> None:
        """Require a model as ``ConvertPass`` and ``adapt`` leave it, table by table."""
        for violation in layer_violations(model, self._plan):
            raise ir.passes.PreconditionError(violation)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the operators in place."""
        layers = converted_layers(model, self._plan)
        model_nodes = frozenset(model.graph)
        calls = Calls(Builder(model.graph))
        shared = Shared(calls, layers[0])
        remembered = [LayerCalls(calls, shared, layer, self._plan).replace() for layer in layers]
        for identifier in [key for key in model.functions if key[0] == DOMAIN]:
            del model.functions[identifier]
        _inline(model, calls)
        _share_constants(model, calls.build, model_nodes)
        RemoveUnusedNodesPass()(model)
        model.graph.sort()
        restore.remember(model, remembered)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that none of our operators is left."""
        nodes = [node.name for node in model.graph.all_nodes() if node.domain.startswith(DOMAIN)]
        if nodes or model.functions:
            raise ir.passes.PostconditionError(f"{[*nodes, *model.functions]} are left")


def _inline(model: ir.Model, calls: Calls) -> None:
    """Put all functions in the places of their calls."""
    for (domain, name), piece in calls.called.items():
        proto = piece.to_function_proto()
        proto.domain, proto.name = domain, name
        function = ir.serde.deserialize_function(proto)
        function.opset_imports[""] = model.opset_imports.get("", BODY_OPSET)
        function.opset_imports[domain] = VERSION
        model.functions[function.identifier()] = function
        model.opset_imports[domain] = VERSION
    RemoveUnusedNodesPass()(model)
    InlinePass()(model)
    model.functions.clear()
    for domain in [name for name in model.opset_imports if name.startswith(DOMAIN)]:
        del model.opset_imports[domain]


def _share_constants(model: ir.Model, build: Builder, model_nodes: frozenset[ir.Node]) -> None:
    """Make initializers of the constants in functions, one of each; the model's own stay."""
    for node in list(model.graph):
        if node.op_type != "Constant" or node in model_nodes:
            continue
        (value,) = node.outputs
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        array = tensor.numpy()
        kind = "scalar." if array.ndim == 0 else ""
        name = f"tq.{array.dtype}.{kind}{'_'.join(map(str, array.reshape(-1).tolist()))}"
        value.replace_all_uses_with(build.constant(name, array))
        model.graph.remove(node, safe=True)
