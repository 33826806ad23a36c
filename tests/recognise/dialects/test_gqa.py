"""Dialect gqa: what genai writes, every feature of the operator that is taken out, refusals.

The oracle is the original itself in ONNX Runtime, with its norms outside where the kernel has none:
with ``raw`` caches a converted model must agree with it but for float noise.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.decoders.norms import take_norms_out
from tests.decoders.onelayer import CACHES, decoder
from tests.decoders.running import (
    EXACT,
    Decoder,
    batch,
    convert,
    load,
    session,
    to_float32,
)
from tests.recognise.dialects.edits import (
    Change,
    attentions,
    both,
    with_attribute,
    with_input,
    without_input,
)
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.recognise.match import recognise

EXPORTS: Final = {
    "genai-cpu-fp32": (64, "FLOAT"),
    "genai-cpu-int4": (64, "FLOAT"),
    "genai-cpu-int4-hd128": (128, "FLOAT"),
    "genai-cuda-fp16": (64, "FLOAT16"),
    "genai-cuda-int4": (64, "FLOAT16"),
}

# The first version that was seen to have every feature below in its CPU kernel.
NEWEST_GQA: Final = (1, 31)
COUNTED_QUERIES: Final = (1, 32)
"""The first version whose kernel takes query_seqlens."""
ORT_VERSION: Final = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


RING: Final = {"local_window_size": 3, "sliding_window_cache": 1}


def with_slots(count: int) -> Change:
    """Fixes the number of rows of all caches."""

    def change(model: ir.Model) -> None:
        for past in (value for node in attentions(model) for value in node.inputs[3:5]):
            assert past is not None and past.shape is not None
            past.shape = ir.Shape([*past.shape[:2], count, past.shape[3]])

    return change


def with_float_activations(model: ir.Model) -> None:
    """Multiplies int4 weights with floats.

    With accuracy_level 4 activations become int8: float noise puts some on the other side of a
    step, which is far more than the difference that is looked for.
    """
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)


def with_sinks(dtype: ir.DataType = ir.DataType.FLOAT) -> Change:
    """Gives every attention sinks of its own, as initializers."""

    def change(model: ir.Model) -> None:
        for index, node in enumerate(attentions(model)):
            sinks = np.array([0.6, -0.8, 2.5, 0.1]) * (1 - 2 * index)
            tensor = ir.tensor(sinks.astype(dtype.numpy()), name=f"sinks.{index}")
            value = ir.Value(
                name=tensor.name,
                type=ir.TensorType(dtype),
                shape=ir.Shape([4]),
                const_value=tensor,
            )
            model.graph.register_initializer(value)
            node.resize_inputs(max(len(node.inputs), 12))
            node.replace_input_with(11, value)

    return change


def rotate_half_the_head(model: ir.Model) -> None:
    for name in ("cos_cache", "sin_cache"):
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = np.ascontiguousarray(value.const_value.numpy()[:, :16])
        value.const_value = ir.tensor(array, name=name)
        value.shape = ir.Shape(array.shape)


def pack_projections(model: ir.Model) -> None:
    """Lets the operator split the packed projection itself: inputs 1 and 2 empty."""
    for node in attentions(model):
        query = node.inputs[0]
        assert query is not None
        split = query.producer()
        assert split is not None and split.op_type == "Split"
        node.replace_input_with(0, split.inputs[0])
    without_input(1, 2)(model)


def unchanged(model: ir.Model) -> None:
    del model


FEATURES: Final[dict[str, tuple[str, Change]]] = {
    "as exported": ("genai-cpu-fp32", unchanged),
    "int4 weights": ("genai-cpu-int4", with_float_activations),
    "head size 128": ("genai-cpu-int4-hd128", with_float_activations),
    "sliding window": ("genai-cpu-fp32", with_attribute("local_window_size", 3)),
    "window of one": ("genai-cpu-fp32", with_attribute("local_window_size", 1)),
    "softcap": ("genai-cpu-fp32", with_attribute("softcap", 0.7)),
    "scale": ("genai-cpu-fp32", with_attribute("scale", 0.3)),
    "default scale": ("genai-cpu-fp32", with_attribute("scale", 0.0)),
    "interleaved rotation": ("genai-cpu-fp32", with_attribute("rotary_interleaved", 1)),
    "partial rotation": ("genai-cpu-fp32", rotate_half_the_head),
    "no rotation": ("genai-cpu-fp32", with_attribute("do_rotary", 0)),
    "not causal": ("genai-cpu-fp32", with_attribute("causal", 0)),
    "bias": (
        "genai-cpu-fp32",
        with_input(10, ir.DataType.FLOAT, [1, 1, "T", "total"], "bias"),
    ),
    "sinks": ("genai-cpu-fp32", with_sinks()),
    "smooth softmax": ("genai-cpu-fp32", with_attribute("smooth_softmax", 1)),
    "no smooth softmax": ("genai-cpu-fp32", with_attribute("smooth_softmax", 0)),
    "sinks and smooth softmax": (
        "genai-cpu-fp32",
        both(with_sinks(), with_attribute("smooth_softmax", 1)),
    ),
    "sinks, window, softcap, bias": (
        "genai-cpu-fp32",
        both(
            with_sinks(),
            with_attribute("local_window_size", 3),
            with_attribute("softcap", 0.7),
            with_input(10, ir.DataType.FLOAT, [1, 1, "T", "total"], "bias"),
        ),
    ),
    "norms inside": ("genai-cuda-fp16", to_float32),
    "norms inside, int4": ("genai-cuda-int4", to_float32),
    "packed projections": (
        "genai-cuda-fp16",
        both(to_float32, pack_projections, without_input(14, 15)),
    ),
    "packed projections, norms inside": (
        "genai-cuda-fp16",
        both(to_float32, pack_projections),
    ),
}


def changed(feature: str) -> ir.Model:
    name, change = FEATURES[feature]
    model = load(name)
    change(model)
    return model


def head_size_of(feature: str) -> int:
    return EXPORTS[FEATURES[feature][0]][0]


@pytest.mark.parametrize("feature", FEATURES)
def test_converted_feature_is_the_original(feature: str) -> None:
    size, data = head_size_of(feature), batch(12)
    model, original = changed(feature), changed(feature)
    convert(model, "raw")
    take_norms_out(original)
    try:
        expected = Decoder(session(original), head_size=size).run(data)
    except UnsupportedModelError as error:
        if ORT_VERSION >= NEWEST_GQA:
            raise
        pytest.skip(f"this feature of the kernel is newer: {error}")
    converted = session(model, library=True)
    grown, fixed = Decoder(converted), Decoder(converted, capacity=16)
    for each in (grown, fixed):
        assert np.abs(each.run(data) - expected).max() < EXACT * np.abs(expected).max()
    assert fixed.same_bytes(grown, 12)
    assert {cache.shape[2] for cache in grown.caches.values()} == {12}


def test_given_positions_are_used() -> None:
    """Of every third place: as every third row of the tables, since the CPU's kernel counts."""
    model, original = load("genai-cpu-fp32"), load("genai-cpu-fp32")
    with_input(9, ir.DataType.INT64, ["batch_size", "sequence_length"], "position_ids")(model)
    for name in ("cos_cache", "sin_cache"):
        table = original.graph.initializers[name]
        assert table.const_value is not None
        rows = np.ascontiguousarray(table.const_value.numpy()[::3])
        table.const_value, table.shape = ir.tensor(rows, name=name), ir.Shape(rows.shape)
    plan = convert(model, "raw")
    data = batch(12)
    expected = Decoder(session(original)).run(data)
    found = Decoder(session(model, library=True))
    # Gaps grow, for equal gaps would not show in what is a relative encoding.
    calls = ({**feeds, "position_ids": feeds["position_ids"] * 3} for feeds in data.feeds())
    logits = np.concatenate([found.feed(feeds) for feeds in calls], axis=1)
    assert plan.interface.position_ids == "position_ids"
    assert np.abs(logits - expected).max() < EXACT * np.abs(expected).max()


