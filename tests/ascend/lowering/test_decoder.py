"""Whole decoders for CANN: the same numbers, no masks, nothing that the provider would not run."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

from tests.covering import exports
from tests.decoders.running import (
    CHUNKS,
    EXACT,
    Batch,
    Decoder,
    agree,
    batch,
    batches,
    convert,
    load,
    lower,
    session,
)
from tq_onnx.ascend.lowering import claims as provider
from tq_onnx.ascend.lowering.decoder import lowering_of
from tq_onnx.ascend.lowering.mask import NOT_ON_THE_LEFT, PADDING
from tq_onnx.ascend.targets import CANN
from tq_onnx.conversion.check import complaint
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import ATTENTION, DECODER, DOMAIN, ENCODE
from tq_onnx.ops.operators import Attention, RotaryEmbedding
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.targets.causality import LENGTHS, hides_the_future

SINGLE = [
    *("dynamo-op18-eager", "dynamo-op18-sdpa", "dynamo-op20-sdpa", "dynamo-op23-eager"),
    *("dynamo-op23-sdpa", "dynamo-op24-sdpa", "genai-cpu-fp32", "genai09-cpu-fp32"),
    *("legacy-op14-eager", "legacy-op17-sdpa", "mobius-default", "optimum"),
    *("dynamo-gemma2", "dynamo-gemma3"),
]
HALF = [
    *("dynamo-op18-sdpa-hd128-fp16", "genai-cuda-fp16", "genai-dml-fp16", "genai-webgpu-fp16"),
    "legacy-op17-sdpa-fp16",
]
"""In half precision caches are not quantised here: its noise would change codes."""
HALF_NOISE = 4e-3
WITHOUT_PADDING = ("genai-cpu-fp32", "genai09-cpu-fp32", *HALF[1:4])
"""What counts tokens by the mask has none on the left."""
POSITIONS = 64

pytestmark = pytest.mark.usefixtures("exact_products")


def preset_of(name: str) -> str:
    return "raw" if name in HALF else "int4"


@cache
def converted(name: str) -> ir.Model:
    """Made once; not to be changed."""
    model = load(name)
    convert(model, preset_of(name))
    return model


@cache
def lowered(name: str) -> tuple[ir.Model, Plan]:
    """Made once; not to be changed."""
    model = load(name)
    plan = convert(model, preset_of(name))
    return model, lower(model, lowering_of(plan, POSITIONS))


@pytest.mark.parametrize("name", exports([*SINGLE, *HALF]))
def test_computes_the_same(name: str) -> None:
    noise = HALF_NOISE if name in HALF else EXACT
    model, _ = lowered(name)
    size = 2
    expected = Decoder.runner(session(converted(name), library=True), size)
    opened = session(model, library=True)
    found = Decoder.runner(opened, size)
    assert agree(expected, found, batches(sum(CHUNKS), size), noise)
    # Slots that hold no token yet change nothing.
    roomy = Decoder.runner(opened, size, capacity=sum(CHUNKS) + 5)
    assert agree(expected, roomy, batches(sum(CHUNKS), size), noise)


@pytest.mark.parametrize("name", [*SINGLE, *HALF])
def test_leaves_nothing_to_the_cpu(name: str) -> None:
    model, plan = lowered(name)

    assert list(provider.left_over(model)) == []
    assert complaint(model) == ""
    own = {node.op_type for node in model.graph if node.domain == DOMAIN}
    assert own == {ENCODE, ATTENTION, *DECODER}
    assert plan.target == "cann"
    assert plan.fixed_capacity
    assert plan.interface.padding == (name not in WITHOUT_PADDING)
    assert Plan.from_json(model.metadata_props[METADATA_PLAN]) == plan
    for node in Attention.nodes(model.graph):
        assert node.attributes.get_int("causal") == 1
        assert Attention.attention_bias.of(node) is None
        assert (Attention.left_padding.of(node) is not None) == plan.interface.padding


def padded(*lengths: int) -> Batch:
    """Sequences with as much padding on the left."""
    made = batch(sum(CHUNKS), len(lengths))
    for row, length in enumerate(lengths):
        made.mask[row, :length] = 0
    return made


@pytest.mark.parametrize("name", exports(name for name in SINGLE if name not in WITHOUT_PADDING))
def test_padding_on_the_left(name: str) -> None:
    """In one call, and where calls begin with padding; of the tokens, the same logits."""
    models = converted(name), lowered(name)[0]
    data = padded(2, 0, CHUNKS[0] + 1)
    for chunks in (CHUNKS, (sum(CHUNKS),)):
        expected, found = (
            Decoder(session(model, library=True), 3, capacity=capacity).run(data, chunks)
            for model, capacity in zip(models, (0, sum(CHUNKS) + 5), strict=True)
        )
        of_tokens = data.mask.astype(bool)
        assert np.abs(found - expected)[of_tokens].max() <= EXACT


@pytest.mark.parametrize("library", [False, True], ids=["bodies", "library"])
def test_padding_elsewhere_is_no_text(library: bool) -> None:
    data = padded(0, 1)
    data.mask[0, 2] = 0
    decoder = Decoder(session(lowered("dynamo-op18-sdpa")[0], library=library), 2)
    with pytest.raises(Exception, match=NOT_ON_THE_LEFT):
        decoder.run(data, (sum(CHUNKS),))


@pytest.mark.parametrize("library", [False, True], ids=["bodies", "library"])
def test_padding_is_no_text_where_it_is_not_shown(library: bool) -> None:
    """The builder's graphs count tokens by the mask."""
    decoder = Decoder(session(lowered("genai-cpu-fp32")[0], library=library), 2)
    with pytest.raises(Exception, match=PADDING):
        decoder.run(padded(0, 1), (sum(CHUNKS),))


