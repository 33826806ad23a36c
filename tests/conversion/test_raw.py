"""The preset ``raw``: a converted model computes what its original does, to float noise.

Nothing is quantised, so that every difference is one of recognition or of rewriting.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.running import EXACT, Batch, Decoder, batch, convert, load, session
from tq_onnx.ops.operators import Attention, Encode

# Largest difference of a logit to the largest logit; a wrong mask or position shows as 1e-2.
NOISE = {ir.DataType.FLOAT: EXACT, ir.DataType.FLOAT16: 3e-3}
# Originals that ONNX Runtime runs on a CPU, and how large a batch their own attention takes.
ORIGINALS = {
    "dynamo-op18-eager": 2,
    "dynamo-op18-sdpa": 2,
    "dynamo-op18-sdpa-hd128-fp16": 2,
    "dynamo-op20-eager": 2,
    "dynamo-op20-sdpa": 2,
    "genai-cpu-fp32": 1,
    "genai-cpu-int4": 1,
    "genai-cpu-int4-hd128": 1,
}


def head_size(name: str) -> int:
    return 128 if "hd128" in name else 64


def load_exact(name: str) -> ir.Model:
    """A fixture whose int4 weights are multiplied in float32.

    As exported, inputs are rounded to int8 first, and noise that flips one shows as 1e-2.
    """
    model = load(name)
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    return model


def logits(model: ir.Model, data: Batch, name: str, *, library: bool = False) -> np.ndarray:
    decoder = Decoder(session(model, library=library), ORIGINALS[name], head_size=head_size(name))
    return decoder.run(data)[data.real]


@pytest.mark.parametrize("name", ORIGINALS)
def test_converted_equals_original(name: str) -> None:
    original, converted = load_exact(name), load_exact(name)
    plan = convert(converted, "raw")
    size = ORIGINALS[name]
    data = batch(12, size, left_padding=0 if size == 1 else 3)
    wanted = logits(original, data, name)
    found = logits(converted, data, name, library=True)
    noise = NOISE[ir.DataType[plan.layers[0].dtype]]
    assert np.abs(found - wanted).max() <= noise * np.abs(wanted).max()


def nudge_scale(model: ir.Model) -> None:
    for node in Attention.nodes(model.graph):
        node.attributes["scale"] = ir.AttrFloat32(
            "scale", node.attributes.get_float("scale") * 1.01
        )


def swap_caches(model: ir.Model) -> None:
    for node in Attention.nodes(model.graph):
        key, value = Attention.key_cache.of(node), Attention.value_cache.of(node)
        Attention.key_cache.replace(node, value)
        Attention.value_cache.replace(node, key)


@pytest.mark.parametrize("damage", [nudge_scale, swap_caches], ids=lambda f: f.__name__)
def test_a_wrong_rewrite_would_be_noticed(damage: Callable[[ir.Model], None]) -> None:
    name = "dynamo-op18-sdpa"
    original, converted = load(name), load(name)
    convert(converted, "raw")
    damage(converted)
    data = batch(12, 2)
    wanted, found = (logits(model, data, name) for model in (original, converted))
    assert np.abs(found - wanted).max() > 10 * EXACT * np.abs(wanted).max()


def test_caches_hold_the_originals_floats() -> None:
    """The first layer's keys and values depend on nothing that a conversion touches."""
    name = "dynamo-op18-sdpa"
    original, converted = load(name), load(name)
    layer = convert(converted, "raw").layers[0]
    data = batch(12, 2)
    before = Decoder(session(original), 2)
    after = Decoder(session(converted, library=True), 2)
    before.run(data)
    after.run(data)
    for pair in (layer.key, layer.value):
        floats, rows = before.caches[pair.past], after.caches[pair.past]
        assert rows.dtype == np.uint8
        np.testing.assert_allclose(rows.view("<f4"), floats, rtol=1e-5, atol=1e-6)


def test_tables_are_one_number() -> None:
    model = load("dynamo-op18-sdpa")
    convert(model, "raw")
    (none,) = [
        value for name, value in model.graph.initializers.items() if name.startswith("tq.none")
    ]
    assert none.const_value.numpy().shape == (1,)
    assert not [
        name
        for name in model.graph.initializers
        if name.startswith(("tq.rot", "tq.cent", "tq.bound"))
    ]
    encode = (Encode.rotation, Encode.centroids, Encode.boundaries)
    attend = (
        *(Attention.key_rotation, Attention.key_centroids),
        *(Attention.value_rotation, Attention.value_centroids),
    )
    for operator, tables in ((Encode, encode), (Attention, attend)):
        for node in operator.nodes(model.graph):
            assert {table.of(node) for table in tables} == {none}
