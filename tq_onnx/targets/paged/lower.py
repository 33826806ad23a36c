"""Rewrite a converted decoder for caches in pages and for packed requests.

    masks, lengths, positions -> packed inputs -> operators -> tokens left apart -> logits

The decoder sees one sequence, the tokens of all requests one behind the other. That is the same as
each request alone where attention hides what it hides by positions only, where positions count on
from the past, and where nothing but attention mixes tokens. All three are shown of the graph, or
the model is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir

from tq_onnx.codec.pagewindow import page_width
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.layers import ConvertedLayer, converted_layers
from tq_onnx.conversion.ports import kept_names
from tq_onnx.conversion.target import Lowering
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.dependence import read_values
from tq_onnx.graph.liveness import remove_dead
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import rank
from tq_onnx.ops.domain import DOMAIN
from tq_onnx.plan import Plan
from tq_onnx.targets import causality
from tq_onnx.targets.paged.logits import keep_wanted
from tq_onnx.targets.paged.operators import page
from tq_onnx.targets.paged.packed import pack
from tq_onnx.targets.paged.replaced import find_replaced, put_in_place
from tq_onnx.targets.paged.states import find_states, pack_states
from tq_onnx.targets.paged.tokenwise import Tokenwise

TARGET: Final = "paged"
FULL_PAGE_ENTRIES: Final = 4
"""Newest tokens that a full page keeps exactly: most of what exact tokens are for."""
_FLAG: Final = '`target="paged"`'
_WITHOUT: Final = f"convert without {_FLAG}"
_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)


def lowering_of(plan: Plan, block_size: int) -> Lowering:
    """Return the pass that rewrites a converted model, and the plan of what it leaves.

    Args:
        block_size: slots of a page.

    The pass raises ``UnsupportedModelError`` where a part of the model is not shown to be right.
    """
    made = PagePass(plan, block_size)
    return Lowering(made.plan, (made,), lambda: made.plan)


class PagePass(ir.passes.InPlacePass):
    """Rewrites the decoder around the operators of a conversion."""

    def __init__(self, plan: Plan, block_size: int) -> None:
        super().__init__()
        self._plan = plan
        self._block_size = block_size
        self._row = _page_width(plan, block_size)
        self.plan = self._paged([layer.sliding_window for layer in plan.layers])
        """Of the model as it will be; its windows are complete once the pass has run."""

    def requires(self, model: ir.Model) -> None:
        """Require a model as ``ConvertPass`` and ``adapt`` leave it, table by table."""
        for violation in layer_violations(model, self._plan):
            raise ir.passes.PreconditionError(violation)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        plan = self._plan
        try:
            _expect_sequences(model, plan)
            stateful = find_states(model, plan)
            layers = converted_layers(model, plan)
            self.plan = self._paged(causality.windows(layers, plan, model))
            _expect_past_lengths(layers, plan, model)
            causality.keep_all_rows(model, plan)
            self._rewrite(model, layers, stateful)
        except NoMatch as miss:
            raise UnsupportedModelError(miss.reason, where=_FLAG, fix=_WITHOUT) from miss
        return ir.passes.PassResult(model, modified=True)

    def _rewrite(
        self, model: ir.Model, layers: tuple[ConvertedLayer, ...], stateful: list[ir.Node]
    ) -> None:
        plan, graph = self._plan, model.graph
        logits = next(value for value in graph.outputs if value.name == plan.interface.logits)
        wanted = [logits]
        for operator in (operator for layer in layers for operator in layer.operators):
            wanted += read_values(operator.node)
        found = find_replaced(model, plan, wanted)
        for value in [value for value in graph.outputs if not _is_kept(value, plan)]:
            if not _is_passed_on(value):
                raise NoMatch(f"the model returns {value.name} besides logits, caches and states")
            graph.outputs.remove(value)
        gone = [value for value in graph.inputs if _is_gone(value, plan)]
        build = Builder(graph)
        packed = pack(model, build, plan)
        positions = put_in_place(build, found, packed)
        for layer, planned in zip(layers, self.plan.layers, strict=True):
            for attention in layer.attentions:
                window = ir.AttrInt64("sliding_window", planned.sliding_window)
                attention.node.attributes["sliding_window"] = window
            page(build, layer, packed, self.plan)
        pack_states(build, stateful, packed)
        remove_dead(model)
        for value in gone:
            if value.uses():
                raise NoMatch(f"the graph still reads {value.name}")
            graph.inputs.remove(value)
        tokens = Tokenwise(model, plan, {packed.ids, packed.positions, *positions})
        # Constants that the first builder knows may be gone with the nodes that read them.
        keep_wanted(model, Builder(graph), logits, packed, tokens)
        remove_dead(model)
        for identifier in [key for key in model.functions if key[0] == DOMAIN]:
            del model.functions[identifier]

    def _paged(self, windows: list[int]) -> Plan:
        """Return the plan of the paged model with these sliding windows."""
        plan = self._plan
        layers = tuple(
            replace(
                layer.with_caches(row_bytes=self._row),
                has_bias=False,
                causal=True,
                sliding_window=window,
            )
            for layer, window in zip(plan.layers, windows, strict=True)
        )
        interface = replace(
            plan.interface,
            attention_mask=None,
            position_ids=None,
            fed=(),
            padding=False,
            right_padding=False,
        )
        return replace(
            plan,
            target=TARGET,
            fixed_capacity=True,
            layers=layers,
            interface=interface,
            block_size=self._block_size,
        )


def _page_width(plan: Plan, block_size: int) -> int:
    """Return the bytes of a page for each token and head, the same for all caches."""
    row = max(cache.row_bytes for cache in plan.caches)
    coded = [layer for layer in plan.layers if plan.window_of(layer).entries]
    if not coded:
        return row
    if plan.sinks > block_size:
        raise UsageError(
            f"`sink_tokens={plan.sinks}` are more than the {block_size} tokens of a page",
            fix="give fewer, or a larger `block_size`",
        )
    stride = max(cache.row_bytes for layer in coded for cache in layer.caches)
    entries = max(plan.sinks, min(plan.recent, FULL_PAGE_ENTRIES))
    return max(row, page_width(stride, entries, block_size, coded[0].head_size))


def _expect_sequences(model: ir.Model, plan: Plan) -> None:
    """Refuse a model that does not take token ids and growing caches, and nothing more."""
    interface = plan.interface
    tokens = causality.input_of(model, interface.tokens)
    if tokens is None or tokens.dtype not in _INTEGERS or rank(tokens) != 2:
        raise NoMatch(f"{interface.tokens} is not token ids [batch, tokens]")
    if interface.hidden:
        raise NoMatch("the model returns hidden states and no logits")
    if interface.static:
        raise NoMatch("the caches of the model have a fixed size")
    for one in interface.fed:
        if one.role in ("encoder", "logits_to_keep"):
            raise NoMatch(f"the model takes {one.name}, which packed requests do not have")
    for layer in converted_layers(model, plan):
        if layer.is_shortened:
            raise NoMatch(f"layer {layer.plan.layer} drops rows of its caches", layer.key.node)


def _expect_past_lengths(layers: tuple[ConvertedLayer, ...], plan: Plan, model: ir.Model) -> None:
    readers = (operator for layer in layers for operator in layer.operators)
    for length in dict.fromkeys(reader.past_length for reader in readers):
        if not causality.is_past_length(length, plan, model):
            raise NoMatch(f"{length.name} is not shown to be the number of tokens in the caches")


def _is_kept(value: ir.Value, plan: Plan) -> bool:
    """Return True for logits, caches and states."""
    return value.name in kept_names(plan)


def _is_passed_on(value: ir.Value) -> bool:
    """Return True for an output that is an input as it was given."""
    node = value.producer()
    source = value if node is None else node.inputs[0]
    is_copy = node is None or (node.domain == "" and node.op_type == "Identity")
    return is_copy and source is not None and source.is_graph_input()


def _is_gone(value: ir.Value, plan: Plan) -> bool:
    return value.name != plan.interface.tokens and not _is_kept(value, plan)
