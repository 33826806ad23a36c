"""The target ``paged``: packed requests give the logits that each one has alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from tests.conversion.test_raw import NOISE, load_exact
from tests.covering import exports
from tests.decoders.running import FIXTURES, Batch, Decoder, session
from tq_onnx.conversion.check import check, snapshot_interface
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import Prepared, prepare
from tq_onnx.conversion.planning import DEFAULT_OPTIONS
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.files.load import load
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.ops.operators import PagedEncode
from tq_onnx.plan import Plan
from tq_onnx.targets.causality import window_of_mask
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.pages import PagedDecoder

#: Fixtures that run on a CPU, and their head size.
RUNNING = {
    **dict.fromkeys(
        (
            *("dynamo-op18-eager", "dynamo-op18-sdpa", "dynamo-op20-eager", "dynamo-op20-sdpa"),
            *("genai-cpu-fp32", "genai-cpu-int4"),
        ),
        64,
    ),
    **dict.fromkeys(
        (
            *("dynamo-op23-eager", "dynamo-op23-sdpa", "dynamo-op24-sdpa", "dynamo-llama"),
            *("dynamo-phi3", "dynamo-gemma2", "dynamo-gemma3", "genai09-cpu-fp32"),
            *("genai-dml-fp16", "legacy-op14-eager", "legacy-op17-sdpa", "legacy-op17-sdpa-fp16"),
            *("mobius-default", "optimum"),
        ),
        16,
    ),
    **dict.fromkeys(("dynamo-op18-sdpa-hd128-fp16", "genai-cpu-int4-hd128"), 128),
}

#: Calls, each with the new tokens of some requests: prompts, single tokens and chunks together.
CALLS: Sequence[Mapping[str, int]] = (
    {"a": 18, "b": 3},
    {"a": 1, "c": 20, "b": 1},
    {"b": 13, "c": 1},
    {"c": 1, "b": 1, "a": 1},
)


def untouched(model: ir.Model) -> None:
    pass


def paged(
    name: str,
    preset: str = "raw",
    *,
    damage: Callable[[ir.Model], None] = untouched,
    options: Options = DEFAULT_OPTIONS,
    **sizes: int,
) -> Prepared:
    """A fixture, changed and then converted in memory."""
    path = FIXTURES / f"{name}.onnx"
    loaded = replace(load(path), model=load_exact(name))
    damage(loaded.model)
    return prepare(
        path,
        preset=preset,
        options=options,
        target=target_of("paged", **{"block_size": 16, **sizes}),
        original=recognise_original(loaded, path),
    )


def tokens_of(calls: Sequence[Mapping[str, int]], vocabulary: int = 61) -> dict[str, np.ndarray]:
    """Random tokens for each request, as many as the calls feed in all."""
    rng = np.random.default_rng(5)
    names = dict.fromkeys(name for call in calls for name in call)
    return {
        name: rng.integers(3, vocabulary, sum(call.get(name, 0) for call in calls))
        for name in names
    }


def alone(name: str, calls: Sequence[Mapping[str, int]]) -> list[dict[str, np.ndarray]]:
    """What the original says after each call, of each request by itself."""
    original = session(load_exact(name))
    found: dict[str, list[np.ndarray]] = {}
    for request, ids in tokens_of(calls).items():
        chunks = [call[request] for call in calls if request in call]
        decoder = Decoder(original, head_size=RUNNING[name])
        data = Batch(ids[None], np.ones((1, len(ids)), np.int64))
        found[request] = [decoder.feed(feeds)[0, -1] for feeds in data.feeds(chunks)]
    return [{request: found[request].pop(0) for request in call} for call in calls]


def together(
    prepared: Prepared, calls: Sequence[Mapping[str, int]], *, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """What the paged model says after each call, of all its requests at once."""
    decoder = PagedDecoder(
        session(prepared.loaded.model, library=True), prepared.plan, blocks=12, seed=seed
    )
    left = tokens_of(calls)
    found = []
    for call in calls:
        fed = {name: left[name][:count] for name, count in call.items()}
        left |= {name: left[name][count:] for name, count in call.items()}
        found.append(dict(zip(call, decoder.run(fed), strict=True)))
    return found


@pytest.mark.parametrize("name", exports(RUNNING))
def test_packed_requests_are_as_each_alone(name: str) -> None:
    prepared = paged(name)
    found, wanted = together(prepared, CALLS), alone(name, CALLS)
    noise = NOISE[ir.DataType[prepared.plan.layers[0].dtype]]
    for answer, its in zip(found, wanted, strict=True):
        for request, logits in its.items():
            assert np.abs(answer[request] - logits).max() <= noise * np.abs(logits).max()


def test_a_shuffled_table_gives_the_same_bits() -> None:
    prepared = paged("genai-cpu-fp32", "int4")
    first, second = (together(prepared, CALLS, seed=seed) for seed in (1, 2))
    for one, other in zip(first, second, strict=True):
        for request, logits in one.items():
            np.testing.assert_array_equal(other[request], logits)


@pytest.mark.parametrize("name", ["dynamo-gemma2", "dynamo-gemma3"])
def test_a_window_in_a_mask_becomes_the_attribute(name: str) -> None:
    assert [layer.sliding_window for layer in paged(name).plan.layers] == [6, 0]


def read_other_lengths(model: ir.Model) -> None:
    node = PagedEncode.nodes(model.graph)[0]
    PagedEncode.past_seqlens.replace(node, PagedEncode.cumulative_sequence_length.of(node))


def exchange_inputs(model: ir.Model) -> None:
    first, *others = model.graph.inputs
    model.graph.inputs[:] = [*others, first]


def resize_pages(model: ir.Model) -> None:
    past = next(value for value in model.graph.inputs if value.dtype is ir.DataType.UINT8)
    past.shape = ir.Shape(["num_blocks", 32, *(past.shape or ())[2:]])


def keep_all_logits(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape(["total_tokens", 61])


@pytest.mark.parametrize(
    ("damage", "clause"),
    [
        (untouched, None),
        (read_other_lengths, "does not read the packed requests"),
        (exchange_inputs, "the inputs are not the same in the same order"),
        (resize_pages, "is UINT8 .*32"),
        (keep_all_logits, "output logits is"),
    ],
)
def test_what_is_checked_before_a_file_is_written(
    damage: Callable[[ir.Model], None], clause: str | None
) -> None:
    prepared = paged("genai09-cpu-fp32", "int4")
    model = prepared.loaded.model
    damage(model)
    with nullcontext() if clause is None else pytest.raises(TqOnnxError, match=clause):
        check(
            snapshot_interface(load_exact("genai09-cpu-fp32")),
            model,
            prepared.plan,
            target_of("paged", block_size=16),
        )


def test_the_head_sees_the_wanted_tokens_only() -> None:
    model = paged("genai-cpu-fp32").loaded.model
    (gather,) = (node for node in model.graph if "chosen_tokens" in (node.name or ""))
    (reader,) = gather.outputs[0].consumers()
    assert reader.op_type == "MatMul"
    assert [dim if isinstance(dim, int) else dim.value for dim in model.graph.outputs[0].shape] == [
        "num_logits",
        97,
    ]


def test_rows_of_all_caches_have_one_width() -> None:
    plan = paged("dynamo-op18-sdpa", "k8v4").plan
    widths = {layer.key.row_bytes for layer in plan.layers}
    widths |= {layer.value.row_bytes for layer in plan.layers}
    assert len(widths) == 1
    assert not plan.interface.attention_mask
    assert not plan.interface.position_ids


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf-prefill", "a graph for a first prompt"),
        ("hf-static-decode", "a fixed size"),
        ("mobius-static", "a fixed size"),
        ("legacy-one-token", "does not have rows for each token"),
        ("dynamo-qwen3-moe", "not known to leave the tokens apart"),
        ("genai-cpu-fp16", "not shown to be causal"),
    ],
)
def test_fixtures_that_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        paged(name)


def test_options_that_are_refused() -> None:
    with pytest.raises(UsageError, match="not a multiple of 16"):
        paged("genai-cpu-fp32", block_size=40)
    with pytest.raises(UsageError, match="more than the 16 tokens of a page"):
        paged("genai-cpu-fp32", "int4", options=Options(sink_tokens=20))


@pytest.mark.parametrize(
    ("options", "kept"), [({}, 4), ({"sink_tokens": 7}, 7), ({"residual_length": 2}, 4)]
)
def test_a_full_page_has_room_for_exact_tokens(options: dict[str, int], kept: int) -> None:
    plan = paged("genai-cpu-fp32", "int4", block_size=64, options=Options(**options)).plan
    pages = plan.page_window
    assert pages is not None
    room = pages.page_bytes - pages.slots * pages.row_stride
    assert kept <= room // pages.entry_bytes <= kept + 1
    assert Plan.from_json(plan.to_json()) == plan


def embedded(model: ir.Model) -> ir.Value:
    """The embeddings of the tokens."""
    (tokens,) = (value for value in model.graph.inputs if value.name == "input_ids")
    return next(node for node in tokens.consumers() if node.op_type == "Gather").outputs[0]


def insert(
    model: ir.Model,
    op_type: str,
    *more: ir.Value,
    beside: Sequence[ir.Node] = (),
    **attributes: int,
) -> ir.Value:
    """Put a node behind the embeddings, which the nodes beside it go on reading."""
    value = embedded(model)
    maker = value.producer()
    assert maker is not None
    uses = [use for use in value.uses() if use.node not in beside]
    node = ir.node(op_type, [value, *more], attributes, name=f"inserted_{op_type}")
    node.outputs[0].name, node.outputs[0].dtype = "inserted", value.dtype
    model.graph.insert_after(maker, node)
    for use in uses:
        use.node.replace_input_with(use.idx, node.outputs[0])
    return node.outputs[0]


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    name = f"inserted_constant_{len(model.graph.initializers)}"
    value = ir.Value(name=name, const_value=ir.tensor(array))
    value.dtype, value.shape = ir.tensor(array).dtype, ir.Shape(array.shape)
    model.graph.register_initializer(value)
    return value


def sum_tokens(model: ir.Model) -> None:
    insert(model, "CumSum", constant(model, np.array(1, np.int64)))


def weigh_tokens(model: ir.Model) -> None:
    insert(model, "Softmax", axis=1)


def divide_by_count(model: ir.Model) -> None:
    mixed = insert(model, "Mul")
    node = mixed.producer()
    assert node is not None
    shape = ir.node("Shape", [node.inputs[0]], {"start": 1, "end": 2}, name="count_of_tokens")
    cast = ir.node("Cast", [shape.outputs[0]], {"to": 1}, name="count_as_float")
    shape.outputs[0].name, cast.outputs[0].name = "count", "float_count"
    model.graph.insert_before(node, [shape, cast])
    node.resize_inputs(2)
    node.replace_input_with(1, cast.outputs[0])


def normalise_along_tokens(model: ir.Model) -> None:
    insert(model, "LpNormalization", axis=1, p=2)


def reverse_tokens(model: ir.Model) -> None:
    last, far, axis = (np.array([number], np.int64) for number in (-1, -(1 << 62), 1))
    insert(model, "Slice", *(constant(model, one) for one in (last, far, axis, last)))


def mix_by_products(model: ir.Model) -> None:
    """Every token becomes a sum of all tokens."""
    value = embedded(model)
    turned = ir.node("Transpose", [value], {"perm": [0, 2, 1]}, name="turned")
    products = ir.node("MatMul", [value, turned.outputs[0]], name="products")
    turned.outputs[0].name, products.outputs[0].name = "turned", "products"
    mixed = insert(model, "MatMul", beside=[turned, products])
    node = mixed.producer()
    assert node is not None
    model.graph.insert_before(node, [turned, products])
    node.resize_inputs(2)
    node.replace_input_with(0, products.outputs[0])
    node.replace_input_with(1, value)


def scale_by_length(model: ir.Model) -> None:
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    summed = ir.node("ReduceSum", [mask], {"keepdims": 0}, name="length")
    cast = ir.node("Cast", [summed.outputs[0]], {"to": 1}, name="length_as_float")
    summed.outputs[0].name, cast.outputs[0].name = "length", "float_length"
    model.graph.insert_before(next(iter(model.graph)), [summed, cast])
    insert(model, "Mul", cast.outputs[0])


def number_tokens(model: ir.Model) -> None:
    """Adds the place in the call, counted from a list of ones."""
    value = embedded(model)
    shape = ir.node("Shape", [value], {"start": 1, "end": 2}, name="count_of_tokens")
    ones = ir.tensor(np.ones(1, np.float32))
    filled = ir.node("ConstantOfShape", [shape.outputs[0]], {"value": ones}, name="ones")
    zero = constant(model, np.array(0, np.int64))
    places = ir.node("CumSum", [filled.outputs[0], zero], name="places")
    axis = ir.Value(name="axis", const_value=ir.tensor(np.array([1], np.int64)))
    axis.dtype, axis.shape = ir.DataType.INT64, ir.Shape([1])
    model.graph.register_initializer(axis)
    column = ir.node("Unsqueeze", [places.outputs[0], axis], name="column")
    nodes = [shape, filled, places, column]
    for node in nodes:
        node.outputs[0].name = f"{node.name}_made"
    maker = value.producer()
    assert maker is not None
    insert(model, "Add", column.outputs[0], beside=nodes)
    model.graph.insert_after(maker, nodes)


def return_more(model: ir.Model) -> None:
    value = embedded(model)
    value.shape = ir.Shape(["batch_size", "sequence_length", 16])
    model.graph.outputs.append(value)


def multiply_by_itself(model: ir.Model) -> None:
    """Multiplies a matrix of each token by another one of it."""
    value = embedded(model)
    square, row = (constant(model, np.array(size)) for size in ([0, 0, 4, -1], [0, 0, -1]))
    matrix = ir.node("Reshape", [value, square], name="matrix")
    turned = ir.node("Transpose", [matrix.outputs[0]], {"perm": [0, 1, 3, 2]}, name="turned")
    gram = ir.node("MatMul", [matrix.outputs[0], turned.outputs[0]], name="gram")
    product = ir.node("MatMul", [gram.outputs[0], matrix.outputs[0]], name="product")
    nodes = [matrix, turned, gram, product]
    for node in nodes:
        node.outputs[0].name = f"{node.name}_made"
    maker = value.producer()
    assert maker is not None
    flat = insert(model, "Reshape", row, beside=nodes)
    model.graph.insert_after(maker, nodes)
    reshape = flat.producer()
    assert reshape is not None
    reshape.replace_input_with(0, product.outputs[0])


def append_nothing(model: ir.Model) -> None:
    """Joins a slice without numbers, as Phi-3 does with what a whole rotary embedding leaves."""
    value = embedded(model)
    far, end, axis = (np.array([number], np.int64) for number in (1 << 20, 1 << 62, -1))
    none = ir.node("Slice", [value, *(constant(model, one) for one in (far, end, axis))])
    none.outputs[0].name, none.outputs[0].dtype = "none", value.dtype
    joined = insert(model, "Concat", none.outputs[0], beside=[none], axis=-1).producer()
    assert joined is not None
    model.graph.insert_before(joined, none)


def pass_an_input_on(model: ir.Model) -> None:
    """Returns an input, as transformers' exporter does with sizes of sliding windows."""
    size = ir.Value(name="size", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    node = ir.node("Identity", [size], name="size_as_it_was")
    node.outputs[0].name, node.outputs[0].type = "output.size", size.type
    node.outputs[0].shape = size.shape
    model.graph.inputs.append(size)
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])


