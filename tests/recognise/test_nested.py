"""Attention inside control flow is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.run import run
from tests.files.models import FIXTURES, snapshot

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
