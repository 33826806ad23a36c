"""Attention by its form that a conversion would not leave as it is: refused by name."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest

from tests.files.models import FIXTURES
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