@pytest.mark.parametrize("capacity", [0, 12])
def test_prompts_of_different_lengths_are_padded_on_the_right(capacity: int) -> None:
    """As onnxruntime-genai feeds them: seqlens_k differ, and first prompts are shorter than T."""
    model = load("genai-cpu-fp32")
    convert(model, "raw")
    prompt, total = 6, 10
    data = batch(total, 2)
    data.mask[1, 4:prompt] = 0
    chunks = (prompt, *(1,) * (total - prompt))
    expected = Decoder(session(load("genai-cpu-fp32")), 2).run(data, chunks)[data.real]
    found = Decoder(session(model, library=True), 2, capacity).run(data, chunks)[data.real]
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()


@pytest.mark.parametrize("capacity", [0, 24])
def test_chunks_are_padded_behind_the_tokens_that_are_counted(capacity: int) -> None:
    """query_seqlens: every call has as many rows, and each sequence as many tokens as it has."""
    if ORT_VERSION < COUNTED_QUERIES:
        pytest.skip("query_seqlens is newer than this ONNX Runtime")
    count = with_input(16, ir.DataType.INT32, ["batch_size"], "query_seqlens")
    model, original = load("genai-cpu-fp32"), load("genai-cpu-fp32")
    count(model)
    count(original)
    plan = convert(model, "raw")
    assert [(entry.name, entry.role) for entry in plan.interface.fed] == [
        ("query_seqlens", "new_lengths")
    ]
    tokens, room = batch(16, 2).tokens, 4
    counts = [[4, 4], [4, 1], [2, 4], [1, 3]]
    # The kernel has no room for padding behind a growing cache.
    expected, found = (
        Decoder(session(original), 2, 24),
        Decoder(session(model, library=True), 2, capacity),
    )
    behind = np.zeros(2, np.int64)
    for new in counts:
        calls = np.stack([row[at : at + room] for row, at in zip(tokens, behind, strict=True)])
        behind += new
        feeds = {
            "input_ids": calls,
            "attention_mask": np.arange(24) < behind[:, None],
            "query_seqlens": np.array(new),
        }
        real = np.arange(room) < np.array(new)[:, None]
        logits, exact = found.feed(feeds)[real], expected.feed(feeds)[real]
        assert np.abs(logits - exact).max() < EXACT * np.abs(exact).max()


