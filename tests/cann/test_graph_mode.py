"""Graph mode (``enable_cann_graph=1``) in the real wheel, as far as an open compiler goes.

What the provider takes, how it cuts, what it hands to CANN's parser and with which sizes, is the
wheel's own doing. Behind the parser stands the CPU (``tests/cann/graph_engine.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.graph_engine import GraphEngine
from tests.cann.session import CANN, CPU, Array, model_of
from tq_onnx.ascend.graph_mode.claims import CLAIMED
from tq_onnx.ascend.targets import CANN_GRAPH
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.runtime.session import make_session

pytestmark = pytest.mark.cann

CAPACITY = 32
OPTIONS = {"dump_om_model": "0", "precision_mode": "must_keep_origin_dtype"}
CUT = {**OPTIONS, "enable_cann_subgraph": "1"}


@pytest.fixture
def engine(fake: FakeAcl) -> Iterator[GraphEngine]:
    with GraphEngine().installed(fake) as engine:
        yield engine


@pytest.fixture(scope="module", params=["dynamo", "genai"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    exported = build_bundled(request.param, tmp_path_factory.mktemp("bundled"))
    output = exported.with_name("converted.onnx")
    convert(exported, output, options=Options(gains=False, residual_length=0, sink_tokens=0))
    return output


@pytest.fixture(scope="module")
def lowered(converted: Path) -> dict[int, bytes]:
    """Graphs for calls of so many tokens."""
    made = {}
    exported = converted.with_name("model.onnx")
    for tokens in (1, 5):
        graph = converted.with_name(f"{tokens}.onnx")
        convert(exported, graph, target=CANN_GRAPH.having(capacity=CAPACITY, call_tokens=tokens))
        made[tokens] = graph.read_bytes()
    return made


def session_of(model: bytes | Path, options: dict[str, str]) -> ort.InferenceSession:
    source = str(model) if isinstance(model, Path) else model
    session = ort.InferenceSession(source, providers=[(CANN, options), CPU])
    assert session.get_providers() == [CANN, CPU]
    return session


def calls(session: ort.InferenceSession, past: int, ids: Array) -> dict[str, Array]:
    """The inputs of a call but for the caches."""
    total = past + ids.shape[1]
    mask = np.zeros((1, CAPACITY), np.int64)
    mask[:, :total] = 1
    feeds = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.arange(past, total)[None],
    }
    return taken(session, feeds)


def taken(session: ort.InferenceSession, feeds: dict[str, Array]) -> dict[str, Array]:
    """What a model takes: the model builder's has no positions."""
    names = {entry.name for entry in session.get_inputs()}
    return {name: array for name, array in feeds.items() if name in names}


def caches(session: ort.InferenceSession) -> dict[str, Array]:
    """Empty ones."""
    return {
        entry.name: np.zeros(entry.shape, np.uint8)
        for entry in session.get_inputs()
        if entry.name.startswith("past")
    }


def grown(converted: Path, steps: list[Array]) -> list[list[Array]]:
    """What the converted model gives, by its function bodies, with caches that grow."""
    session = make_session(converted, library=False)
    names = [entry.name for entry in session.get_outputs()]
    held = {
        entry.name: np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.uint8)
        for entry in session.get_inputs()
        if entry.name.startswith("past")
    }
    found, past = [], 0
    for ids in steps:
        total = past + ids.shape[1]
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
        }
        outputs = session.run(names, {**taken(session, feeds), **held})
        held = {
            name.replace("present", "past_key_values"): output
            for name, output in zip(names[1:], outputs[1:], strict=True)
        }
        found.append(outputs)
        past = total
    return found


