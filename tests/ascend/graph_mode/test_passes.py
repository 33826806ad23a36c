"""Converted models as static standard ONNX: the same numbers as before, in any runtime."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.conversion.test_scales import statistics
from tq_onnx.ascend.graph_mode import claims as provider
from tq_onnx.ascend.graph_mode import standard
from tq_onnx.ascend.graph_mode.passes import lowering_of
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.files.load import load
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.plan import METADATA_PLAN, Plan, plan_in
from tq_onnx.runtime.session import make_session

CAPACITY = 16
Array = npt.NDArray[np.generic]


PLAIN = Options(gains=False, residual_length=0, sink_tokens=0)
FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPORTED = FIXTURES / "dynamo-op18-sdpa.onnx"
"""Of two layers: the time of a lowering grows with them."""
WORDS = 97


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "converted.onnx"
    convert(EXPORTED, output, options=PLAIN)
    return output


def lower(model: ir.Model, capacity: int = CAPACITY, **sizes: int) -> Plan:
    """Rewrites a conversion in place."""
    plan = plan_in(model.metadata_props)
    assert plan is not None
    lowering = lowering_of(plan, capacity=capacity, **sizes)
    for step in lowering.passes:
        step(model)
    return lowering.plan


@cache
def lowered(converted: Path, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """Made once; not to be changed."""
    model = load(converted).model
    lower(model, tokens=tokens, batch=batch)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


@cache
def of_bodies(converted: Path) -> ort.InferenceSession:
    """The function bodies, whose numbers must come out to the bit."""
    return make_session(converted, library=False)


@cache
def of_graph(converted: Path, tokens: int, batch: int) -> ort.InferenceSession:
    return on_cpu(lowered(converted, tokens=tokens, batch=batch))


def on_cpu(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


class Both:
    """A converted model with growing caches beside its graphs with caches of fixed capacity."""

    def __init__(self, converted: Path, batch: int, calls: set[int], error: float = 0.0) -> None:
        self.error = error
        self.theirs = of_bodies(converted)
        self.graphs = {tokens: of_graph(converted, tokens, batch) for tokens in calls}
        rng = np.random.default_rng(0)
        self.growing: dict[str, Array] = {}
        self.fixed: dict[str, Array] = {}
        for entry in self.theirs.get_inputs():
            if entry.name.startswith("past"):
                _, heads, _, width = entry.shape
                self.growing[entry.name] = np.zeros((batch, heads, 0, width), np.uint8)
                # What nobody wrote must not matter.
                garbage = rng.integers(0, 256, (batch, heads, CAPACITY, width))
                self.fixed[entry.name] = garbage.astype(np.uint8)
        self.names = {entry.name for entry in self.theirs.get_inputs()}
        self.mask = np.zeros((batch, 0), np.int64)

    def step(self, ids: Array, mask: Array | None = None) -> None:
        """Feeds tokens to both and compares logits and the bytes of all caches."""
        new = np.ones_like(ids) if mask is None else mask
        self.mask = np.concatenate([self.mask, new], axis=1)
        total, tokens = self.mask.shape[1], ids.shape[1]
        positions = np.maximum(np.cumsum(self.mask, axis=1) - 1, 0)[:, -tokens:]
        feeds = {"input_ids": ids, "position_ids": positions}
        feeds = {name: array for name, array in feeds.items() if name in self.names}
        names = [entry.name for entry in self.theirs.get_outputs()]
        expected = self.theirs.run(names, {**feeds, "attention_mask": self.mask, **self.growing})
        padded = np.pad(self.mask, ((0, 0), (0, CAPACITY - total)))
        ours = self.graphs[tokens].run(names, {**feeds, "attention_mask": padded, **self.fixed})
        kept = self.mask[:, -tokens:].astype(bool)
        np.testing.assert_allclose(ours[0][kept], expected[0][kept], rtol=0, atol=self.error)
        for name, mine, its in zip(names[1:], ours[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(mine[:, :, :total], its)
            past = name.replace("present", "past_key_values")
            np.testing.assert_array_equal(mine[:, :, total:], self.fixed[past][:, :, total:])
            self.growing[past], self.fixed[past] = its, mine


def test_the_same_numbers_in_prompts_and_steps(converted: Path) -> None:
    both = Both(converted, batch=2, calls={1, 4})
    rng = np.random.default_rng(1)
    for tokens in (4, 1, 1, 4, 1):
        both.step(rng.integers(0, WORDS, (2, tokens)))


def test_padding_on_the_left(converted: Path) -> None:
    both = Both(converted, batch=2, calls={1, 4})
    rng = np.random.default_rng(2)
    both.step(rng.integers(0, WORDS, (2, 4)), np.array([[1, 1, 1, 1], [0, 0, 1, 1]]))
    for _ in range(3):
        both.step(rng.integers(0, WORDS, (2, 1)))


def test_the_last_slot_can_be_used(converted: Path) -> None:
    both = Both(converted, batch=1, calls={1, 15})
    both.step(np.arange(15)[None])
    both.step(np.array([[7]]))
    assert both.mask.shape[1] == CAPACITY


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        (
            "k4v3",
            Options(layers="1", gains=False, residual_length=0, sink_tokens=0),
        ),  # several codecs, raw among them
        ("k8v4", Options()),
        ("ascend-u8", Options(equal_rows=True)),
    ],
)
def test_other_codecs(tmp_path: Path, preset: str, options: Options) -> None:
    converted = tmp_path / "converted.onnx"
    convert(EXPORTED, converted, preset=preset, options=options)
    both = Both(converted, batch=1, calls={1, 3})
    for tokens in (3, 1):
        both.step(np.random.default_rng(tokens).integers(0, WORDS, (1, tokens)))


def test_offsets(converted: Path, tmp_path: Path) -> None:
    model = load(converted).model
    plan = Plan.from_json(model.metadata_props[METADATA_PLAN])
    write_calibration(tmp_path / "statistics", statistics(plan))
    centered = tmp_path / "converted.onnx"
    convert(
        EXPORTED,
        centered,
        options=Options(
            calibration=tmp_path / "statistics", gains=False, residual_length=0, sink_tokens=0
        ),
    )
    both = Both(centered, batch=2, calls={1, 3})
    for tokens in (3, 1, 1):
        both.step(np.random.default_rng(tokens).integers(0, WORDS, (2, tokens)))


def test_operators_of_onnxruntime_become_standard_ones(tmp_path: Path) -> None:
    """The model builder's norms and rotary embeddings, and an opset that CANN does not read."""
    exported = build_bundled("genai", tmp_path)
    converted = exported.with_name("converted.onnx")
    convert(exported, converted, options=Options(gains=False, residual_length=0, sink_tokens=0))
    both = Both(converted, batch=2, calls={1, 4}, error=1e-4)
    for tokens in (4, 1, 1):
        both.step(np.random.default_rng(tokens).integers(0, WORDS, (2, tokens)))