def test_position_arithmetic_is_made_once() -> None:
    model = load("genai-cpu-fp32")
    convert(model)

    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("Range"), kinds.count("Max")) == (1, 1)
    assert kinds.count("RotaryEmbedding") == 4


def test_layers_with_and_without_sinks_share_one_body() -> None:
    """A function has no optional inputs: the layer without sinks is given some that do nothing."""

    def change(model: ir.Model) -> None:
        with_sinks()(model)
        attentions(model)[1].replace_input_with(11, None)

    model, original = load("genai-cpu-fp32"), load("genai-cpu-fp32")
    change(model)
    change(original)
    assert [site.has_sink for site in recognise(model).sites] == [True, False]
    assert [site.has_bias for site in recognise(model).sites] == [False, False]
    plan = convert(model, "raw")
    data = batch(12)

    assert [(layer.has_bias, layer.has_sink) for layer in plan.layers] == [(True, True)] * 2
    expected = Decoder(session(original), head_size=64).run(data)
    found = Decoder(session(model, library=True)).run(data)
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()
    # The negative twin: sinks make a difference.
    unlike = Decoder(session(load("genai-cpu-fp32")), head_size=64).run(data)
    assert np.abs(found - unlike).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("smooth", [False, True])
def test_float16_sinks_are_those_of_onnxruntime(smooth: bool) -> None:
    sinks = with_attribute("smooth_softmax", 1) if smooth else with_sinks(ir.DataType.FLOAT16)
    # ONNX Runtime's CPU kernel has no norms inside.
    change = both(without_input(14, 15), sinks)
    model, original, unlike = (load("genai-cuda-fp16") for _ in range(3))
    change(model)
    change(original)
    without_input(14, 15)(unlike)
    plan = convert(model, "raw")
    data = batch(12)

    assert {(layer.dtype, layer.has_sink) for layer in plan.layers} == {("FLOAT16", True)}
    expected = Decoder(session(original), head_size=64).run(data)
    found = Decoder(session(model, library=True)).run(data)
    noise = np.abs(found - expected).max()
    assert noise < 5e-3 * np.abs(expected).max()
    # The negative twin: sinks make a difference.
    plain = Decoder(session(unlike), head_size=64).run(data)
    assert noise < 0.2 * np.abs(found - plain).max()