@pytest.mark.parametrize("delay", [0, 1000])
def test_the_lowered_model_is_one_graph_with_the_same_numbers(
    fake: FakeAcl, engine: GraphEngine, converted: Path, lowered: dict[int, bytes], delay: int
) -> None:
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, 250, (1, tokens)) for tokens in (5, 1, 1, 5, 1)]
    expected = grown(converted, steps)
    sessions = {tokens: session_of(model, OPTIONS) for tokens, model in lowered.items()}
    fake.set_delay(delay)
    held, past = caches(sessions[1]), 0
    for ids, theirs in zip(steps, expected, strict=True):
        session = sessions[ids.shape[1]]
        names = [entry.name for entry in session.get_outputs()]
        outputs = session.run(names, {**calls(session, past, ids), **held})
        past += ids.shape[1]
        np.testing.assert_allclose(outputs[0], theirs[0], rtol=0, atol=1e-4)
        for name, ours, its in zip(names[1:], outputs[1:], theirs[1:], strict=True):
            np.testing.assert_array_equal(ours[:, :, :past], its)
            held[name.replace("present", "past_key_values")] = ours
    # One graph for prompts and one for steps, each compiled once.
    assert len(engine.graphs) == 2
    assert sorted(graph.runs for graph in engine.graphs.values()) == [2, 3]
    assert fake.counts()["aclgrphBuildModel"] == 2


def test_what_cann_is_handed(engine: GraphEngine, lowered: dict[int, bytes]) -> None:
    session = session_of(lowered[1], OPTIONS)
    session.run(None, {**calls(session, 0, np.array([[1]])), **caches(session)})
    (graph,) = engine.graphs.values()
    assert graph.operators <= CLAIMED
    assert [(entry.domain, entry.version) for entry in graph.model.opset_import] == [("", 16)]
    assert not any(tensor.external_data for tensor in graph.model.graph.initializer)
    inputs = {entry.name: tuple(entry.shape) for entry in session.get_inputs()}
    assert graph.shapes == inputs  # all of them, with the sizes that the file says
    # All nodes of the file but for those that ONNX Runtime fused or split before.
    assert abs(engine.nodes - len(onnx.load_from_string(lowered[1]).graph.node)) < 20


def test_every_operator_of_the_lowered_model_is_on_the_list(
    engine: GraphEngine, lowered: dict[int, bytes]
) -> None:
    """Where the provider cuts, it finds nothing to cut."""
    session = session_of(lowered[5], CUT)
    session.run(None, {**calls(session, 0, np.arange(5)[None]), **caches(session)})
    assert len(engine.graphs) == 1


def test_caches_stay_on_the_device(
    fake: FakeAcl, engine: GraphEngine, lowered: dict[int, bytes]
) -> None:
    """Past and present are two buffers that change places: a graph may not write what it reads."""
    session = session_of(lowered[1], OPTIONS)
    first, second = (
        {
            name: ort.OrtValue.ortvalue_from_numpy(array, "cann", 0)
            for name, array in caches(session).items()
        }
        for _ in range(2)
    )
    logits = []
    for past in range(3):
        fake.reset()
        binding = session.io_binding()
        for name, array in calls(session, past, np.array([[past + 60]])).items():
            binding.bind_cpu_input(name, array)
        for name, value in first.items():
            binding.bind_ortvalue_input(name, value)
            present = name.replace("past_key_values", "present")
            binding.bind_ortvalue_output(present, second[name])
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        # Ids, mask and, where they are an input, positions; the logits.
        small = len(calls(session, past, np.array([[0]])))
        assert fake.copies() == {"host_to_device": small, "device_to_host": 1}
        logits.append(binding.get_outputs()[-1].numpy())
        first, second = second, first
    on_cpu = ort.InferenceSession(lowered[1], providers=[CPU])
    held = caches(session)
    for past, ours in enumerate(logits):
        names = [entry.name for entry in on_cpu.get_outputs()]
        outputs = on_cpu.run(names, {**calls(session, past, np.array([[past + 60]])), **held})
        np.testing.assert_allclose(ours, outputs[0], rtol=0, atol=1e-4)
        held = dict(zip(held, outputs[1:], strict=True))