def test_nothing_but_operators_that_the_provider_takes(tmp_path: Path) -> None:
    """The bundled model's weights lie in a file of their own."""
    converted = tmp_path / "converted.onnx"
    convert(build_bundled("dynamo", tmp_path / "exported"), converted, options=PLAIN)
    model = lowered(converted)
    assert {node.op_type for node in model.graph.node} <= provider.CLAIMED
    assert not model.functions
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 16)]
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        assert all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)


def test_the_plan_tells_that_caches_are_static(converted: Path) -> None:
    plan = lower(load(converted).model)
    assert plan.interface.static
    assert plan.fixed_capacity


def test_a_mask_of_one_layer_alone_is_proven_too(converted: Path) -> None:
    model = load(converted).model
    plan = plan_in(model.metadata_props)
    assert plan is not None
    shared, own = (layer.attention for layer in converted_layers(model, plan))
    assert shared.bias is own.bias is not None
    hides_the_past = ir.node("Neg", [own.bias])
    model.graph.insert_before(own.node, hides_the_past)
    own.bias = hides_the_past.outputs[0]
    with pytest.raises(UnsupportedModelError, match="mask of layer 1 hides more"):
        lower(model)


@pytest.mark.parametrize("sizes", [{"capacity": 0}, {"capacity": 4, "tokens": 5}, {"batch": 0}])
def test_sizes_that_make_no_sense(converted: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="a capacity of"):
        lower(load(converted).model, **{"capacity": 8, **sizes})


