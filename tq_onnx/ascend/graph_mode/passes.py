"""A converted decoder for CANN's graph mode: standard ONNX, numbers for sizes, nothing else.

    norms, rotary -> lengths -> bodies -> constants -> opset -> check

With ``enable_cann_graph=1``, its default, CANNExecutionProvider never takes a TurboQuant kernel; it
hands graphs of standard operators to CANN, which compiles them for the sizes of their inputs. So
here the operators become the function bodies that every converted model carries, caches have a
fixed capacity, calls a fixed number of tokens, and lengths are read from the attention mask
(``tq_onnx.ascend.graph_mode.masklengths``). All of it are operators that the provider takes, so
that it makes one graph of the model. Norms and rotary embeddings that onnxruntime has operators for
become standard ONNX as well (``tq_onnx.ascend.lowering``). The same file runs wherever ONNX does.

CANN's parser is given the bytes of a graph and no folder, so the weights are in the model itself,
which may have 2 GiB then.

Refused, by name: a model without ``attention_mask``, masks that hide more than the future and
padding, nodes that the provider does not take or that opset 16 does not have, too many weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tq_onnx.ascend.graph_mode import claims as provider
from tq_onnx.ascend.graph_mode.bodies import inline_operators
from tq_onnx.ascend.graph_mode.masklengths import Sizes, fix_lengths
from tq_onnx.ascend.graph_mode.standard import OPSET, lower_opset, simplify
from tq_onnx.ascend.lowering.rmsnormalization import lower_norms
from tq_onnx.ascend.lowering.rotary import lower_rotary
from tq_onnx.conversion.bake import add_functions
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.target import Lowering
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN, VERSION
from tq_onnx.ops.functions import decoder_function_protos
from tq_onnx.plan import Plan

TARGET: Final = "cann-graph"
MOST_BYTES: Final = (1 << 31) - (1 << 24)
"""Of all weights: a model is one protobuf message, which has its graph in it too."""

_NORMS: Final = ("SimplifiedLayerNormalization", "LayerNormalization", "RMSNormalization")
"""Of the default domain, and not taken by the provider."""

_EXPORT: Final = "export the model for the CPU, in float32 or float16"


def lowering_of(plan: Plan, *, capacity: int, tokens: int = 1, batch: int = 1) -> Lowering:
    """Return the passes that rewrite a converted model, and the plan of what they leave.

    Args:
        plan: the plan that the model was converted by.
        capacity: tokens that the caches have room for, the new ones included.
        tokens: new tokens in a call. A prompt is fed so many at a time; a second file with more of
            them reads prompts faster, and goes on with the same caches.
        batch: sequences.

    The passes raise ``UnsupportedModelError`` where a part of the model has no form in graph mode.

    Raises:
        UsageError: the sizes are not positive, or there is no room for the tokens of a call.
    """
    if min(capacity, tokens, batch) < 1 or tokens > capacity:
        raise UsageError(
            f"a capacity of {capacity} has no room for {tokens} tokens in {batch} sequences",
            where="graph mode",
            fix="give positive numbers, and a capacity of more tokens than a call has",
        )
    sizes = Sizes(batch, tokens, capacity)
    layers = tuple(replace(layer, has_bias=True, causal=True) for layer in plan.layers)
    interface = replace(plan.interface, static=True)
    lowered = replace(plan, target=TARGET, fixed_capacity=True, interface=interface, layers=layers)
    return Lowering(
        lowered,
        (
            UseStandardOperatorsPass(plan, capacity),
            FixLengthsPass(plan, sizes),
            InlineOperatorsPass(plan, sizes),
            SimplifyPass(),
            LowerOpsetPass(),
            EmbedWeightsPass(),
        ),
    )


class UseStandardOperatorsPass(ir.passes.InPlacePass):
    """Make norms and rotary embeddings of other domains TurboQuant operators, which have bodies.

    Args:
        plan: the plan that the model was converted by.
        positions: rows of the tables of rotary embeddings.
    """

    def __init__(self, plan: Plan, positions: int) -> None:
        super().__init__()
        self._plan = plan
        self._positions = positions

    def requires(self, model: ir.Model) -> None:
        """Require a model as ``ConvertPass`` and ``adapt`` leave it, table by table."""
        for violation in layer_violations(model, self._plan):
            raise ir.passes.PreconditionError(violation)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace them in place."""
        fill_shapes(model)
        is_needed = any(
            node.domain not in ("", DOMAIN) or node.op_type in _NORMS for node in model.graph
        )
        if is_needed:
            build = Builder(model.graph)
            lower_norms(model, build)
            RemoveUnusedNodesPass()(model)
            lower_rotary(model, build, self._positions)
            RemoveUnusedNodesPass()(model)
            used = {node.op_type for node in model.graph if node.domain == DOMAIN}
            add_functions(
                model, decoder_function_protos([name for name in DECODER if name in used])
            )
            model.opset_imports.setdefault(DOMAIN, VERSION)
        return ir.passes.PassResult(model, modified=is_needed)


