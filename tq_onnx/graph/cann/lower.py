"""Rewrites a converted decoder so that CANNExecutionProvider runs all of it, operator by operator.

    mask -> past length -> embedding -> norms -> rotary -> swish -> layout -> check

After it every node that computes floats is one that the provider claims, or an operator of ours
(``tq_onnx.graph.cann.provider``); token ids, positions and lengths stay on the host, the caches
and everything else on the device. The same file runs on the CPU, and by its function bodies
anywhere. What is not recognised is refused by name: a node that is left over would not fail but be
run on the CPU, between copies.

Padding is the one thing that the model could say before and cannot now; see
``tq_onnx.graph.cann.mask``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph import bake
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.cann import mask, provider
from tq_onnx.graph.cann.embedding import lower_embedding
from tq_onnx.graph.cann.hostshapes import answer_shapes
from tq_onnx.graph.cann.layout import lower_layout
from tq_onnx.graph.cann.norms import lower_norms
from tq_onnx.graph.cann.rotary import lower_rotary
from tq_onnx.graph.cann.swish import lower_swish
from tq_onnx.graph.dialects.traces import NoMatch
from tq_onnx.graph.plan import CANN, Plan
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN, ENCODE, ROTARY_EMBEDDING
from tq_onnx.ops.functions import decoder_function_protos

SCOPE: Final = "cann"

_EXPORT: Final = "export the model in float32 or float16 for the CPU, as in docs/ascend.md"


def lower(model: ir.Model, plan: Plan, positions: int) -> Plan:
    """Rewrites a model in place.

    Args:
        model: after ``ConvertPass`` and ``adapt``.
        plan: the plan that it was converted by; ``tq_onnx.graph.cann.kernels`` has nothing
            against it.
        positions: rows of the tables of a rotary embedding that the graph computes; where it has
            tables of its own, those.

    Returns:
        The plan of what the model is now, which is in its metadata too.

    Raises:
        UnsupportedModelError: a part of the model was not recognised; the model is spoilt then.
    """
    # A constant that is a node is one of the CPU, and copied from there in every call.
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fill_shapes(model)
    build = Builder(model.graph)
    try:
        _lower_lengths(model, build, plan)
    except NoMatch as miss:
        raise UnsupportedModelError(miss.reason, where="--target cann", fix=_EXPORT) from miss
    lower_embedding(model, build)
    lower_norms(model, build)
    RemoveUnusedNodesPass()(model)  # onnx infers no shapes beside operators that it does not know
    answer_shapes(model, build, plan)
    lower_rotary(model, build, positions)
    _lower_positions(model, build, plan)
    lower_swish(model, build)
    lower_layout(model, build)
    RemoveUnusedNodesPass()(model)
    provider.declare_old_opset(model)
    found = list(provider.left_over(model))
    if found:
        more = f" (and {len(found) - 1} more nodes)" if len(found) > 1 else ""
        raise UnsupportedModelError(
            f"CANNExecutionProvider cannot run the whole model: {found[0]}{more}",
            where="--target cann",
            fix=_EXPORT,
        )
    layers = tuple(replace(layer, has_bias=False, causal=True) for layer in plan.layers)
    interface = replace(plan.interface, padding=False)
    lowered = replace(plan, target=CANN, fixed_capacity=True, layers=layers, interface=interface)
    _bake(model, lowered)
    return lowered


def _lower_lengths(model: ir.Model, build: Builder, plan: Plan) -> None:
    """Takes masks away, and has lengths read from inputs that stay on the host."""
    nodes = mask.attention_nodes(model)
    for layer, node in zip(plan.layers, nodes, strict=True):
        try:
            causal, why = mask.is_causal(node, plan, model), "it hides more than the future"
        except NoMatch as miss:
            causal, why = False, miss.reason
        if not causal:
            raise NoMatch(f"the mask of layer {layer.layer} is not shown to be causal: {why}")
        mask.drop_bias(node)
    mask.keep_all_rows(model, plan)
    with build.before(next(iter(model.graph)), SCOPE):
        length = mask.past_length(build, model, plan)
    for node in model.graph:
        if node.domain == DOMAIN:
            node.replace_input_with(2 if node.op_type == ENCODE else 3, length)


def _lower_positions(model: ir.Model, build: Builder, plan: Plan) -> None:
    """Positions that are computed, and not an input, are counted without arithmetic."""
    proven = dict.fromkeys(model.graph.inputs, False)
    nodes = [n for n in model.graph if n.domain == DOMAIN and n.op_type == ROTARY_EMBEDDING]
    for node in nodes:
        given = node.inputs[3]
        if given is not None and given not in proven:
            proven[given] = mask.is_positions(given, plan, model)
        if given is None or not proven[given]:
            continue
        with build.before(node, SCOPE):
            counted = mask.positions(build, model, plan)
        if counted is not None:
            node.replace_input_with(3, counted)


def _bake(model: ir.Model, plan: Plan) -> None:
    """The bodies of the operators that the model has now, and the plan."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    bake.bake_functions(model, plan)
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    bake.add_functions(model, decoder_function_protos([name for name in DECODER if name in used]))
    bake.bake_metadata(model, plan)
