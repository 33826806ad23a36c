"""Rewrites a converted decoder so that CANNExecutionProvider runs all of it, operator by operator.

    masks -> embedding -> norms -> shapes -> lengths -> rotary -> swish -> layout -> check

After it every node that computes floats is one that the provider claims, or an operator of ours
(``tq_onnx.targets.cann.claims``); token ids, positions and lengths stay on the host, the caches
and everything else on the device. The same file runs on the CPU, and by its function bodies
anywhere. What is not recognised is refused by name: a node that is left over would not fail but be
run on the CPU, between copies.

Padding is the one thing that the model could say before and cannot now; see
``tq_onnx.targets.cann.mask``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
)

from tq_onnx.conversion import bake
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import live_nodes, nested_nodes
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN
from tq_onnx.ops.functions import decoder_function_protos
from tq_onnx.ops.operators import RotaryEmbedding
from tq_onnx.plan import CANN, Plan
from tq_onnx.targets.cann import claims as provider
from tq_onnx.targets.cann import mask
from tq_onnx.targets.cann.embedding import lower_embedding
from tq_onnx.targets.cann.hostshapes import answer_shapes
from tq_onnx.targets.cann.layout import lower_layout
from tq_onnx.targets.cann.rmsnormalization import lower_norms
from tq_onnx.targets.cann.rotary import lower_rotary
from tq_onnx.targets.cann.swish import lower_swish

SCOPE: Final = "cann"
_TARGET: Final = "--target cann"


def lower(model: ir.Model, plan: Plan, positions: int) -> Plan:
    """Rewrites a model in place.

    Args:
        model: after ``ConvertPass`` and ``adapt``.
        plan: the plan that it was converted by; ``tq_onnx.targets.cann.kernels`` has nothing
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
    tokens = next(v for v in model.graph.inputs if v.name == plan.interface.tokens)
    told = tokens.shape
    tokens.shape = _named(told)
    fill_shapes(model)
    build = Builder(model.graph)
    try:
        _drop_masks(model, plan)
        lower_embedding(model, build)
        lower_norms(model, build)
        _remove_dead(model)  # onnx infers no shapes beside operators that it does not know
        answer_shapes(model, build, plan)
        _lower_lengths(model, build, plan)
    except NoMatch as miss:
        raise UnsupportedModelError(miss.reason, where=_TARGET, fix=provider.WITHOUT) from miss
    misses: list[str] = []
    lower_rotary(model, build, positions, misses)
    _lower_positions(model, build, plan)
    lower_swish(model, build)
    lower_layout(model, build)
    _remove_dead(model)
    provider.declare_old_opset(model)
    found = list(provider.left_over(model))
    if found:
        more = f" (and {len(found) - 1} more nodes)" if len(found) > 1 else ""
        # Nodes that make angles come first then, and say less.
        angles = f"a rotary embedding stays, because {misses[0]}: " if misses else ""
        raise UnsupportedModelError(
            f"CANNExecutionProvider cannot run the whole model: {angles}{found[0].what}{more}",
            where=_TARGET,
            fix=found[0].fix,
        )
    layers = tuple(replace(layer, has_bias=False, causal=True) for layer in plan.layers)
    interface = replace(plan.interface, padding=False)
    lowered = replace(plan, target=CANN, fixed_capacity=True, layers=layers, interface=interface)
    tokens.shape = told
    _bake(model, lowered)
    return lowered


def _named(shape: ir.Shape | None) -> ir.Shape | None:
    """A shape whose every size has a name, by which it is known again further down."""
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape(
        [f"{SCOPE}_size_{axis}" if dim is None else dim for axis, dim in enumerate(dims)]
    )


def _drop_masks(model: ir.Model, plan: Plan) -> None:
    """Takes masks away that hide the future, and nothing else."""
    layers = converted_layers(model, plan)
    shown: set[tuple[object, ...]] = set()  # layers share their masks
    for layer in layers:
        attention = layer.attention
        key = (attention.bias, attribute_int(attention.node, "causal", 0))
        if key in shown:
            continue
        try:
            causal, why = mask.is_causal(attention, plan, model), mask.complaint(attention)
        except NoMatch as miss:
            causal, why = False, miss.reason
        if not causal:
            raise NoMatch(f"the mask of layer {layer.plan.layer} is not shown to be causal: {why}")
        shown.add(key)
    for layer in layers:
        mask.drop_bias(layer.attention)
    mask.keep_all_rows(model, plan)


def _lower_lengths(model: ir.Model, build: Builder, plan: Plan) -> None:
    """Has lengths read from inputs that stay on the host."""
    readers = [node for layer in converted_layers(model, plan) for node in layer.operators]
    for old in dict.fromkeys(reader.past_length for reader in readers):
        if not mask.is_past_length(old, plan, model):
            raise NoMatch(f"{old.name} is not shown to be the number of tokens in the caches")
    with build.before(next(iter(model.graph)), SCOPE):
        length = mask.past_length(build, model, plan)
    for reader in readers:
        reader.past_length = length


def _remove_dead(model: ir.Model) -> None:
    """Removes nodes that no output needs, those that only dead subgraphs read among them."""
    live = live_nodes(model.graph.outputs)
    for node in model.graph:
        for inner in () if node in live else nested_nodes(node):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
    RemoveUnusedNodesPass()(model)


def _lower_positions(model: ir.Model, build: Builder, plan: Plan) -> None:
    """Positions that are computed, and not an input, are counted without arithmetic."""
    proven = dict.fromkeys(model.graph.inputs, False)
    for node in RotaryEmbedding.nodes(model.graph):
        given = RotaryEmbedding.position_ids.of(node)
        if given is not None and given not in proven:
            proven[given] = mask.is_positions(given, plan, model)
        if given is None or not proven[given]:
            continue
        with build.before(node, SCOPE):
            counted = mask.positions(build, model, plan)
        if counted is not None:
            RotaryEmbedding.position_ids.replace(node, counted)


def _bake(model: ir.Model, plan: Plan) -> None:
    """The bodies of the operators that the model has now, and the plan."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    # The checker refuses those of a newer opset.
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    bake.bake_functions(model, plan)
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    bake.add_functions(model, decoder_function_protos([name for name in DECODER if name in used]))
    bake.bake_metadata(model, plan)
