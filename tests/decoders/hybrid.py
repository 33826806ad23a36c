"""Puts a layer of linear attention into an export, as mobius and onnxruntime-genai write it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import Builder

MICROSOFT = "com.microsoft"
HIDDEN, TAPS = 16, 4
HEADS, SIZE = 2, 2
VALUE_HEADS, VALUE_SIZE = 4, 3
KEYS, VALUES = HEADS * SIZE, VALUE_HEADS * VALUE_SIZE
CHANNELS = 2 * KEYS + VALUES
LAYER = 2
"""Its number: the export has two layers of attention."""
STATES = {
    "conv_state": [CHANNELS, TAPS - 1],
    "recurrent_state": [VALUE_HEADS, SIZE, VALUE_SIZE],
}
FLOAT = ir.DataType.FLOAT


def add_linear_attention(model: ir.Model, **attributes: int) -> None:
    """Adds the layer behind the embedding of ``mobius-default``, in place.

    Args:
        model: the export.
        attributes: further ones of the operators, by names of which each has its own.
    """
    graph = model.graph
    embedded = next(node for node in graph if node.op_type == "Gather").outputs[0]
    first = next(node for node, _ in embedded.uses() if node.op_type != "Gather")
    readers = [(use.node, use.idx) for use in embedded.uses()]
    build, rng = Builder(graph), np.random.default_rng(8)
    pasts = {}
    for name, sizes in STATES.items():
        value = ir.Value(
            name=f"past_key_values.{LAYER}.{name}",
            type=ir.TensorType(FLOAT),
            shape=ir.Shape(["batch", *sizes]),
        )
        graph.inputs.append(value)
        pasts[name] = value

    def weight(name: str, *shape: int) -> ir.Value:
        return build.constant(f"linear.{name}", rng.normal(0, 0.5, shape).astype(np.float32))

    def op(kind: str, inputs: list[ir.Value | None], *sizes: int, **options: object) -> ir.Value:
        shape = ["batch", "sequence_len", *sizes]
        return build.op(kind, inputs, kind, dtype=FLOAT, shape=shape, **options)  # type: ignore[arg-type]

    def turned(value: ir.Value) -> ir.Value:
        return build.op("Transpose", [value], "turned", dtype=FLOAT, perm=[0, 2, 1])

    def stateful(
        kind: str, inputs: list[ir.Value | None], name: str, **options: object
    ) -> ir.Value:
        result, state = build.ops(
            kind,
            inputs,
            kind,
            dtype=FLOAT,
            shapes=[None, ["batch", *STATES[name]]],
            domain=MICROSOFT,
            attributes=options,  # type: ignore[arg-type]
        )
        state.name = f"present.{LAYER}.{name}"
        graph.outputs.append(state)
        return result

    own = {
        "CausalConvWithState": {"channels_last": attributes.pop("channels_last", 0)},
        "LinearAttention": {"q_num_heads": HEADS, "kv_num_heads": VALUE_HEADS, **attributes},
    }
    with build.before(first, "linear"):
        rows = op("MatMul", [embedded, weight("in", HIDDEN, CHANNELS)], CHANNELS)
        kernel = weight("kernel", CHANNELS, 1, TAPS)
        convolved = stateful(
            "CausalConvWithState",
            [turned(rows), kernel, None, pasts["conv_state"]],
            "conv_state",
            activation="silu",
            **own["CausalConvWithState"],
        )
        widths = (KEYS, KEYS, VALUES)
        query, key, value = build.ops(
            "Split",
            [turned(convolved), build.integers(*widths)],
            "split",
            dtype=FLOAT,
            shapes=[["batch", "sequence_len", width] for width in widths],
            attributes={"axis": -1},
        )
        gate = op("MatMul", [embedded, weight("decay", HIDDEN, VALUE_HEADS)], VALUE_HEADS)
        decay = op("Neg", [op("Softplus", [gate], VALUE_HEADS)], VALUE_HEADS)
        rate = op("MatMul", [embedded, weight("beta", HIDDEN, VALUE_HEADS)], VALUE_HEADS)
        beta = op("Sigmoid", [rate], VALUE_HEADS)
        attended = stateful(
            "LinearAttention",
            [query, key, value, pasts["recurrent_state"], decay, beta],
            "recurrent_state",
            **own["LinearAttention"],
        )
        added = op("MatMul", [attended, weight("out", VALUES, HIDDEN)], HIDDEN)
        summed = op("Add", [embedded, added], HIDDEN)
    for node, slot in readers:
        node.replace_input_with(slot, summed)
