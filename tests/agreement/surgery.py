"""Real exports with other inputs and outputs, as options of exporters make them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.builder import Builder


def embeddings_given(model: ir.Model) -> None:
    """Takes rows of the embedding table instead of ids."""
    graph = model.graph
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    gather = next(use.node for use in ids.uses() if use.node.op_type == "Gather")
    rows = gather.outputs[0]
    assert gather.inputs[0] is not None
    assert gather.inputs[0].shape is not None
    given = ir.Value(
        name="inputs_embeds",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(["batch_size", "sequence_length", gather.inputs[0].shape[1]]),
    )
    rows.replace_all_uses_with(given)
    graph.remove(gather, safe=True)
    graph.inputs[graph.inputs.index(ids)] = given


def no_output_projection(model: ir.Model) -> None:
    """Gives hidden states instead of logits."""
    graph = model.graph
    index = next(i for i, value in enumerate(graph.outputs) if value.name == "logits")
    node = graph.outputs[index].producer()
    assert node is not None
    hidden = node.inputs[0]
    assert hidden is not None
    projection = node.inputs[1]
    assert projection is not None
    assert projection.shape is not None
    hidden.name = "hidden_states"
    hidden.type = ir.TensorType(ir.DataType.FLOAT)
    hidden.shape = ir.Shape(["batch_size", "sequence_length", projection.shape[0]])
    graph.outputs[index] = hidden
    graph.remove(node, safe=True)


def last_logits_only(model: ir.Model) -> None:
    """Gives the logits of a call's last token only."""
    _slice(model, lambda build: build.integers(-1), size=1)


def logits_to_keep(model: ir.Model) -> None:
    """Is told how many of the last tokens get logits."""

    def start(build: Builder) -> ir.Value:
        count = ir.Value(
            name="num_logits_to_keep",
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([1]),
        )
        model.graph.inputs.append(count)
        return build.op("Neg", [count], "from", dtype=ir.DataType.INT64, shape=[1])

    _slice(model, start, size=None)


def counted_twice(model: ir.Model) -> None:
    """Takes an input that only an output of its own depends on."""
    given, back = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        for name in ("window", "window_out")
    )
    model.graph.inputs.append(given)
    model.graph.append(ir.node("Identity", [given], outputs=[back]))
    model.graph.outputs.append(back)


def _slice(model: ir.Model, start: Callable[[Builder], ir.Value], *, size: int | None) -> None:
    graph = model.graph
    index = next(i for i, value in enumerate(graph.outputs) if value.name == "logits")
    logits = graph.outputs[index]
    node = logits.producer()
    assert node is not None
    assert logits.shape is not None
    logits.name = "all_logits"
    last = next(reversed(list(graph)))
    build = Builder(graph)
    with build.before(last, "keep"):
        first = start(build)
        end = build.constant("end", np.array([np.iinfo(np.int64).max]))
        axis = build.integers(1)
    kept = ir.Value(
        name="logits",
        type=logits.type,
        shape=ir.Shape([logits.shape[0], size, logits.shape[2]]),
    )
    graph.append(ir.node("Slice", [logits, first, end, axis], outputs=[kept]))
    graph.outputs[index] = kept
