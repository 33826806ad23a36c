"""A plain float model in the real wheel: placement, results, copies, refusals, delays."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.cann.bench import Measured
from tests.cann.fake_acl import BAD_ALLOC, DEVICE_TO_HOST, HOST_TO_DEVICE, FakeAcl
from tests.cann.session import CANN, CPU, OPTIONS, Array, CannSession, PlacedNode, model_of, on_cpu

pytestmark = pytest.mark.cann


@pytest.fixture(scope="module")
def model() -> bytes:
    """Most of what single-op mode claims, from float32 to float16."""
    rng = np.random.default_rng(0)
    return model_of(
        """(float[B, 3, 8] x) => (float[B, 3, 16] difference, float16[N] half) {
            product = MatMul(x, weight)
            sum = Add(product, bias)
            square = Mul(sum, sum)
            positive = Add(square, one)
            root = Sqrt(positive)
            inverse = Reciprocal(root)
            quotient = Div(sum, root)
            negated = Neg(quotient)
            difference = Sub(negated, inverse)
            reshaped = Reshape(difference, flat)
            same = Identity(reshaped)
            half = Cast<to = 10>(same)
        }""",
        {
            "weight": rng.standard_normal((8, 16)).astype(np.float32),
            "bias": rng.standard_normal(16).astype(np.float32),
            "one": np.ones(1, np.float32),
            "flat": np.array([-1], np.int64),
        },
    )


@pytest.fixture
def x() -> Array:
    return np.random.default_rng(1).standard_normal((5, 3, 8)).astype(np.float32)


def assert_equal_to_cpu(model: bytes, x: Array, outputs: list[Array]) -> None:
    """The product is summed in another order; every other operation rounds alike."""
    for ours, theirs in zip(outputs, on_cpu(model, {"x": x}), strict=True):
        assert ours.dtype == theirs.dtype
        one_ulp = {"float32": 1e-6, "float16": 1e-3}[ours.dtype.name]
        np.testing.assert_allclose(ours, theirs, rtol=one_ulp, atol=1e-6)


def test_every_node_is_on_cann(
    fake: FakeAcl, model: bytes, x: Array, tmp_path: Path, measured: Measured
) -> None:
    session = CannSession(model, tmp_path)
    outputs = session.run({"x": x})
    placed = session.end()
    assert {node.provider for node in placed} == {CANN}, placed
    assert len(placed) == 11  # Identity is gone; inputs and outputs are copied by no node
    assert all(node.is_float for node in placed)
    assert_equal_to_cpu(model, x, outputs)
    measured("provider", CANN)


def test_what_cann_does_not_claim_is_seen_on_the_cpu(fake: FakeAcl, tmp_path: Path) -> None:
    """The negative twin: a placement that is not CANN's does show."""
    model = model_of(
        """(float[4, 4] x) => (float[4, 4] y) {
            positive = Abs(x)
            y = Softmax<axis = -1>(positive)
        }"""
    )
    session = CannSession(model, tmp_path)
    session.run({"x": np.ones((4, 4), np.float32)})
    placed = {node.name: node for node in session.end()}
    assert placed["positive"] == PlacedNode("positive", "Abs", CANN, is_float=True)
    assert placed["y"] == PlacedNode("y", "Softmax", CPU, is_float=True)


def test_the_copies_of_a_run(fake: FakeAcl, model: bytes, x: Array, tmp_path: Path) -> None:
    """One for the input and one for each output; between the nodes none."""
    session = CannSession(model, tmp_path)
    assert fake.copies() == {"host_to_device": 3}  # weight, bias, one
    for _ in range(3):
        fake.reset()
        session.run({"x": x})
        assert fake.copies() == {"host_to_device": 1, "device_to_host": 2}
        counts = fake.counts()
        assert counts["bytes.host_to_device"] == x.nbytes
        assert counts["bytes.device_to_host"] == 5 * 3 * 16 * (4 + 2)
        assert {name: count for name, count in counts.items() if name.startswith("op.")} == {
            "op.BatchMatMul": 1,
            "op.Add": 2,
            "op.BroadcastToD": 2,
            "op.Mul": 1,
            "op.Sqrt": 1,
            "op.Reciprocal": 1,
            "op.Div": 1,
            "op.Neg": 1,
            "op.Sub": 1,
            "op.Cast": 1,
        }