class FixLengthsPass(ir.passes.InPlacePass):
    """Has lengths read from the attention mask, and gives every input its numbers.

    Args:
        plan: the plan that the model was converted by.
        sizes: of the inputs.
    """

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        super().__init__()
        self._plan = plan
        self._sizes = sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace lengths in place."""
        try:
            fix_lengths(model, Builder(model.graph), self._plan, self._sizes)
        except NoMatch as miss:
            raise UnsupportedModelError(miss.reason, where="graph mode", fix=_EXPORT) from miss
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that all inputs have numbers for sizes."""
        for value in model.graph.inputs:
            if value.shape is None or not value.shape.is_static():
                raise ir.passes.PostconditionError(f"{value.name} is {value.shape}")


class InlineOperatorsPass(ir.passes.InPlacePass):
    """Puts the bodies of our operators in the places of the nodes.

    Args:
        plan: the plan that the model was converted by.
        sizes: of the inputs.
    """

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        super().__init__()
        self._plan = plan
        self._sizes = sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the nodes in place."""
        inline_operators(model, self._plan, self._sizes)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that no function and no TurboQuant operator is left."""
        operators = [node.name for node in model.graph.all_nodes() if node.domain == DOMAIN]
        if operators or model.functions:
            raise ir.passes.PostconditionError(f"{[*operators, *model.functions]} are left")


class SimplifyPass(ir.passes.InPlacePass):
    """Computes what is constant; all sizes are numbers then, and the provider takes every node."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify the model in place."""
        fill_shapes(model)
        simplify(model)
        _refuse(model)
        return ir.passes.PassResult(model, modified=True)


class LowerOpsetPass(ir.passes.InPlacePass):
    """Writes the graph in the opset that CANN's parser reads."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the nodes in place."""
        lower_opset(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that no other domain is imported, and no newer opset."""
        if set(model.opset_imports) != {""} or model.opset_imports[""] > OPSET:
            raise ir.passes.PostconditionError(f"the opsets are {model.opset_imports}")


class EmbedWeightsPass(ir.passes.InPlacePass):
    """Reads weights in other files into the model."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Read the weights."""
        values = list(model.graph.initializers.values())
        size = sum(value.const_value.nbytes for value in values if value.const_value is not None)
        if size > MOST_BYTES:
            raise UnsupportedModelError(
                f"the weights have {size} bytes, and a graph for CANN can have {MOST_BYTES}",
                where="graph mode",
                fix='convert it with `target="cann"`, which runs operators one by one',
            )
        for value in values:
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                array = np.array(tensor.numpy())
                value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that no weight is in another file."""
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                raise ir.passes.PostconditionError(f"{value.name} is in another file")


def _refuse(model: ir.Model) -> None:
    """Refuse what would cut the graph or has sizes that depend on numbers."""
    for what, clauses in (
        ("the provider cannot take the whole model", list(provider.left_over(model))),
        ("a size depends on numbers", list(provider.not_static(model))),
    ):
        if clauses:
            remainder = f" (and {len(clauses) - 1} more)" if len(clauses) > 1 else ""
            raise UnsupportedModelError(
                f"{what}: {clauses[0]}{remainder}", where="graph mode", fix=_EXPORT
            )
