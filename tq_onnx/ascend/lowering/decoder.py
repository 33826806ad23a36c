"""Rewrite a converted decoder so that CANNExecutionProvider runs all of it, operator by operator.

    masks -> embedding -> norms -> shapes -> lengths -> rotary -> swish -> tanh -> layout -> check

After it every node that computes floats is one that the provider claims, or a TurboQuant operator
(``tq_onnx.ascend.lowering.claims``); token ids, positions and lengths stay on the host, the caches
and everything else on the device. The same file runs on the CPU, and by its function bodies
anywhere. What is not recognised is refused by name: a node that is left over would not fail but be
run on the CPU, between copies.

Padding on the left becomes a number that attention takes, if masks, lengths and positions are
proved to treat it so; else the converted model refuses padding, which the original took. See
``tq_onnx.ascend.lowering.mask``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveUnusedFunctionsPass,
)

from tq_onnx.ascend.lowering import claims as provider
from tq_onnx.ascend.lowering import mask
from tq_onnx.ascend.lowering.embedding import lower_embedding
from tq_onnx.ascend.lowering.hostshapes import answer_shapes
from tq_onnx.ascend.lowering.layout import lower_layout
from tq_onnx.ascend.lowering.rmsnormalization import lower_norms
from tq_onnx.ascend.lowering.rotary import lower_rotary
from tq_onnx.ascend.lowering.swish import lower_swish
from tq_onnx.ascend.lowering.tanh import lower_tanh
from tq_onnx.conversion import bake
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.target import Lowering
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import remove_dead
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN
from tq_onnx.ops.functions import decoder_function_protos
from tq_onnx.ops.operators import RotaryEmbedding
from tq_onnx.plan import Plan
from tq_onnx.targets import causality

SCOPE: Final = "cann"
TARGET: Final = "cann"
_FLAG: Final = f'`target="{TARGET}"`'


def lowering_of(plan: Plan, positions: int) -> Lowering:
    """Return the passes that rewrite a converted model, and the plan of what they leave.

    Args:
        plan: the plan that the model was converted by; ``tq_onnx.ascend.lowering.refusals`` has
            nothing against it.
        positions: rows of the tables of a rotary embedding that the graph computes; where it has
            tables of its own, those.

    The passes raise ``UnsupportedModelError`` where a part of the model is not recognised.
    """
    lower = LowerDecoderPass(plan, positions)
    return Lowering(
        lower.plan,
        (
            # A constant that is a node is one of the CPU, and copied from there in every call.
            LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            lower,
            BakeOperatorsPass(lower),
        ),
        found=lambda: lower.plan,
    )


def _lowered(plan: Plan, windows: list[int], *, has_padding: bool = False) -> Plan:
    """Return the plan of the lowered model with these sliding windows."""
    layers = tuple(
        replace(layer, has_bias=False, causal=True, sliding_window=window, has_padding=has_padding)
        for layer, window in zip(plan.layers, windows, strict=True)
    )
    interface = replace(plan.interface, padding=has_padding)
    return replace(plan, target=TARGET, fixed_capacity=True, layers=layers, interface=interface)


class LowerDecoderPass(ir.passes.InPlacePass):
    """Rewrites the decoder around the operators of a conversion."""

    def __init__(self, plan: Plan, positions: int) -> None:
        super().__init__()
        self._plan = plan
        self._positions = positions
        self.plan = _lowered(plan, [layer.sliding_window for layer in plan.layers])
        """Of the model as it will be; windows and padding are right once the pass has run."""

    def requires(self, model: ir.Model) -> None:
        """Require that every layer of the plan has its operators."""
        converted_layers(model, self._plan)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        plan = self._plan
        tokens = next(v for v in model.graph.inputs if v.name == plan.interface.tokens)
        shape = tokens.shape
        tokens.shape = _named(shape)
        fill_shapes(model)
        build = Builder(model.graph)
        try:
            has_padding = _hides_padding(model, plan)
            windows = _drop_masks(model, plan)
            lower_embedding(model, build)
            lower_norms(model, build)
            remove_dead(model)  # onnx infers no shapes beside operators that it does not know
            answer_shapes(model, build, plan)
            has_padding = _lower_lengths(model, build, plan) and has_padding
        except NoMatch as miss:
            raise UnsupportedModelError(miss.reason, where=_FLAG, fix=provider.WITHOUT) from miss
        misses: list[str] = []
        lower_rotary(model, build, self._positions, misses)
        has_padding = not _lower_positions(model, build, plan) and has_padding
        has_padding = _lower_padding(model, build, plan, has_padding=has_padding)
        self.plan = _lowered(plan, windows, has_padding=has_padding)
        lower_swish(model, build)
        lower_tanh(model, build)
        lower_layout(model, build)
        remove_dead(model)
        provider.declare_old_opset(model)
        _refuse_left_over(model, misses)
        tokens.shape = shape
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that attention hides the future itself, and has no mask left."""
        for layer in converted_layers(model, self._plan):
            attention = layer.attention
            if attention.bias is not None or attribute_int(attention.node, "causal", 0) != 1:
                raise ir.passes.PostconditionError(f"{attention.name} has a mask left")