def test_a_mask_that_hides_more_is_refused(converted: Path) -> None:
    """Negative twin: the mask is cut only because its numbers say what it does."""
    model = load(converted).model
    lowest = next(
        value
        for node in model.graph
        if node.op_type == "Where"
        for value in node.inputs[2:]
        if value is not None and value.const_value is not None
    )
    lowest.const_value = ir.tensor(np.array(-1.0, np.float32), name=lowest.name)
    with pytest.raises(UnsupportedModelError, match="the mask of layer 0 hides more"):
        lower(model, capacity=8)


def test_an_operator_that_the_provider_does_not_take_is_refused(converted: Path) -> None:
    model = load(converted).model
    node = next(node for node in model.graph if node.op_type == "Sigmoid")
    node.op_type, node.name = "Tan", "odd"
    with pytest.raises(UnsupportedModelError, match=r"odd \(Tan\) is not an operator"):
        lower(model, capacity=8)


def test_too_many_weights_are_refused(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_onnx.ascend.graph_mode.passes.MOST_BYTES", 1000)
    with pytest.raises(UnsupportedModelError, match="a graph for CANN can have 1000"):
        lower(load(converted).model, capacity=8)


def test_reductions_get_their_axes_as_attributes() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["": 18]> graph (float[2,3] x) => (float[2,1] y) '
        "<int64[1] axes = {-1}> { y = ReduceMean<keepdims = 1>(x, axes) }"
    )
    standard.lower_opset(model)
    (node,) = model.graph
    assert list(node.attributes["axes"].as_ints()) == [-1]
    assert len(node.inputs) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("dynamo-phi3", "dynamo-qwen3-moe", "dynamo-op23-sdpa", "dynamo-op18-sdpa-hd128-fp16"),
        *("genai09-cpu-fp32", "hf-decode", "legacy-op14-eager", "mobius-default", "optimum"),
    ],
)
def test_a_step_of_other_exports(tmp_path: Path, name: str) -> None:
    """Positions, lengths and masks are spelled in many ways; here they all come from the mask."""
    converted = tmp_path / "converted.onnx"
    convert(
        FIXTURES / f"{name}.onnx",
        converted,
        options=Options(gains=False, residual_length=0, sink_tokens=0),
    )
    model = load(converted).model
    plan = lower(model)
    graph = on_cpu(ir.to_proto(model))
    theirs = of_bodies(converted)
    names = [plan.interface.logits]
    held: dict[str, Array] = {}
    fixed: dict[str, Array] = {}
    rng, past = np.random.default_rng(0), 3
    for entry in graph.get_inputs():
        if entry.type == "tensor(uint8)":
            fixed[entry.name] = np.full(entry.shape, 255, np.uint8)
            rows = rng.integers(0, 60, (*entry.shape[:2], past, entry.shape[3]))
            held[entry.name] = fixed[entry.name][:, :, :past] = rows.astype(np.uint8)
    pairs = [pair for layer in plan.layers for pair in (layer.key, layer.value)]
    names += [pair.present for pair in pairs]
    mask = np.pad(np.ones((1, past + 1), np.int64), ((0, 0), (0, CAPACITY - past - 1)))
    interface = plan.interface
    given = {interface.tokens: np.array([[5]]), interface.position_ids: np.array([[past]])}
    given = {each: given[each] for each in given if each in {i.name for i in graph.get_inputs()}}
    (ours, *presents), (expected, *grown) = (
        session.run(names, {**given, str(interface.attention_mask): seen, **caches})
        for session, seen, caches in (
            (graph, mask, fixed),
            (theirs, mask[:, : past + 1], held),
        )
    )
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3 if "fp16" in name else 1e-5)
    for present, its in zip(presents, grown, strict=True):
        np.testing.assert_array_equal(present[:, :, : past + 1], its)
