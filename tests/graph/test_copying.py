"""A copy can be changed, and its model stays as it is."""

from __future__ import annotations

import onnx_ir as ir

from tests.runtime.models import DYNAMO, converted
from tq_onnx.files.load import load
from tq_onnx.graph.copying import copy_graph


def test_a_copy_is_the_same_and_its_changes_are_its_own() -> None:
    model = load(converted(DYNAMO)).model
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    copied = copy_graph(model)
    assert ir.to_proto(copied).SerializeToString(deterministic=True) == before
    copied.graph.node(0).name = "another"
    copied.graph.outputs.append(copied.graph.node(0).outputs[0])
    copied.graph.initializers.popitem()
    copied.metadata_props.clear()
    copied.opset_imports["a.domain"] = 1
    copied.functions.popitem()
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