def test_products_of_a_token_with_itself_convert() -> None:
    kinds = [
        node.op_type
        for node in paged("genai09-cpu-fp32", damage=multiply_by_itself).loaded.model.graph
    ]
    plain = [node.op_type for node in paged("genai09-cpu-fp32").loaded.model.graph]
    assert kinds.count("MatMul") == plain.count("MatMul") + 2


def test_a_slice_without_elements_converts() -> None:
    paged("genai09-cpu-fp32", damage=append_nothing)


def test_an_input_that_is_only_returned_is_left_out() -> None:
    model, plain = (
        paged("genai09-cpu-fp32", damage=damage).loaded.model
        for damage in (pass_an_input_on, untouched)
    )
    for side, plain_side in zip(
        (model.graph.inputs, model.graph.outputs),
        (plain.graph.inputs, plain.graph.outputs),
        strict=True,
    ):
        assert [value.name for value in side] == [value.name for value in plain_side]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (reverse_tokens, "Slice"),
        (mix_by_products, "does not have rows for each token|MatMul"),
        (scale_by_length, "something else of attention_mask"),
        (number_tokens, "numbers the tokens of a call"),
        (return_more, "besides logits, caches and states"),
        (sum_tokens, "CumSum"),
        (weigh_tokens, "Softmax"),
        (normalise_along_tokens, "LpNormalization"),
        (divide_by_count, "computes with the number of tokens"),
    ],
)
def test_what_mixes_tokens_is_refused(damage: Callable[[ir.Model], None], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        paged("genai09-cpu-fp32", damage=damage)


def window_with(table: np.ndarray) -> int | None:
    """The window of a mask that a part of a table ``[1, 1, 1, n]`` is added to, as in MPT."""
    prepared = prepare(FIXTURES / "dynamo-gemma2.onnx", preset="raw")
    model, plan = prepared.loaded.model, prepared.plan
    attention = converted_layers(model, plan)[0].attention
    bias = attention.bias
    assert bias is not None
    zero, axis = (constant(model, np.array([number])) for number in (0, 3))
    size = ir.node("Shape", [bias], {"start": 3, "end": 4}, name="keys")
    part = ir.node("Slice", [constant(model, table), zero, size.outputs[0], axis], name="part")
    node = ir.node("Add", [bias, part.outputs[0]], name="with_part")
    for made in (size, part, node):
        made.outputs[0].name = f"{made.name}_made"
    model.graph.insert_before(attention.node, [size, part, node])
    attention.bias = node.outputs[0]
    return window_of_mask(attention, plan, model)


def test_a_mask_is_probed_as_far_as_its_table_goes() -> None:
    assert window_with(np.zeros((1, 1, 1, 300), np.float32)) == 6


def test_a_table_that_hides_more_is_noticed() -> None:
    table = np.zeros((1, 1, 1, 300), np.float32)
    table[..., 299] = -1e9
    assert window_with(table) is None


def test_a_bias_of_distances_is_named() -> None:
    with pytest.raises(NoMatch, match="as ALiBi does"):
        window_with(np.arange(300, dtype=np.float32).reshape(1, 1, 1, 300))