class BakeOperatorsPass(ir.passes.InPlacePass):
    """Puts the bodies of the operators that the model has now in the places of those it had."""

    def __init__(self, lower: LowerDecoderPass) -> None:
        super().__init__()
        self._lower = lower

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the bodies in place."""
        for identifier in [key for key in model.functions if key[0] == DOMAIN]:
            del model.functions[identifier]
        # The checker refuses those of a newer opset.
        RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        bake.bake_functions(model, self._lower.plan)
        bake.add_functions(
            model, decoder_function_protos([name for name in DECODER if name in _own(model)])
        )
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Ensure that every TurboQuant operator has its body."""
        for name in _own(model):
            if (DOMAIN, name, "") not in model.functions:
                raise ir.passes.PostconditionError(f"the body of {name} is missing")


def _own(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph if node.domain == DOMAIN}


def _refuse_left_over(model: ir.Model, misses: list[str]) -> None:
    """Refuse what the provider does not run; ``misses`` tells why rotary embeddings stay."""
    nodes = list(provider.left_over(model))
    if not nodes:
        return
    remainder = f" (and {len(nodes) - 1} more nodes)" if len(nodes) > 1 else ""
    # Nodes that make angles come first then, and say less.
    angles = f"a rotary embedding stays, because {misses[0]}: " if misses else ""
    raise UnsupportedModelError(
        f"CANNExecutionProvider cannot run the whole model: {angles}{nodes[0].what}{remainder}",
        where=_FLAG,
        fix=nodes[0].fix,
    )


def _named(shape: ir.Shape | None) -> ir.Shape | None:
    """Return a shape whose every size has a name, by which it is known again further down."""
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape(
        [f"{SCOPE}_size_{axis}" if dim is None else dim for axis, dim in enumerate(dims)]
    )


def _hides_padding(model: ir.Model, plan: Plan) -> bool:
    """Return True if all masks hide padding on the left."""
    layers = converted_layers(model, plan)
    try:
        return plan.interface.padding and all(
            causality.hides_padding(layer.attention, plan, model)
            for layer in causality.of_each_mask(layers)
        )
    except NoMatch:
        return False


def _drop_masks(model: ir.Model, plan: Plan) -> list[int]:
    """Take masks away that hide the future and what is behind a window, and nothing else.

    Returns:
        the window of each layer, 0 for none, which its attention has as an attribute now.
    """
    layers = converted_layers(model, plan)
    windows = causality.windows(layers, plan, model)
    for layer, window in zip(layers, windows, strict=True):
        causality.drop_bias(layer.attention)
        layer.attention.node.attributes["sliding_window"] = ir.AttrInt64("sliding_window", window)
    causality.keep_all_rows(model, plan)
    return windows


def _lower_lengths(model: ir.Model, build: Builder, plan: Plan) -> bool:
    """Have lengths read from inputs that stay on the host.

    Returns:
        whether they counted padding among the tokens, as what is read now does.
    """
    readers = [node for layer in converted_layers(model, plan) for node in layer.operators]
    lengths = dict.fromkeys(reader.past_length for reader in readers)
    for old in lengths:
        if not causality.is_past_length(old, plan, model):
            raise NoMatch(f"{old.name} is not shown to be the number of tokens in the caches")
    counts_padding = all(causality.is_past_of_padded(old, plan, model) for old in lengths)
    with build.before(next(iter(model.graph)), SCOPE):
        length = mask.past_length(build, model, plan)
    for reader in readers:
        reader.past_length = length
    return counts_padding


def _lower_padding(model: ir.Model, build: Builder, plan: Plan, *, has_padding: bool) -> bool:
    """Tell attention of padding on the left, or refuse it; return True if it is told."""
    layers = converted_layers(model, plan)
    readers = {operator.node for layer in layers for operator in layer.operators}
    # What makes the length is in front already.
    with build.before(next(node for node in model.graph if node in readers), SCOPE):
        lengths = mask.length_and_padding(build, model, plan) if has_padding else None
        length = lengths[0] if lengths else mask.length_without_padding(build, model, plan)
    if length is None:
        return False
    for layer in layers:
        for reader in layer.operators:
            reader.past_length = length
        layer.attention.left_padding = lengths[1] if lengths else None
    return lengths is not None


def _lower_positions(model: ir.Model, build: Builder, plan: Plan) -> bool:
    """Count computed positions without arithmetic; return True if there were any."""
    is_any = False
    proven = dict.fromkeys(model.graph.inputs, False)
    for node in RotaryEmbedding.nodes(model.graph):
        positions = RotaryEmbedding.position_ids.of(node)
        if positions is not None and positions not in proven:
            proven[positions] = causality.is_positions(positions, plan, model)
        if positions is None or not proven[positions]:
            continue
        with build.before(node, SCOPE):
            counted = mask.positions(build, model, plan)
        if counted is not None:
            RotaryEmbedding.position_ids.replace(node, counted)
            is_any = True
    return is_any
