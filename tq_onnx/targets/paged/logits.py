"""Compute the logits of the tokens that the engine wants, and of no others."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.conversion.ports import LOGITS, REQUESTS, TOKENS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.targets.paged.packed import SCOPE, Packed
from tq_onnx.targets.paged.tokenwise import Tokenwise

_RANK: Final = 3
_AXIS: Final = 1
_CHOICE: Final = "chosen_tokens"


def keep_wanted(
    model: ir.Model, build: Builder, logits: ir.Value, packed: Packed, tokens: Tokenwise
) -> None:
    """Take the tokens of ``logits_indices`` as far in front of the logits as that is the same.

    That is where the values on the way to the logits are first read by one node only, and made of
    one other value that holds tokens.

    Args:
        model: the model; its logits become ``[L, V]``.
        logits: the output, ``[1, T, V]``.
    """
    graph = model.graph
    if not _is_rows(logits, tokens):
        raise NoMatch(f"{logits.name} is not [batch, tokens, vocabulary], logits of all tokens")
    shape = tokens.shape(logits)
    end = ir.node("Identity", [logits], name=build.unique(f"{SCOPE}/end"))
    graph.append(end)
    value, reader, behind = _front(logits, end, tokens)
    with build.before(reader, SCOPE):
        choice = build.op(
            "Gather",
            [value, packed.indices],
            _CHOICE,
            dtype=value.dtype,
            shape=[1, LOGITS, tokens.shape(value)[-1]],
            axis=_AXIS,
        )
    for slot, read in enumerate(reader.inputs):
        if read is value:
            reader.replace_input_with(slot, choice)
    for made in behind:
        made.shape = ir.Shape([1, LOGITS, tokens.shape(made)[-1]])
    rows = end.inputs[0]
    assert rows is not None  # it was just given
    with build.before(end, SCOPE):
        chosen = build.op(
            "Squeeze",
            [rows, build.integers(0)],
            "logits",
            dtype=logits.dtype,
            shape=[LOGITS, shape[-1]],
        )
    graph.remove(end, safe=True)
    index = next(index for index, output in enumerate(graph.outputs) if output is logits)
    logits.name, chosen.name = f"{logits.name}/of_sequence", logits.name
    graph.outputs[index] = chosen


def keep_all(model: ir.Model, name: str) -> None:
    """Undo ``keep_wanted``: give the logits of all packed tokens ``[1, T, V]``, to measure them."""
    graph = model.graph
    gathers = (node for node in graph if node.op_type == "Gather")
    chosen = next((node for node in gathers if (node.name or "").endswith(_CHOICE)), None)
    if chosen is None or chosen.inputs[0] is None:
        return
    chosen.outputs[0].replace_all_uses_with(chosen.inputs[0])
    for value in (value for node in graph for value in node.outputs if value.shape is not None):
        sizes = list(value.shape or ())
        if len(sizes) == _RANK and str(sizes[_AXIS]) in (LOGITS, REQUESTS):
            value.shape = ir.Shape([1, TOKENS, sizes[-1]])
    index = next(index for index, value in enumerate(graph.outputs) if value.name == name)
    maker = graph.outputs[index].producer()
    if maker is not None and maker.inputs[0] is not None:
        graph.outputs[index].name = f"{name}/of_wanted"
        graph.outputs[index] = maker.inputs[0]
        graph.outputs[index].name = name


def _is_rows(value: ir.Value, tokens: Tokenwise) -> bool:
    return (
        tokens.has_row_of_each(value)
        and len(tokens.shape(value)) == _RANK
        and tokens.axis(value) == _AXIS
    )


def _front(
    logits: ir.Value, end: ir.Node, tokens: Tokenwise
) -> tuple[ir.Value, ir.Node, list[ir.Value]]:
    """Return the value to choose from, what reads it, and what is made behind that."""
    value, reader = logits, end
    behind: list[ir.Value] = []
    while True:
        node = value.producer()
        uses = [use.node for use in value.uses()]
        if node is None or len(node.outputs) != 1 or uses != [reader]:
            return value, reader, behind
        if value is not logits and value.is_graph_output():
            return value, reader, behind
        held = [one for one in node.inputs if one is not None and tokens.holds(one)]
        is_counted = any(tokens.is_counted(one) for one in node.inputs)
        if len(held) != 1 or not _is_rows(held[0], tokens) or is_counted:
            return value, reader, behind
        behind.append(value)
        value, reader = held[0], node
