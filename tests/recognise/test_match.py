"""Recognition: independent of names and of order, complete or refused, and cheap."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.external_data
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.covering import exports
from tests.decoders.running import FIXTURES, GROWING, convert, load
from tests.decoders.synthetic import SELECTING, decoder
from tq_onnx.errors import AlreadyConvertedError
from tq_onnx.graph.constants import integers
from tq_onnx.graph.liveness import data_ancestors
from tq_onnx.recognise.match import Recognition, recognise

ALL = sorted(path.stem for path in FIXTURES.glob("*.onnx"))
"""Every dialect: what is tested with them holds for any export."""


FORMS = ("genai-cuda-fp16", "hf-ortcuda-decode", "dynamo-gemma2", "mobius-static")
"""One export of each dialect."""


@pytest.mark.parametrize("name", FORMS)
def test_the_graph_keeps_its_nodes_and_weights(name: str) -> None:
    model = load(name)
    nodes, weights = {*model.graph}, {*model.graph.initializers.values()}
    assert not recognise(model).misses
    assert ({*model.graph}, {*model.graph.initializers.values()}) == (nodes, weights)


def test_an_export_with_pages_is_told_to_be_made_without() -> None:
    model = load("genai-cuda-fp16")
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            node.op_type = "PagedAttention"
    (miss,) = recognise(model).misses
    assert miss.reason.endswith("with pages: export it without use_paged_attention")


def facts(recognition: Recognition) -> list[tuple[object, ...]]:
    """All that does not depend on names."""
    return [
        (
            site.layer,
            site.dialect,
            site.num_heads,
            site.kv_num_heads,
            site.head_size,
            site.dtype,
            site.scale,
            site.causal,
            site.sliding_window,
            site.softcap,
            site.has_bias,
        )
        for site in recognition.sites
    ] + [(recognition.fixed_capacity, len(recognition.reads), len(recognition.misses))]


def positions(model: ir.Model, recognition: Recognition) -> list[int | None]:
    """Where the roles and caches stand among inputs and outputs."""
    roles = recognition.interface
    assert roles is not None
    inputs = [value.name for value in model.graph.inputs]
    outputs = [value.name for value in model.graph.outputs]
    named = [roles.tokens, roles.attention_mask, roles.position_ids]
    places: list[int | None] = [None if name is None else inputs.index(name) for name in named]
    places.append(outputs.index(roles.logits))
    for site in recognition.sites:
        for cache in (site.key, site.value):
            past = cache.past
            places.append(None if past is None else inputs.index(past.name))
            places.append(outputs.index(cache.present.name))
    return places


def rename(model: ir.Model, seed: int) -> None:
    """Gives every value and every node another name."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    numbers = list(range(len(values)))
    random.Random(seed).shuffle(numbers)
    for value, number in zip(values, numbers, strict=True):
        if value.name != "":
            value.name = f"v{number}"
    for number, node in enumerate(graph):
        node.name = f"n{number}"


def shuffle(model: ir.Model, seed: int) -> None:
    """Puts the nodes into another valid order."""
    graph = model.graph
    rng = random.Random(seed)
    nodes = list(graph)
    waiting = {
        node: {value.producer() for value in node.inputs if value is not None} - {None}
        for node in nodes
    }
    order: list[ir.Node] = []
    done: set[ir.Node] = set()
    while waiting:
        ready = [node for node, needs in waiting.items() if needs <= done]
        node = rng.choice(ready)
        del waiting[node]
        done.add(node)
        order.append(node)
    graph.remove(nodes)
    graph.extend(order)


@pytest.mark.parametrize("name", exports(ALL))
@settings(max_examples=2, suppress_health_check=[HealthCheck.differing_executors])
@given(seed=st.integers(0, 2**32))
def test_names_and_order_of_nodes_do_not_matter(name: str, seed: int) -> None:
    model = load(name)
    expected = recognise(model)
    wanted, places = facts(expected), positions(model, expected)

    rename(model, seed)
    shuffle(model, seed)
    found = recognise(model)

    assert facts(found) == wanted
    assert positions(model, found) == places


@pytest.mark.parametrize("name", exports(GROWING))
def test_a_renamed_and_shuffled_model_converts(name: str) -> None:
    model = load(name)
    rename(model, 1)
    shuffle(model, 1)

    plan = convert(model)

    assert [layer.layer for layer in plan.layers] == [0, 1]
    assert plan.fixed_capacity


@pytest.mark.parametrize("name", exports(GROWING))
def test_interface(name: str) -> None:
    model = load(name)
    given = {value.name for value in model.graph.inputs}
    roles = recognise(model).interface
    assert roles is not None
    assert (roles.tokens, roles.logits) == ("input_ids", "logits")
    assert roles.attention_mask == ("attention_mask" if "attention_mask" in given else None)
    assert roles.position_ids == ("position_ids" if "position_ids" in given else None)


def test_many_layers_in_graph_order() -> None:
    recognition = recognise(decoder(layers=36))

    assert not recognition.misses
    assert [site.key.past.name for site in recognition.sites] == [
        f"past_key_values.{layer}.key" for layer in range(36)
    ]