REFUSALS: Final[dict[str, tuple[Change, str]]] = {
    "sinks of other heads": (
        with_input(11, ir.DataType.FLOAT, [2], "sink"),
        "the sinks (head_sink) are not one for each of 4 heads",
    ),
    "sinks of rank 2": (
        with_input(11, ir.DataType.FLOAT, [4, 1], "sink"),
        "the sinks (head_sink) are not one for each of 4 heads",
    ),
    "key scale": (with_input(12, ir.DataType.FLOAT, [1], "scale"), "quantised already"),
    "value scale": (with_input(13, ir.DataType.FLOAT, [1], "scale"), "quantised already"),
    "quantised by type": (with_attribute("k_quant_type", "PER_TENSOR"), "quantised already"),
    "an input from the future": (with_input(17, ir.DataType.FLOAT, [1], "new"), "18 inputs"),
    "counted queries beside a bias": (
        both(
            with_input(16, ir.DataType.INT32, ["B"], "counts"),
            with_input(10, ir.DataType.FLOAT, [1, 1, "T", "total"], "bias"),
        ),
        "counts new tokens (query_seqlens)",
    ),
    "an attribute from the future": (with_attribute("novelty", 1), "attribute novelty"),
    "ring without a window": (
        with_attribute("sliding_window_cache", 1),
        "without a sliding window",
    ),
    "ring of a fixed size": (
        both(
            *(with_attribute(*pair) for pair in RING.items()),
            with_slots(8),
        ),
        "of 8 rows, and a converted cache holds all tokens",
    ),
    "scores returned": (with_attribute("qk_output", 1), "qk_output"),
    "no past": (without_input(3, 4), "takes no past, though the model takes caches"),
    "half a past": (without_input(3), "past keys or past values, but not both"),
    "no sequence lengths": (without_input(5), "seqlens_k is missing"),
    "one norm of two": (with_input(14, ir.DataType.FLOAT, [64], "norm"), "has only one"),
    "key without value": (without_input(2), "has only one"),
    "rotation without angles": (without_input(7, 8), "cos_cache"),
    "empty window": (with_attribute("local_window_size", 0), "no room for a key"),
    "window without causality": (
        both(with_attribute("local_window_size", 3), with_attribute("causal", 0)),
        "without causality",
    ),
    "heads that do not share": (with_attribute("num_heads", 5), "do not share"),
    "widths that do not fit": (with_attribute("kv_num_heads", 1), "head size"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_layer_and_reason(case: str) -> None:
    change, reason = REFUSALS[case]
    model = load("genai-cpu-fp32")
    change(model)

    recognition = recognise(model)

    assert [miss.layer for miss in recognition.misses] == [0, 1]
    assert reason in str(recognition.misses[0])
    assert recognition.misses[1].node == "/model/layers.1/attn/GroupQueryAttention"


def test_a_ring_becomes_a_cache_of_all_tokens() -> None:
    window, ring = (with_attribute(*pair) for pair in RING.items())
    converted = []
    for change in (window, both(window, ring)):
        model = load("genai-cpu-fp32")
        change(model)
        rings = [site.ring for site in recognise(model).sites]
        plan = convert(model, "raw")
        assert [layer.sliding_window for layer in plan.layers] == [3, 3]
        converted.append((rings, ir.to_proto(model).SerializeToString(deterministic=True)))
    (no_rings, whole), (rings, made) = converted
    assert no_rings == [False, False] and rings == [True, True]
    assert made == whole


def test_refuses_a_cache_that_is_bytes_already() -> None:
    model = load("genai-cpu-fp32")
    for value in (*model.graph.inputs, *model.graph.outputs):
        if "key" in (value.name or "") and value.shape is not None and len(value.shape) == 4:
            value.type = ir.TensorType(ir.DataType.UINT8)

    assert "quantised already" in str(recognise(model).misses[0])


def test_refuses_a_past_that_is_computed() -> None:
    model = load("genai-cpu-fp32")
    node = attentions(model)[1]
    past = node.inputs[3]
    assert past is not None
    changed_past = ir.node("Neg", [past], name="changed")
    changed_past.outputs[0].type, changed_past.outputs[0].shape = past.type, past.shape
    model.graph.insert_before(node, changed_past)
    node.replace_input_with(3, changed_past.outputs[0])

    (miss,) = recognise(model).misses
    assert miss.layer == 1 and "does not continue a graph input" in miss.reason


# A graph for a first prompt takes no caches.


SEQLENS: Final = """new = Shape<start = 1, end = 2>(input_ids)
        last = Sub(new, one)
        last32 = Cast<to = 6>(last)
        batch = Shape<start = 0, end = 1>(input_ids)
        seqlens = Expand(last32, batch)
        new32 = Cast<to = 6>(new)
        total = Squeeze(new32)
        """
OPERATOR: Final = """merged = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
            (q0, k0, v0, "", "", seqlens, total)
        """
RETURNED: Final = """present_key = Transpose<perm = [0, 2, 1, 3]>(k1)
        present_value = Transpose<perm = [0, 2, 1, 3]>(v1)"""
OUTSIDE: Final = SEQLENS + OPERATOR + RETURNED


def returned_from_outside(body: str = OUTSIDE, inputs: str = "") -> ir.Model:
    return decoder(body, inputs=inputs, heads=4)


def test_first_prompt_whose_new_rows_are_returned_from_outside() -> None:
    model = returned_from_outside()
    convert(model, "raw")
    feeds = {"input_ids": batch(7, 2).tokens % 61}

    expected, _, _ = session(returned_from_outside()).run(None, feeds)
    found, key, _ = session(model, library=True).run(None, feeds)
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()
    assert key.shape[:3] == (2, 2, 7)


OUTSIDE_REFUSALS: Final = {
    "rotated after they were cached": (
        OUTSIDE.replace("kv_num_heads = 2", "kv_num_heads = 2, do_rotary = 1").replace(
            "seqlens, total)", "seqlens, total, cos, sin)"
        ),
        "float[256, 8] cos, float[256, 8] sin",
        "before the operator norms or rotates them",
    ),
    "keys for values": (
        OUTSIDE.replace("(q0, k0, v0,", "(k0, q0, v0,"),
        "",
        "not the keys and the values",
    ),
    "a cache that grows outside": (
        SEQLENS
        + """present_key = Concat<axis = 2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v)
        key_bsnd = Transpose<perm = [0, 2, 1, 3]>(present_key)
        value_bsnd = Transpose<perm = [0, 2, 1, 3]>(present_value)
        flat = Constant<value_ints = [0, 0, 32]>()
        keys = Reshape(key_bsnd, flat)
        values = Reshape(value_bsnd, flat)
        """
        + OPERATOR.replace("(q0, k0, v0,", "(q0, keys, values,"),
        CACHES,
        "updated outside of the operator",
    ),
}


@pytest.mark.parametrize("case", OUTSIDE_REFUSALS)
def test_refuses_new_rows_from_outside(case: str) -> None:
    body, inputs, reason = OUTSIDE_REFUSALS[case]

    (miss,) = recognise(returned_from_outside(body, inputs)).misses
    assert reason in miss.reason
