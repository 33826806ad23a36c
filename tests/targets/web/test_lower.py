"""Converted models in few standard operators: the same rows and numbers as by function bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from tests.covering import exports
from tests.decoders.running import (
    EXACT,
    GROWING,
    Batch,
    Decoder,
    agree,
    batches,
    convert,
    load,
    lower,
    session,
)
from tests.decoders.synthetic import UNMASKED, decoder
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.check import complaint
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.plan import Plan
from tq_onnx.targets.web import tables
from tq_onnx.targets.web.lower import lowering_of

RUNNING = [name for name in GROWING if not name.endswith(("bf16", "one-token"))]
"""ONNX Runtime has no kernels for bfloat16 on a CPU, and the other takes one token a call."""
NOISE = 2e-2
"""Of models that compute in float16 or round what they multiply, as ``running.EXACT`` is that of
float32; a wrong graph is off by ten times as much."""
MOST_NODES = {"int4": 80, "mse3": 96, "k5v3": 150}
"""Of the operators of one layer, by preset; the function bodies of int4 have more than 300."""
MOST_SHARED = 64
"""Of all layers together."""


def pair(model: ir.Model, preset: str = "int4") -> tuple[ir.Model, ir.Model, Plan]:
    """A model with operators, and the same in standard ONNX."""
    plan = convert(model, preset)
    lowered = model.clone()
    lower(lowered, lowering_of(plan))
    assert complaint(lowered) == ""
    return model, lowered, plan


def same(
    bodies: ir.Model,
    lowered: ir.Model,
    cases: Sequence[Batch],
    capacity: int = 0,
    tolerance: float = EXACT,
) -> bool:
    """Whether logits agree, and rows too unless float noise moved a code in every batch."""
    runs = [(session(model), len(cases[0].tokens)) for model in (bodies, lowered)]
    close = agree(*(Decoder.runner(*run, capacity=capacity) for run in runs), cases, tolerance)
    rows = []
    for data in cases:
        theirs, ours = (Decoder(*run, capacity=capacity) for run in runs)
        theirs.run(data)
        ours.run(data)
        rows.append(theirs.same_bytes(ours, data.tokens.shape[1]))
    return close and (any(rows) or tolerance == NOISE)


@pytest.mark.parametrize("name", exports([*RUNNING, "dynamo-gemma2", "dynamo-gemma3"]))
def test_the_same_as_the_bodies(name: str) -> None:
    bodies, lowered, plan = pair(load(name))
    is_noisy = plan.layers[0].dtype == "FLOAT16" or "int4" in name
    tolerance = NOISE if is_noisy else EXACT
    assert same(bodies, lowered, batches(12, 2), tolerance=tolerance)


@pytest.mark.parametrize("preset", ["mse4", "mse3", "mse2", "mse1", "k4v2", "k5v3", "int2"])
def test_every_codec_and_correction(preset: str) -> None:
    bodies, lowered, _ = pair(load("dynamo-op18-sdpa"), preset)
    assert same(bodies, lowered, batches(12, 2))


def test_padding_and_rows_that_nobody_wrote() -> None:
    bodies, lowered, plan = pair(load("dynamo-op18-eager"))
    assert plan.fixed_capacity
    assert same(bodies, lowered, batches(12, 2, left_padding=3), capacity=20)


def test_no_mask_at_all() -> None:
    bodies, lowered, plan = pair(decoder(mask=UNMASKED))
    assert not any(layer.has_bias for layer in plan.layers)
    assert same(bodies, lowered, batches(12, 2))


def test_sinks_only_widen_the_denominator() -> None:
    model = load("dynamo-op18-sdpa")
    plan = convert(model)
    found = []
    for strength in (-np.inf, 1.0):
        sunk = model.clone()
        for layer in converted_layers(sunk, plan):
            name = f"sinks.{layer.plan.layer}"
            sinks = ir.tensor(np.full(layer.plan.num_heads, strength, np.float32), name=name)
            layer.attention.sink = ir.Value(
                name=name, type=ir.TensorType(sinks.dtype), shape=sinks.shape, const_value=sinks
            )
            sunk.graph.register_initializer(layer.attention.sink)
        lowered = sunk.clone()
        # Not as a pass, which checks that sinks are as planned: the plan has none.
        for step in lowering_of(plan).passes:
            step.call(lowered)
        found.append(Decoder(session(lowered), 1).run(batches(12)[0]))
    without = model.clone()
    lower(without, lowering_of(plan))
    expected = Decoder(session(without), 1).run(batches(12)[0])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found[1] - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("preset", MOST_NODES)
def test_few_nodes_and_nothing_of_ours(preset: str) -> None:
    bodies, lowered, plan = pair(load("dynamo-op18-sdpa"), preset)
    assert not lowered.functions
    assert set(lowered.opset_imports) == {""}
    others = len(bodies.graph) - 3 * len(plan.layers)
    assert len(lowered.graph) - others <= MOST_NODES[preset] * len(plan.layers) + MOST_SHARED


def test_bytes_are_read_in_the_order_of_the_rotation() -> None:
    order = tables.byte_order(Codec("lloyd_max", 4), 8)
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert tables.byte_order(Codec("lloyd_max", 2), 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