def test_as_converted_cann_is_handed_operators_that_it_does_not_know(
    fake: FakeAcl, converted: Path
) -> None:
    """By default the provider does not look: it takes the whole model, whatever is in it."""
    engine = GraphEngine()
    model = onnx.load(converted)  # its weights in it
    unknown = pytest.raises(
        onnx.checker.ValidationError, match=r"No opset import for domain|No Op registered"
    )
    with unknown, engine.installed(fake):
        session = session_of(model.SerializeToString(), OPTIONS)
        feeds = {
            "input_ids": np.array([[1]]),
            "attention_mask": np.ones((1, 5), np.int64),
            "position_ids": np.array([[4]]),
        }
        held = {
            entry.name: np.zeros((1, entry.shape[1], 4, entry.shape[3]), np.uint8)
            for entry in session.get_inputs()
            if entry.name.startswith("past")
        }
        with pytest.raises(Exception, match="CANN Graph error executing"):
            session.run(None, {**taken(session, feeds), **held})
    assert not engine.graphs


def test_weights_in_a_file_of_their_own_are_not_handed_over(
    fake: FakeAcl, lowered: dict[int, bytes], tmp_path: Path
) -> None:
    """The parser would get a file's name and no folder; so the lowered model has them in it."""
    model = onnx.load_from_string(lowered[1])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    not_there = pytest.raises(onnx.checker.ValidationError, match=r"should be stored in m\.data")
    with not_there, GraphEngine().installed(fake):
        session = session_of(tmp_path / "m.onnx", OPTIONS)
        with pytest.raises(Exception, match="CANN Graph error executing"):
            session.run(None, {**calls(session, 0, np.array([[1]])), **caches(session)})


def test_a_graph_is_compiled_for_each_size_of_its_inputs(
    fake: FakeAcl, engine: GraphEngine
) -> None:
    """Why sizes must not change from step to step."""
    session = session_of(model_of("(float[N] x) => (float[N] y) { y = Neg(x) }"), OPTIONS)
    for size in (2, 3, 2, 4):
        session.run(None, {"x": np.ones(size, np.float32)})
    assert fake.counts()["aclgrphBuildModel"] == 3


def test_a_single_graph_takes_what_is_not_on_the_list(engine: GraphEngine) -> None:
    model = model_of("(float[2] x) => (float[2] z) { y = Tan(x)  z = Neg(y) }")
    session_of(model, OPTIONS).run(None, {"x": np.ones(2, np.float32)})
    (graph,) = engine.graphs.values()
    assert graph.operators == {"Tan", "Neg"}


@pytest.mark.parametrize("op", ["CastLike", "IsNaN"])
def test_what_is_not_on_the_list_cuts_where_that_is_asked_for(engine: GraphEngine, op: str) -> None:
    """Operators of the bodies that the lowering replaces."""
    of = {
        "CastLike": "b = CastLike(a, x)",
        "IsNaN": "c = IsNaN(a)  b = Cast<to = 1>(c)",
    }[op]
    model = model_of(f"(float[2] x) => (float[2] y) {{ a = Abs(x)  {of}  y = Neg(b) }}")
    session_of(model, CUT).run(None, {"x": np.ones(2, np.float32)})
    assert len(engine.graphs) == 2 or op == "CastLike"
    assert op not in {each for graph in engine.graphs.values() for each in graph.operators}


@pytest.mark.parametrize("op_type", sorted(CLAIMED & {"Sin", "Erf", "Sigmoid", "Round", "Sign"}))
def test_the_list_is_the_providers(engine: GraphEngine, op_type: str) -> None:
    model = model_of(f"(float[2] x) => (float[2] y) {{ y = {op_type}(x) }}")
    session_of(model, CUT).run(None, {"x": np.ones(2, np.float32)})
    assert engine.nodes == 1


@pytest.mark.parametrize("op_type", ["Tan", "Trilu"])
def test_others_are_not_on_it(engine: GraphEngine, op_type: str) -> None:
    assert op_type not in CLAIMED
    model = model_of(f"(float[2, 2] x) => (float[2, 2] y) {{ y = {op_type}(x) }}")
    session_of(model, CUT).run(None, {"x": np.ones((2, 2), np.float32)})
    assert engine.nodes == 0
