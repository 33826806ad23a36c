"""The product's own sessions, decoders and comparisons on CANNExecutionProvider."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.cann.ep_models import VOCABULARY, decoder
from tests.cann.fake_acl import ALWAYS, DEVICE_TO_HOST, FakeAcl
from tests.cann.session import model_of
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.feeding_modes import all_caches
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_model
from tq_onnx.runtime.placement import open_placed, problem_of, report_placement
from tq_onnx.runtime.providers import CANN
from tq_onnx.runtime.session import make_session, placement
from tq_onnx.verification.devices import compare_providers, providers_agree

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("kernels_named")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder(tmp_path_factory.mktemp("model") / "model.onnx")


def both(model: Path, capacity: int) -> tuple[Decoder, Decoder]:
    """A decoder on the device and one on the CPU."""
    ours = open_model(model, ep=CANN).decoder(most=capacity)
    return ours, open_model(model, exact=True).decoder(capacity=capacity)


def assert_agree(ours: Decoder, theirs: Decoder, one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, atol=1e-4)
    for mine, its in zip(all_caches(ours), all_caches(theirs), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_caches_are_on_the_device_and_a_step_copies_the_embedding_and_the_logits(
    fake: FakeAcl, model: Path
) -> None:
    ours, theirs = both(model, 16)
    assert ours.in_place
    assert {value.device_name() for value in ours._caches.past} == {"cann"}
    assert_agree(ours, theirs, ours.prefill([[3, 1, 4, 1, 5]]), theirs.prefill([[3, 1, 4, 1, 5]]))
    for token in (9, 2, 6):
        fake.reset()
        logits = ours.step([token])
        assert fake.copies() == {"host_to_device": 1, "device_to_host": 1}
        assert fake.counts()["bytes.device_to_host"] == 4 * VOCABULARY
        assert_agree(ours, theirs, logits, theirs.step([token]))


def test_delays_change_nothing(fake: FakeAcl, model: Path) -> None:
    ours, theirs = both(model, 40)
    fake.set_delay(2000)
    tokens = np.arange(20)[None]
    assert_agree(ours, theirs, ours.prefill(tokens, chunk=9), theirs.prefill(tokens))
    for token in range(5):
        assert_agree(ours, theirs, ours.step([token]), theirs.step([token]))


def test_two_buffers_that_change_places(fake: FakeAcl, model: Path) -> None:
    """Not what is done by default, but what a caller may ask for."""
    opened = open_model(model, ep=CANN)
    ours, theirs = opened.decoder(capacity=16, alias=False), both(model, 16)[1]
    for tokens in ([[1, 2, 3]], [[4]], [[5]]):
        assert_agree(ours, theirs, ours.prefill(tokens), theirs.prefill(tokens))


def test_a_context_that_is_filled_with_copies_and_one_that_is_forgotten(
    fake: FakeAcl, model: Path
) -> None:
    ours, theirs = both(model, 16)
    for one in (ours, theirs):
        one.prefill([[1, 2, 3]])
        one.repeat(10)
    assert {value.device_name() for value in ours._caches.past} == {"cann"}
    assert_agree(ours, theirs, ours.step([7]), theirs.step([7]))
    for one in (ours, theirs):
        one.reset()
    assert_agree(ours, theirs, ours.prefill([[7]]), theirs.prefill([[7]]))


def test_caches_need_a_capacity(fake: FakeAcl, model: Path) -> None:
    with pytest.raises(UsageError, match="have a fixed capacity; give a capacity"):
        open_model(model, ep=CANN).decoder()
    with pytest.raises(UsageError, match="3 tokens do not fit into caches with a capacity of 2"):
        open_model(model, ep=CANN).decoder(capacity=2).prefill([[1, 2, 3]])


def test_an_error_of_the_device_is_one_sentence(
    fake: FakeAcl, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, _ = both(model, 16)
    fake.acl.fake_acl_lengthen_next_copy(DEVICE_TO_HOST, 1 << 34)
    with pytest.raises(UnsupportedModelError, match="CANN error executing aclrtMemcpy") as caught:
        ours.prefill([[1, 2]])
    assert "\n" not in str(caught.value)
    assert "onnxruntime" not in capfd.readouterr().err
    # At its host end so long a copy may reach the addresses of the device.
    assert re.search("is not inside a live block|should be host memory", fake.take_violation())
    fake.acl.aclrtSynchronizeDevice()


def test_the_provider_is_told_its_options(fake: FakeAcl, model: Path) -> None:
    told = make_session(model, ep=CANN).get_provider_options()[CANN.provider]
    assert (told["enable_cann_graph"], told["dump_om_model"]) == ("0", "0")


def test_nothing_is_left_in_the_working_directory(
    fake: FakeAcl, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both(model, 16)[0].prefill([[1, 2, 3]])
    assert list(tmp_path.iterdir()) == []


def test_a_node_on_the_cpu_is_refused_by_name(fake: FakeAcl, tmp_path: Path) -> None:
    path = decoder(tmp_path / "model.onnx", last="logits = Softmax<axis = -1>(given)")
    message = (
        r"model\.onnx: node logits \(Softmax\) runs on CPUExecutionProvider; convert the original "
        'with `target="cann"`'
    )
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(path, ep=CANN)
    open_model(path)  # there it is no problem


def test_nodes_of_integers_may_be_on_the_cpu(fake: FakeAcl, tmp_path: Path) -> None:
    """Types that the file does not tell are inferred."""
    path = decoder(
        tmp_path / "model.onnx",
        last="""size = Shape(inputs_embeds)
            shape = Max(size, least)
            shaped = Reshape(given, shape)
            logits = Neg(shaped)""",
    )
    found = open_placed(path, CANN)
    assert problem_of(found) is None
    assert found.elsewhere == {"Max": 1, "Shape": 1}
    assert str(found).endswith("; on the CPU: 1 Max, 1 Shape")
    ours, theirs = both(path, 16)
    assert_agree(ours, theirs, ours.prefill([[1, 2, 3]]), theirs.prefill([[1, 2, 3]]))


def test_matmul_and_add_stay_two_nodes(fake: FakeAcl) -> None:
    text = """(float[2, 4] x) => (float[2, 4] y) {
        product = MatMul(x, w)
        y = Add(product, b)
    }"""
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    found = placement(make_session(model_of(text, weights), library=False, ep=CANN))
    assert {node.op_type for node in found.assigned} == {"MatMul", "Add"}
    assert found.providers == (CANN.provider,)


@pytest.mark.parametrize(
    ("text", "misplaced"),
    [
        ("(float[4] x) => (float[4] y) { a = Abs(x) y = Exp(a) }", ["y"]),
        ("(float[N] x) => (int64[1] y) { a = Abs(x) y = Shape(a) }", []),
        ("(float[4] x) => (bool[4] y) { a = Abs(x) y = IsNaN(a) }", []),
        ("(uint8[N] x) => (int64[1] y) { y = Shape(x) }", ["y"]),
        ("(uint8[4] x) => (uint8[2] y) { y = Slice(x, one, three) }", ["y"]),
        ("(int64[4] x) => (float[4] y) { a = Sub(x, x) y = Cast<to = 1>(a) }", []),
    ],
)
def test_what_belongs_on_the_device(fake: FakeAcl, text: str, misplaced: list[str]) -> None:
    constants = {"one": np.ones(1, np.int64), "three": np.full(1, 3)} if "one" in text else {}
    data = model_of(text, constants)
    session = make_session(data, library=False, ep=CANN)
    found = report_placement(session, ir.from_proto(onnx.load_from_string(data)))
    assert [node.name for node in found.misplaced] == misplaced
    assert found.nodes - found.on_provider == sum(found.elsewhere.values())


def test_the_comparison_of_both_providers(fake: FakeAcl, model: Path) -> None:
    fake.set_delay(300)
    figures = compare_providers(expose_internals(model), np.arange(30), new_tokens=12, ep=CANN)
    assert figures.same_tokens == figures.new_tokens == 12
    assert figures.codes_wrong == 0
    assert figures.cache_bytes == 4 * 34 * 41
    found = providers_agree(figures, "FLOAT")
    assert all(check.holds for check in found), found
    assert [check.name for check in found] == [
        "logits on CANNExecutionProvider equal those on the CPU",
        "greedy tokens on CANNExecutionProvider equal those on the CPU",
        "caches on CANNExecutionProvider equal those on the CPU",
    ]


def test_a_view_that_is_an_output_is_copied_too_early_by_the_provider(fake: FakeAcl) -> None:
    """Without waiting for the stream that computes it. Models for CANN must not have such nodes."""
    data = model_of(
        """(float[2, 8] x) => (float[N] y, float[2, 8] z) {
            z = Abs(x)
            y = Reshape(z, flat)
        }""",
        {"flat": np.array([-1])},
    )
    session = make_session(data, library=False, ep=CANN)
    session.run(None, {"x": np.zeros((2, 8), np.float32)})
    fake.set_delay(200_000, ALWAYS)
    view, computed = session.run(None, {"x": np.ones((2, 8), np.float32)})
    assert computed.sum() == 16
    assert view.sum() != 16
