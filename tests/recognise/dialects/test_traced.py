"""Dialect decomposed: traced exports, sliding caches, and graphs that onnxruntime has optimised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.decoders.running import Decoder, batch, convert, load, session
from tests.decoders.synthetic import (
    PLAIN,
    REPEAT,
    SLIDING_CACHE,
    SLIDING_MASK,
    SLIDING_REPEAT,
    decoder,
)
from tq_onnx.recognise.match import recognise

RAW_NOISE = {"FLOAT": 1e-5, "FLOAT16": 3e-3}
"""Of the largest logit, where nothing is quantised."""


def noise(
    original: ir.Model, converted: ir.Model, chunks: tuple[int, ...], **options: int
) -> float:
    """Largest difference of real tokens, relative to the largest logit; fixed capacity too."""
    data = batch(sum(chunks), 2, left_padding=options.pop("padding", 0))
    expected = Decoder(session(original), 2, **options).run(data, chunks)[data.real]
    found = [Decoder(session(converted), 2, **options).run(data, chunks)[data.real]]
    if options.get("capacity") is None and recognise_capacity(converted):
        found.append(
            Decoder(session(converted), 2, capacity=sum(chunks) + 3).run(data, chunks)[data.real]
        )
    return float(max(np.abs(each - expected).max() for each in found) / np.abs(expected).max())


def recognise_capacity(converted: ir.Model) -> bool:
    return '"fixed_capacity": true' in converted.metadata_props["tq_onnx.plan"].replace(
        '"fixed_capacity":true', '"fixed_capacity": true'
    )


def test_queries_that_share_a_key_may_be_folded_for_one_token() -> None:
    original, converted = load("legacy-one-token"), load("legacy-one-token")
    site = recognise(load("legacy-one-token")).sites[0]
    assert (site.num_heads, site.kv_num_heads) == (4, 2)
    assert not any(node.op_type == "Expand" for node in _between(site.key.present))
    convert(converted, "raw")

    assert noise(original, converted, (1,) * 6, padding=2) < RAW_NOISE["FLOAT"]


def _between(value: ir.Value) -> list[ir.Node]:
    """The nodes from a cache to the softmax."""
    nodes, pending = [], [value]
    while pending:
        for use in pending.pop().uses():
            if use.node.op_type not in ("Shape", "Softmax"):
                nodes.append(use.node)
                pending += use.node.outputs
    return nodes


FOLDED = {
    "heads": 4,
    "repeat": PLAIN,
    "query": """t0 = Constant<value_ints = [0, 2, 2, 16]>()
        t1 = Reshape(q, t0)
        qs = Mul(t1, quarter)""",
    "weighted": """t5 = MatMul(p, vr)
        t6 = Constant<value_ints = [0, 4, 1, 16]>()
        o = Reshape(t5, t6)""",
    "infer": False,
}


def test_a_folded_query_in_another_form() -> None:
    original, converted = decoder(**FOLDED), decoder(**FOLDED)
    convert(converted, "raw")

    assert noise(original, converted, (1,) * 5, padding=1) < RAW_NOISE["FLOAT"]


def test_refuses_a_folded_query_whose_mask_differs_between_heads() -> None:
    mask = """t2 = Constant<value = float[1, 1, 2, 1] {0.0, 1.0}>()
        t3 = Add(bias, t2)
        s2 = Add(s1, t3)"""

    assert "differs between the queries" in str(recognise(decoder(**FOLDED, mask=mask)).misses[0])


def test_refuses_a_folded_query_over_repeated_keys() -> None:
    parts = {**FOLDED, "repeat": REPEAT}

    assert recognise(decoder(**parts)).misses


SLIDING = {
    "cache": SLIDING_CACHE,
    "repeat": SLIDING_REPEAT,
    "mask": SLIDING_MASK,
    "infer": False,
}


@pytest.mark.parametrize("chunks", [(9, 1, 1, 4), (1,) * 9, (2, 3, 1, 6)])
def test_caches_that_keep_a_window_keep_it(chunks: tuple[int, ...]) -> None:
    original, converted = decoder(**SLIDING), decoder(**SLIDING)
    plan = convert(converted, "raw")
    data = batch(sum(chunks), 2, left_padding=2)
    before, after = Decoder(session(original), 2), Decoder(session(converted), 2)

    expected = before.run(data, chunks)[data.real]
    found = after.run(data, chunks)[data.real]

    assert not plan.fixed_capacity
    assert np.abs(found - expected).max() < RAW_NOISE["FLOAT"] * np.abs(expected).max()
    assert {cache.shape[2] for cache in before.caches.values()} == {3}
    assert {cache.shape[2] for cache in after.caches.values()} == {3}


def test_refuses_attention_over_a_window_that_was_cut_before() -> None:
    """Such attention does not see all rows that its update wrote."""
    parts = {**SLIDING, "repeat": REPEAT}

    assert recognise(decoder(**parts)).misses


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
@pytest.mark.parametrize("name", ["legacy-op17-sdpa", "dynamo-op18-eager", "optimum"])
def test_a_graph_that_onnxruntime_has_optimised(name: str, level: str, tmp_path: Path) -> None:
    optimised = optimise(name, level, tmp_path)
    converted = ir.load(optimised)
    if level == "EXTENDED" and name != "dynamo-op18-sdpa":
        assert any(node.op_type == "FusedMatMul" for node in converted.graph)
    convert(converted, "raw")

    assert noise(load(name), converted, (5, 1, 2), padding=2) < RAW_NOISE["FLOAT"]


def test_refuses_a_softmax_that_onnxruntime_has_spelled_out(tmp_path: Path) -> None:
    """It has none in float16 for a CPU."""
    optimised = optimise("dynamo-op18-sdpa-hd128-fp16", "BASIC", tmp_path)

    misses = recognise(ir.load(optimised)).misses

    assert [miss.layer for miss in misses] == [0, 1]
    assert "spelled out" in misses[0].reason


def optimise(name: str, level: str, folder: Path) -> Path:
    """What onnxruntime makes of a fixture."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}"
    )
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(
        ir.to_proto(load(name)).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return folder / "optimised.onnx"
