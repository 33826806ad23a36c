"""Sizes around the operators have names, and a name stands for one size in every call."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.decoders.running import FIXTURES, Decoder, batch, session
from tq_onnx.conversion.naming import name_sizes
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.graph.sizerules import sizes
from tq_onnx.ops.domain import DOMAIN

FEEDS = (7, 1)


def around(model: ir.Model) -> list[ir.Value]:
    """What the operators read and make."""
    values = (
        value
        for node in model.graph
        if node.domain == DOMAIN
        for value in (*node.inputs, *node.outputs)
    )
    return [value for value in values if value is not None and not value.is_initializer()]


@pytest.mark.parametrize("name", ["genai-cpu-fp32", "genai-cuda-int4", "dynamo-op20-sdpa"])
def test_every_size_around_an_operator_has_a_name_that_is_right(name: str) -> None:
    model = prepare(FIXTURES / f"{name}.onnx").loaded.model
    told = [sizes(value) for value in around(model)]
    assert all(shape is not None and None not in shape for shape in told)
    assert ("batch_size", 4, "sequence_length", 64) in told

    graph = model.graph
    made = [value for node in graph for value in node.outputs if sizes(value) and value.dtype]
    graph.outputs.extend(value for value in made if not value.is_graph_output())
    graph.outputs.sort(key=lambda value: value.name != "logits")
    shapes = {value.name or "": sizes(value) or () for value in (*graph.inputs, *graph.outputs)}
    decoder = Decoder(session(model, library=True), size=3)
    for feeds in batch(sum(FEEDS), 3).feeds(FEEDS):
        past = dict(decoder.caches)
        decoder.feed(feeds)
        found: dict[str, set[int]] = {}
        for value, array in {**feeds, **past, **decoder.results}.items():
            for size, length in zip(shapes.get(value, ()), array.shape, strict=False):
                if isinstance(size, int):
                    assert length == size, value
                elif size is not None:
                    found.setdefault(size, set()).add(length)
        assert {size for size, lengths in found.items() if len(lengths) > 1} == set()


def test_names_that_inference_made_up_are_not_passed_on() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, tokens, 3] x, int64[3] target) => (float[batch, 3, tokens] y)
        <float[batch, 3, unk__7] told, float[batch, unk__7, 3] a, float[] c>
        {
            a = Reshape(x, target)
            b = Transpose<perm = [0, 2, 1]>(a)
            c = Relu(b)
            told = Relu(c)
            y = Transpose<perm = [0, 2, 1]>(x)
        }"""
    )
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["b"].type = values["c"].type = ir.TensorType(ir.DataType.FLOAT)
    values["c"].shape = None

    name_sizes(model)

    assert sizes(values["b"]) == sizes(values["c"]) == ("batch", 3, None)
    assert sizes(values["told"]) == ("batch", 3, "unk__7")
    assert sizes(values["y"]) == ("batch", 3, "tokens")


def test_as_many_positions_as_tokens_have_their_name() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, tokens, 3] x) => (int64[n] y, int64[m] z)
        <int64[1] where = {1}, int64 none = {0}, int64 one = {1}, int64 two = {2}>
        {
            shape = Shape(x)
            length = Gather(shape, where)
            count = Squeeze(length)
            every = Range(none, count, one)
            other = Range(none, count, two)
            behind = Range(one, count, one)
            y = Add(every, behind)
            z = Identity(other)
        }"""
    )
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name in ("every", "other", "behind"):
        values[name].type = ir.TensorType(ir.DataType.INT64)

    name_sizes(model)

    found = [sizes(values[name]) for name in ("every", "other", "behind")]
    assert found == [("tokens",), (None,), (None,)]