@pytest.mark.parametrize("kind", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_a_bad_copy_of_the_provider_is_an_error_of_the_run(
    fake: FakeAcl, model: bytes, x: Array, tmp_path: Path, kind: int
) -> None:
    """The negative twin of the copies: the provider's own call is checked and its refusal told."""
    session = CannSession(model, tmp_path)
    session.run({"x": x})
    fake.acl.fake_acl_lengthen_next_copy(kind, 1 << 34)
    with pytest.raises(Exception, match="CANN error executing aclrtMemcpyAsync"):
        session.run({"x": x})
    # At its host end so long a copy may reach the addresses of the device.
    assert re.search("is not inside a live block|should be host memory", fake.take_violation())
    assert_equal_to_cpu(model, x, session.run({"x": x}))  # and only that copy


def test_an_error_on_the_stream_is_an_error_of_the_run(fake: FakeAcl, tmp_path: Path) -> None:
    model = model_of("(float[2] x) => (int32[2] y) { y = Cast<to = 6>(x) }")
    session = CannSession(model, tmp_path)
    assert session.run({"x": np.array([-1.75, 2.5], np.float32)})[0].tolist() == [-1, 2]
    with pytest.raises(Exception, match="CANN failure 100000: ACL_ERROR_INVALID_PARAM"):
        session.run({"x": np.array([1, np.inf], np.float32)})
    assert "casts inf at element 1 to int32" in fake.take_violation()


def test_matmul_and_add_of_matrices_leave_the_device_unless_they_are_not_fused(
    fake: FakeAcl, tmp_path: Path
) -> None:
    """ONNX Runtime makes a float32 Gemm of the pair, and the provider has none."""
    model = model_of(
        """(float[2, 4] x) => (float[2, 4] y) {
            product = MatMul(x, w)
            y = Add(product, b)
        }""",
        {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)},
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for disabled, providers in (([], {CPU}), (["MatMulAddFusion"], {CANN})):
        session = CannSession(model, tmp_path, disabled)
        np.testing.assert_array_equal(session.run({"x": x})[0], x + 1)
        assert {node.provider for node in session.end()} == providers


def test_two_broadcast_operands_are_computed_wrongly_by_the_provider(
    fake: FakeAcl, tmp_path: Path
) -> None:
    """It puts both in one scratch buffer. Models for CANN must not have such nodes."""
    model = model_of("(float[3, 1] a, float[1, 4] b) => (float[3, 4] y) { y = Mul(a, b) }")
    a = np.array([[2], [3], [5]], np.float32)
    b = np.array([[7, 11, 13, 17]], np.float32)
    ours = CannSession(model, tmp_path).run({"a": a, "b": b})[0]
    np.testing.assert_array_equal(ours, np.broadcast_to(b * b, (3, 4)))


def test_a_message_left_in_acl_fails_the_next_operator(fake: FakeAcl, tmp_path: Path) -> None:
    """The provider asks for one after each of its operators, whoever left it."""
    session = CannSession(model_of("(float[2] x) => (float[2] y) { y = Neg(x) }"), tmp_path)
    x = np.ones(2, np.float32)
    session.run({"x": x})
    address = ctypes.c_void_p()
    assert fake.acl.aclrtMalloc(ctypes.byref(address), 1 << 50, 0) == BAD_ALLOC
    with pytest.raises(Exception, match="aclrtMalloc: no room for 1125899906842624 bytes"):
        session.run({"x": x})
    np.testing.assert_array_equal(session.run({"x": x})[0], -x)


def test_the_runtime_is_loaded_for_the_provider_only(fake: FakeAcl, tmp_path: Path) -> None:
    """Whoever else needs it opens it by its name and gets the same one."""
    CannSession(model_of("(float[2] x) => (float[2] y) { y = Neg(x) }"), tmp_path)
    with pytest.raises(AttributeError):
        ctypes.CDLL(None).aclrtGetSocName  # noqa: B018
    assert fake.counts()["aclrtSetDevice"] > 0


def test_graph_mode_is_an_error_of_the_run(fake: FakeAcl) -> None:
    """The fake runtime has none: a graph that is not compiled is not computed elsewhere."""
    model = model_of("(float[2] x) => (float[2] y) { y = Neg(x) }")
    options = {**OPTIONS, "enable_cann_graph": "1"}
    session = ort.InferenceSession(model, providers=[(CANN, options), CPU])
    with pytest.raises(Exception, match="CANN Graph error executing ge::aclgrphParseONNXFromMem"):
        session.run(None, {"x": np.ones(2, np.float32)})
    assert fake.counts()["aclgrphParseONNXFromMem"] == 1