def test_windows_softcaps_and_sinks_of_operators_stay() -> None:
    def bounded() -> ir.Model:
        model = load("genai-cpu-fp32")
        for node in model.graph:
            if node.op_type != "GroupQueryAttention":
                continue
            heads = node.attributes.get_int("num_heads")
            assert heads is not None
            sinks = Builder(model.graph).constant("sinks", np.linspace(-1, 2, heads, dtype="f4"))
            node.resize_inputs(12)
            node.replace_input_with(11, sinks)
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 3)
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 20.0)
        return model

    one, other = bounded(), bounded()
    convert(one)
    plan = lower(other, lowering_of(convert(other), POSITIONS))
    assert {(layer.sliding_window, layer.softcap) for layer in plan.layers} == {(3, 20.0)}
    assert all(layer.has_sink for layer in plan.layers)
    CANN.capabilities.expect(CANN.name, plan)
    runners = [Decoder.runner(session(model), 2) for model in (one, other)]
    assert agree(*runners, batches(sum(CHUNKS), 2), EXACT)


@pytest.mark.parametrize("name", ["dynamo-gemma2", "dynamo-gemma3"])
def test_a_window_in_a_mask_becomes_the_attribute(name: str) -> None:
    _, plan = lowered(name)
    assert [layer.sliding_window for layer in plan.layers] == [6, 0]


def test_takes_lengths_from_positions_where_there_is_no_mask() -> None:
    model = load("hf-decode")
    plan = lower(model, lowering_of(convert(model), POSITIONS))

    assert list(provider.left_over(model)) == []
    assert plan.fixed_capacity


def test_refuses_what_has_no_kernel_by_name() -> None:
    model = load("genai-cpu-int4")
    with pytest.raises(UnsupportedModelError, match="MatMulNBits"):
        lower(model, lowering_of(convert(model), POSITIONS))


def test_tables_have_as_many_positions_as_asked() -> None:
    model, _ = lowered("dynamo-op18-sdpa")
    tables = {
        value.shape.numpy()
        for node in model.graph
        if RotaryEmbedding.is_node(node)
        for value in (RotaryEmbedding.cos_cache.of(node), RotaryEmbedding.sin_cache.of(node))
        if value is not None and value.shape is not None
    }
    assert tables == {(POSITIONS, 32)}


def test_a_mask_with_a_window_is_no_causal_mask() -> None:
    """Windows of other models are longer than what is tried in full, and shorter than the last."""
    _, tokens, past = LENGTHS[-1]
    bias = np.zeros((1, 1, tokens, past + tokens), np.float32)
    assert hides_the_future(bias, LENGTHS[-1], already_causal=False)
    bias[..., 0] = -np.inf
    assert not hides_the_future(bias, LENGTHS[-1], already_causal=False)
