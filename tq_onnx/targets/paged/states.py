"""Give each request states of its own: those of convolutions and of linear attention.

Such a layer hands something of the tokens of one sequence on, beside attention. Operators of ONNX
Runtime 1.32 do the same with packed requests, and with a row of the state for each:

==========================  ===============================  ====================================
of sequences                of packed requests               state
==========================  ===============================  ====================================
CausalConvWithState         VarlenCausalConvWithState        ``[R, C, K - 1]``, as it was
LinearAttention             GatedDeltaNet                    ``[R, N, Dv, D]``, it was
                                                             ``[B, N, D, Dv]``
==========================  ===============================  ====================================

C channels, K taps; H query and key heads of D numbers, N value heads of Dv numbers.

Meaning of the operators: the schemas that ONNX Runtime registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import onnx_ir as ir

from tq_onnx.conversion.ports import TOKENS
from tq_onnx.graph.builder import Builder, Dim
from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.packed import SCOPE, Packed

CONVOLUTION: Final = f"{MICROSOFT}.VarlenCausalConvWithState"
RECURRENCE: Final = f"{MICROSOFT}.GatedDeltaNet"
STATE_SLOTS: Final[Mapping[str, tuple[int, ...]]] = {
    CONVOLUTION: (1, 2, 3, 4),
    RECURRENCE: (3, 6),
}
"""Inputs that hold nothing of the tokens of a call."""

_PAST: Final = 3
_PRESENT: Final = 1
_TURNED: Final = [0, 2, 1]
_USUAL: Final[Mapping[str, Mapping[str, int | None]]] = {
    "CausalConvWithState": {"ndim": 1, "dilation": None, "activation": None},
    "LinearAttention": dict.fromkeys(
        ("q_num_heads", "kv_num_heads", "scale", "update_rule", "chunk_size")
    ),
}
"""Attributes with their only value, None where any is understood; others must be 0 or -1, which
switch off what they are for."""


def find_states(model: ir.Model, plan: Plan) -> list[ir.Node]:
    """Return the operators that make the states of a model."""
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    nodes = []
    for pair in plan.interface.states:
        present = outputs[pair.present]
        node = present.producer()
        name = "" if node is None else kind(node).removeprefix(f"{MICROSOFT}.")
        if node is None or name not in _USUAL or present is not node.outputs[_PRESENT]:
            raise NoMatch(
                f"the state {pair.present} is not made by CausalConvWithState or LinearAttention, "
                "which have forms for packed requests: export the model with mobius or "
                "onnxruntime-genai's builder"
            )
        past = node.inputs[_PAST] if len(node.inputs) > _PAST else None
        if past is None or past is not inputs.get(pair.past) or len(list(past.uses())) != 1:
            raise NoMatch(f"the state {pair.present} does not continue an input alone", node)
        if present.dtype is not ir.DataType.FLOAT and name == "LinearAttention":
            raise NoMatch(f"the state {pair.present} is not float32", node)
        _expect_usual(node, _USUAL[name])
        nodes.append(node)
    return nodes


def pack_states(build: Builder, nodes: Iterable[ir.Node], packed: Packed) -> None:
    """Replace the operators that make states; those of linear attention are transposed."""
    for node in nodes:
        with build.before(node, f"{node.name}".rpartition("/")[0] or SCOPE):
            replace = _convolution if node.op_type == "CausalConvWithState" else _recurrence
            replace(build, node, packed)


def _expect_usual(node: ir.Node, usual: Mapping[str, int | None]) -> None:
    for name, attribute in node.attributes.items():
        known = usual.get(name, 0)
        is_usual = name in usual and known is None
        if not is_usual and (
            attribute.type is not ir.AttributeType.INT or attribute.as_int() not in (known, -1)
        ):
            raise NoMatch(f"{node.op_type} has the attribute {name}, which is not known", node)


def _replace(node: ir.Node, output: ir.Value, state: ir.Value) -> None:
    """Put a result and a state in the places of those of a node."""
    node.outputs[0].replace_all_uses_with(output, replace_graph_outputs=True)
    present = node.outputs[_PRESENT]
    present.name, state.name = f"{present.name}/of_sequences", present.name
    present.replace_all_uses_with(state, replace_graph_outputs=True)


def _convolution(build: Builder, node: ir.Node, packed: Packed) -> None:
    rows, weight, bias, past = node.inputs[: _PAST + 1]
    channels = None if weight is None else static_dim(weight, 0)
    if rows is None or channels is None:
        raise NoMatch("the graph does not declare the number of channels", node)
    dtype = rows.dtype

    def turned(value: ir.Value, label: str, *, back: bool) -> ir.Value:
        shape: list[Dim] = [1, channels, TOKENS] if back else [1, TOKENS, channels]
        return build.op("Transpose", [value], label, dtype=dtype, shape=shape, perm=_TURNED)

    first = build.integers(0)
    by_token = turned(rows, "tokens_first", back=False)
    flat = build.op("Squeeze", [by_token, first], "packed", dtype=dtype, shape=[TOKENS, channels])
    output, state = build.ops(
        "VarlenCausalConvWithState",
        [flat, weight, packed.bounds, bias, past],
        "VarlenCausalConvWithState",
        dtype=dtype,
        shapes=[[TOKENS, channels], sizes(node.outputs[_PRESENT])],
        domain=MICROSOFT,
    )
    maker = output.producer()
    assert maker is not None  # it was just made
    for name in ("activation", "dilation"):
        if name in node.attributes:
            maker.attributes[name] = node.attributes[name]
    shape: list[Dim] = [1, TOKENS, channels]
    sequence = build.op("Unsqueeze", [output, first], "sequence", dtype=dtype, shape=shape)
    _replace(node, turned(sequence, "channels_first", back=True), state)


def _recurrence(build: Builder, node: ir.Node, packed: Packed) -> None:
    query, key, value, past = node.inputs[: _PAST + 1]
    decay, beta = (*node.inputs[_PAST + 1 :], None, None)[:2]
    heads, value_heads = (attribute_int(node, f"{side}_num_heads", 0) for side in ("q", "kv"))
    key_size, value_size = (None if past is None else static_dim(past, axis) for axis in (2, 3))
    if query is None or key is None or value is None or past is None:
        raise NoMatch("LinearAttention lacks queries, keys, values or its state", node)
    if rank(past) != 4 or key_size is None or value_size is None:
        raise NoMatch(f"the graph does not declare the size of the state {past.name}", node)
    if heads <= 0 or value_heads % heads or static_dim(key, 2) != heads * key_size:
        raise NoMatch(
            f"LinearAttention has {heads} query heads, {value_heads} value heads and keys of "
            f"{static_dim(key, 2)} numbers: for packed requests there must be as many key heads as "
            "query heads, and a multiple of value heads",
            node,
        )

    def split(operand: ir.Value, count: int, size: int, label: str) -> ir.Value:
        shape: list[Dim] = [TOKENS, count, size] if size else [TOKENS, count]
        target = build.integers(-1, count, size) if size else build.integers(-1, count)
        return build.op("Reshape", [operand, target], label, dtype=operand.dtype, shape=shape)

    def gate(operand: ir.Value | None, label: str, *, wide: bool) -> ir.Value | None:
        width = None if operand is None else static_dim(operand, 2)
        if operand is None:
            return None
        if width == value_heads:
            return split(operand, value_heads, 0, label)
        if wide and width == value_heads * key_size:
            return split(operand, value_heads, key_size, label)
        raise NoMatch(f"the {label} of LinearAttention has {width} numbers for a token", node)

    state_shape: list[Dim] = [*(sizes(past) or ())[:2], value_size, key_size]
    output, state = build.ops(
        "GatedDeltaNet",
        [
            split(query, heads, key_size, "query"),
            split(key, heads, key_size, "key"),
            split(value, value_heads, value_size, "value"),
            packed.bounds,
            gate(decay, "decay", wide=True),
            gate(beta, "beta", wide=False),
            past,
        ],
        "GatedDeltaNet",
        dtype=query.dtype,
        shapes=[[TOKENS, value_heads, value_size], state_shape],
        domain=MICROSOFT,
        attributes={
            "update_rule": node.attributes.get_string("update_rule", "gated_delta"),
            "scale": attribute_float(node, "scale", 0.0),
        },
    )
    state.type = past.type
    past.shape = ir.Shape(state_shape)
    width = value_heads * value_size
    flat = build.integers(1, -1, width)
    shape: list[Dim] = [1, TOKENS, width]
    _replace(
        node, build.op("Reshape", [output, flat], "sequence", dtype=query.dtype, shape=shape), state
    )