def test_a_mask_without_a_length_of_its_own_leaves_growing_caches() -> None:
    model = decoder()
    model.graph.inputs[1].shape = ir.Shape(["B", None])

    recognition = recognise(model)

    assert not recognition.misses
    assert recognition.lengths is None
    assert not recognition.fixed_capacity


def test_the_mask_must_reach_every_layer() -> None:
    model = decoder(mask=SELECTING)
    constant = ir.node("Equal", [model.graph.inputs[0]] * 2)
    other = ir.node("Unsqueeze", [constant.outputs[0], model.graph.initializers["middle"]])
    other.outputs[0].type, other.outputs[0].shape = (
        ir.TensorType(ir.DataType.BOOL),
        ir.Shape(["B", 1, 1, "T"]),
    )
    where = [node for node in model.graph if node.op_type == "Where"][-1]
    model.graph.insert_before(where, [constant, other])
    where.replace_input_with(0, other.outputs[0])

    assert recognise(model).lengths is None


def test_weights_outside_are_never_read(tmp_path: Path) -> None:
    for name in ("genai-cpu-fp32", "dynamo-op18-sdpa"):
        path = tmp_path / f"{name}.onnx"
        ir.save(load(name), path, external_data=f"{name}.data", size_threshold_bytes=100)
        model = ir.load(path)
        (tmp_path / f"{name}.data").unlink()

        convert(model)

        kept = [
            value.const_value
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        ]
        assert len(kept) > 10


def test_a_dead_reader_is_none() -> None:
    model = decoder(extra="spy = ReduceSum<keepdims = 0>(present_key_1)")

    assert not recognise(model).misses
    convert(model)
    assert all(node.op_type != "ReduceSum" for node in model.graph)


def test_returned_attention_weights_are_a_reason_to_refuse() -> None:
    model = decoder()
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    model.graph.outputs.append(softmax.outputs[0])

    assert recognise(model).misses


def test_an_odd_cache_is_a_reason_to_refuse() -> None:
    model = load("dynamo-op18-sdpa")
    model.graph.outputs.pop()

    assert any("partner" in str(miss) for miss in recognise(model).misses)


def test_refuses_another_form_by_the_node_that_makes_the_cache() -> None:
    model = decoder()
    for output in list(model.graph.outputs):
        if (output.name or "").startswith("present.1"):
            concat = output.producer()
            assert concat is not None
            node = ir.node("Attention", concat.inputs, domain="other", outputs=[ir.Value()])
            node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
            node.outputs[0].name = f"{output.name}.other"
            model.graph.insert_before(concat, node)
            index = list(model.graph.outputs).index(output)
            model.graph.outputs[index] = node.outputs[0]

    (miss,) = recognise(model).misses

    assert miss.layer == 1
    assert "is made by Attention" in miss.reason


def test_caches_that_became_constants_are_a_reason_to_refuse_unless_they_are_empty() -> None:
    model = without_caches(decoder(), inputs=True, outputs=False, length=3)
    misses = recognise(model).misses
    assert [miss.layer for miss in misses] == [0, 1]
    assert all("has become a constant" in miss.reason for miss in misses)

    # As transformers begins a cache: a graph for first prompts.
    recognition = recognise(without_caches(decoder(), inputs=True, outputs=False))
    assert recognition.misses == ()
    assert [site.key.past for site in recognition.sites] == [None, None]


def test_axes_that_were_not_folded_are_constants() -> None:
    model = load("legacy-op17-sdpa")
    changed = 0
    for node in [node for node in model.graph if node.op_type == "Slice"]:
        axes = None if len(node.inputs) < 4 else integers(node.inputs[3])
        if axes is None or len(axes) != 1:
            continue
        scalar = constant(model, np.array(axes[0], np.int64), node.outputs[0])
        first = constant(model, np.array([0], np.int64), node.outputs[0], "first")
        spread = ir.node("Unsqueeze", [scalar, first])
        model.graph.insert_before(node, spread)
        node.replace_input_with(3, spread.outputs[0])
        changed += 1

    assert changed
    assert recognise(model).misses == ()


