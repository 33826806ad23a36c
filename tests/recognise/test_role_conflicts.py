"""Attention by its form that a conversion would not leave as it is: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from tests.cli.run import run
from tests.files.models import FIXTURES, snapshot
from tests.runtime.models import DYNAMO, GENAI, opened
from tq_onnx.errors import UsageError
from tq_onnx.recognise.match import recognise


def nothing_reads(proto: onnx.ModelProto) -> None:
    """The last attention's result stays in the graph, and no output depends on it."""
    attention = [n for n in proto.graph.node if n.op_type == "GroupQueryAttention"][-1]
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name == attention.output[0]:
                node.input[index] = attention.input[0]


def past_as_rows(proto: onnx.ModelProto) -> None:
    """The old cache is appended to itself."""
    join = next(
        node
        for node in proto.graph.node
        if node.op_type == "Concat" and "past_key_values.0.key" in node.input
    )
    join.input[:] = ["past_key_values.0.key", "past_key_values.0.key"]


@pytest.mark.parametrize(
    ("fixture", "edit", "says"),
    [
        ("genai-dml-fp16", nothing_reads, "nothing reads the result of attention"),
        ("dynamo-qwen3-moe", past_as_rows, "past_key_values.0.key"),
    ],
)
def test_refused(fixture: str, edit: Callable[[onnx.ModelProto], None], says: str) -> None:
    proto = onnx.load(FIXTURES / f"{fixture}.onnx")
    edit(proto)
    misses = recognise(ir.from_proto(proto)).misses
    assert any(says in str(miss) for miss in misses), misses


# Tables of positions, in what they are read by in exports and in conversions.


@pytest.mark.parametrize("kind", ["original", "kernel"])
@pytest.mark.parametrize(
    ("name", "rows"),
    [(DYNAMO, None), (GENAI, 128), ("genai-cpu-fp16", 64), ("mobius-default", 64)],
    ids=["computed", "attention", "rotation", "gather"],
)
def test_rows_of_tables(name: str, rows: int | None, kind: str) -> None:
    assert opened(name, kind).positions == opened(name, kind).longest == rows


@pytest.mark.parametrize("kind", ["original", "kernel"])
def test_a_graph_with_less_room_than_positions(kind: str) -> None:
    model = opened("mobius-static", kind)
    assert (model.positions, model.room, model.longest) == (64, 24, 24)


@pytest.mark.parametrize("kind", ["original", "kernel"])
def test_a_text_that_is_longer_is_one_sentence_and_keeps_the_caches(kind: str) -> None:
    decoder = opened("mobius-default", kind).decoder()
    decoder.prefill(np.ones((1, 64), np.int64))
    with pytest.raises(UsageError, match="has 64 positions, and the text is longer; give fewer"):
        decoder.step([1])
    decoder.rewind(63)
    decoder.step([1])
    assert decoder.length == 64


# Attention inside control flow is refused in one sentence.


_FUSED = ("Attention", "MultiHeadAttention", "GroupQueryAttention")


def nest(proto: onnx.ModelProto, wanted: tuple[str, ...], control: str) -> None:
    """Put every node of some operators into a branch, or the body of a loop, of its own."""
    graph = proto.graph
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    graph.initializer.append(numpy_helper.from_array(np.array(1), "once"))
    nodes = list(graph.node)
    del graph.node[:]
    for number, node in enumerate(nodes):
        if node.op_type not in wanted:
            graph.node.append(node)
            continue
        outer = graph.node.add(op_type=control, output=node.output)
        outer.input.extend(["yes"] if control == "If" else ["once", "yes"])
        for name in ("then_branch", "else_branch") if control == "If" else ("body",):
            inner = outer.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g
            inner.name = name
            if control == "Loop":
                for given, kind in (
                    ("step", onnx.TensorProto.INT64),
                    ("go", onnx.TensorProto.BOOL),
                ):
                    inner.input.add(name=given).type.tensor_type.elem_type = kind
                inner.node.add(op_type="Identity", input=["go"], output=["on"])
                inner.output.add(name="on")
            copy = inner.node.add()
            copy.CopyFrom(node)
            copy.output[:] = [f"{name}.{number}.{index}" for index in range(len(node.output))]
            for output in copy.output:
                inner.output.add(name=output)


@pytest.mark.parametrize("control", ["If", "Loop"])
@pytest.mark.parametrize(
    ("fixture", "wanted"),
    [
        ("dynamo-op18-eager", ("MatMul",)),
        ("dynamo-op18-eager", ("Softmax",)),
        ("dynamo-op18-eager", ("Transpose",)),
        ("dynamo-op18-eager", ("Concat",)),
        ("dynamo-op23-sdpa", _FUSED),
        ("dynamo-op24-sdpa", _FUSED),
        ("hf-static-decode", ("MatMul",)),
        ("hf-ortcpu-prefill", _FUSED),
        ("mobius-static", _FUSED),
        ("genai-cpu-int4", _FUSED),
    ],
    ids=str,
)
def test_attention_in_control_flow_is_refused(
    fixture: str, wanted: tuple[str, ...], control: str, tmp_path: Path
) -> None:
    proto = onnx.load(FIXTURES / f"{fixture}.onnx")
    nest(proto, wanted, control)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    before = snapshot(tmp_path)
    looked, done = run("inspect", path), run("convert", path)
    assert (looked.code, looked.err) == (3, "")
    assert "layer 0" in done.sentence(3)
    if wanted == ("MatMul",):
        assert "inside a subgraph (of If, Loop or Scan)" in done.err
    assert snapshot(tmp_path) == before