def constant(model: ir.Model, array: np.ndarray, owner: ir.Value, role: str = "given") -> ir.Value:
    tensor = ir.tensor(array, name=f"{owner.name}/{role}")
    value = ir.Value(
        name=tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    model.graph.register_initializer(value)
    return value


@pytest.mark.parametrize("name", ["genai-cpu-fp32", "dynamo-op18-sdpa"])
def test_a_layer_whose_caches_nobody_sees_is_a_reason_to_refuse(name: str) -> None:
    model = load(name)
    for output in list(model.graph.outputs):
        if (output.name or "").startswith("present.1"):
            model.graph.outputs.remove(output)

    recognition = recognise(model)

    assert len(recognition.sites) == 1
    assert "has no cache that was recognised" in recognition.misses[0].reason


def test_refuses_an_old_opset() -> None:
    model = decoder()
    model.graph.opset_imports[""] = 12

    assert "opset 12 is too old" in str(recognise(model).misses[0])


def test_refuses_a_converted_model_by_its_nodes_and_by_its_metadata() -> None:
    model = load("genai-cpu-fp32")
    convert(model)
    with pytest.raises(AlreadyConvertedError, match="already"):
        recognise(model)
    model.metadata_props.clear()
    with pytest.raises(AlreadyConvertedError, match="already"):
        recognise(model)

    other = load("genai-cpu-fp32")
    other.metadata_props["tq_onnx.plan"] = "{}"
    with pytest.raises(AlreadyConvertedError, match="already"):
        recognise(other)


def without_caches(model: ir.Model, *, inputs: bool, outputs: bool, length: int = 0) -> ir.Model:
    """Takes caches away; a past becomes a constant."""
    graph = model.graph
    for value in list(graph.inputs):
        if inputs and (value.name or "").startswith("past"):
            graph.inputs.remove(value)
            empty = np.zeros((1, 2, length, 16), np.float32)
            value.const_value = ir.tensor(empty, name=value.name)
            value.shape = ir.Shape(empty.shape)
            graph.register_initializer(value)
    for value in list(graph.outputs):
        if outputs and (value.name or "").startswith("present"):
            graph.outputs.remove(value)
    return model


def stacked(model: ir.Model) -> ir.Model:
    """Takes keys and values in one input, as old exports of GPT-2 do."""
    shape, dtype = ir.Shape([2, "B", 2, "P", 16]), ir.TensorType(ir.DataType.FLOAT)
    model.graph.inputs.append(ir.Value(name="past_0", type=dtype, shape=shape))
    return model


UNCAUSAL = """t0 = Where(kept, nothing, lowest)
        s2 = Add(s1, t0)"""


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            without_caches(decoder(), inputs=True, outputs=True),
            "if it is a decoder, export it with past",
        ),
        (without_caches(decoder(mask=UNCAUSAL), inputs=True, outputs=True), "an encoder"),
        (without_caches(decoder(), inputs=False, outputs=True), "returns no caches"),
        (stacked(without_caches(decoder(), inputs=True, outputs=True)), "of rank 5 (past_0, ...)"),
    ],
)
def test_a_model_without_caches_is_told_why(model: ir.Model, reason: str) -> None:
    recognition = recognise(model)

    assert recognition.sites == ()
    (miss,) = recognition.misses
    assert miss.layer is None
    assert reason in miss.reason


def test_a_model_without_attention_is_told_so() -> None:
    value = ir.Value(
        name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["B", 3, 8, 8])
    )
    node = ir.node("Relu", [value])
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    graph = ir.Graph([value], [node.outputs[0]], nodes=[node], opset_imports={"": 18})

    recognition = recognise(ir.Model(graph, ir_version=10))

    assert not recognition.sites
    assert recognition.misses


def damage(model: ir.Model, rng: random.Random) -> None:
    """Breaks one thing somewhere."""
    graph = model.graph
    node = rng.choice(list(graph))
    kind = rng.randrange(5)
    if kind == 0:
        node.op_type = rng.choice(["Relu", "Concat", "MatMul", "Softmax", "Reshape", "Shape"])
    elif kind == 1 and node.inputs:
        node.replace_input_with(rng.randrange(len(node.inputs)), None)
    elif kind == 2:
        node.attributes.clear()
    elif kind == 3:
        for output in node.outputs:
            output.shape = output.type = None
    else:
        port = rng.choice([*graph.inputs, *graph.outputs])
        port.shape = rng.choice([None, ir.Shape([1, 2, 3]), ir.Shape([None] * 4)])


@settings(max_examples=60)
@given(name=st.sampled_from(ALL), seed=st.integers(0, 2**32))
@example(name="genai-cpu-fp32", seed=294)
@example(name="dynamo-op18-sdpa-hd128-fp16", seed=2879997)
@example(name="hf-ortcpu-prefill", seed=1870)
@example(name="dynamo-op18-sdpa", seed=1000460)
@example(name="dynamo-gemma3", seed=1427)
@example(name="hf-prefill", seed=180)
@example(name="hf-static-decode", seed=2842252)
@example(name="hf-ortcuda-decode", seed=585177)
def test_a_damaged_graph_is_recognised_or_refused_but_never_crashes(name: str, seed: int) -> None:
    model = load(name)
    for _ in range(3):
        damage(model, random.Random(seed))

    recognition = recognise(model)

    assert all(miss.reason for miss in recognition.misses)
    if not recognition.misses:
        # A layer that reads nothing of the tokens any more may stay as it is.
        assert recognition.sites
        found = {cache.present for site in recognition.sites for cache in (site.key, site.value)}
        left = [value for value in model.graph.outputs[1:] if value not in found]
        assert "input_ids" not in {value.name for value in data_ancestors(left)}


def test_a_graph_that_reads_what_is_not_made_yet_is_refused_and_never_followed() -> None:
    count = len(list(decoder().graph))
    for index in range(count):
        model = decoder()
        node = list(model.graph)[index]
        if not node.inputs:
            continue
        node.replace_input_with(0, node.outputs[0])

        recognition = recognise(model)

        assert recognition.sites == ()
        assert "which depends on it" in recognition.misses[0].reason
