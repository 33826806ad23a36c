"""Every single operator of the fake runtime, asked for by the real provider, against the CPU's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, Array, CannSession, model_of, on_cpu

pytestmark = pytest.mark.cann

TOLERANCE = {"float": 1e-6, "float16": 1e-3, "double": 1e-15}
"""Of one rounding: libraries may differ in the last bit of Exp, Log, Erf, Sin and Cos."""
DTYPE = {"float": np.dtype(np.float32), "double": np.dtype(np.float64), "bool": np.dtype(bool)}
ELEMENT = {
    **dict.fromkeys(["float"], 1),
    **{
        name: 2 + i for i, name in enumerate(["uint8", "int8", "uint16", "int16", "int32", "int64"])
    },
    **{name: 9 + i for i, name in enumerate(["bool", "float16", "double", "uint32", "uint64"])},
}
"""``TensorProto.DataType``."""


def dtype_of(element: str) -> np.dtype[np.generic]:
    return DTYPE.get(element) or np.dtype(element)


def sample(element: str, shape: tuple[int, ...], seed: int, low: float = -3) -> Array:
    """Numbers that every type here can hold, small enough for exact integer products."""
    rng = np.random.default_rng(seed)
    if dtype_of(element).kind == "f":
        return rng.uniform(low, 9, shape).astype(dtype_of(element))
    low = max(low, 0 if dtype_of(element).kind in "ub" else -3)
    return rng.integers(int(low), 2 if element == "bool" else 10, shape).astype(dtype_of(element))


def assert_same_as_cpu(
    model: bytes, feeds: Mapping[str, Array], folder: Path, element: str
) -> None:
    session = CannSession(model, folder)
    (ours,) = session.run(dict(feeds))
    assert {node.provider for node in session.end()} == {CANN}
    (theirs,) = on_cpu(model, dict(feeds))
    assert ours.dtype == theirs.dtype
    if ours.dtype.kind == "f":
        tolerance = TOLERANCE[element]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("element", ["float", "float16", "double", "int32", "int64"])
@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((2, 3, 4), (4,)), ((1, 4), (2, 3, 4))])
def test_arithmetic(
    fake: FakeAcl,
    tmp_path: Path,
    kind: str,
    element: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    out = np.broadcast_shapes(*shapes)
    a, b, y = (str(list(shape)) for shape in (*shapes, out))
    model = model_of(f"({element}{a} a, {element}{b} b) => ({element}{y} y) {{ y = {kind}(a, b) }}")
    feeds = {
        "a": sample(element, shapes[0], 0),
        "b": sample(element, shapes[1], 1, low=1 if kind == "Div" else -3),
    }
    assert_same_as_cpu(model, feeds, tmp_path, element)
    assert fake.counts()[f"op.{kind}"] == 1


UNARY = {
    "Neg": -3.0,
    "Abs": -3.0,
    "Relu": -3.0,
    "Sqrt": 0.1,
    "Reciprocal": 0.1,
    "Log": 0.1,
    "Erf": -3.0,
    "Sin": -3.0,
    "Cos": -3.0,
    "Floor": -3.0,
    "Ceil": -3.0,
    "Round": -3.0,
}
"""The smallest value that each may be given."""


@pytest.mark.parametrize("kind", UNARY)
def test_functions_of_one_tensor(fake: FakeAcl, tmp_path: Path, kind: str) -> None:
    model = model_of(f"(float[5, 7] x) => (float[5, 7] y) {{ y = {kind}(x) }}")
    x = sample("float", (5, 7), 0, UNARY[kind])
    x.flat[:2] = 2.5, 3.5  # ties of Round
    assert_same_as_cpu(model, {"x": x}, tmp_path, "float")
    assert fake.counts()[f"op.{kind}"] == 1


@pytest.mark.parametrize("to", ELEMENT)
@pytest.mark.parametrize("element", ELEMENT)
def test_casts(fake: FakeAcl, tmp_path: Path, element: str, to: str) -> None:
    if element == to:
        return  # ONNX Runtime takes the node away
    model = model_of(f"({element}[3, 5] x) => ({to}[3, 5] y) {{ y = Cast<to = {ELEMENT[to]}>(x) }}")
    low = 0.0 if dtype_of(to).kind == "u" else -3.0
    assert_same_as_cpu(model, {"x": sample(element, (3, 5), 0, low)}, tmp_path, to)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 5), (5, 4)),
        ((2, 3, 5), (5, 4)),
        ((2, 3, 5), (2, 5, 4)),
        ((2, 1, 3, 5), (1, 6, 5, 4)),
        ((3, 5), (2, 5, 4)),
    ],
)
def test_products_of_matrices(
    fake: FakeAcl, tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    y = (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    model = model_of(
        f"(float{list(a)} a, float{list(b)} b) => (float{list(y)} y) {{ y = MatMul(a, b) }}"
    )
    feeds = {"a": sample("float", a, 0, -9), "b": sample("float", b, 1, -9)}
    session = CannSession(model, tmp_path)
    (ours,) = session.run(feeds)
    assert {node.provider for node in session.end()} == {CANN}
    np.testing.assert_allclose(ours, on_cpu(model, feeds)[0], rtol=1e-5, atol=1e-4)
    exact = np.matmul(feeds["a"].astype(float), feeds["b"].astype(float)).astype(np.float32)
    np.testing.assert_array_equal(ours, exact)  # rounded once


def test_an_operator_that_is_not_here_is_an_error_of_the_run(fake: FakeAcl, tmp_path: Path) -> None:
    """A gap of the bench is never mistaken for a result."""
    model = model_of(
        "(float16[2, 3] a, float16[3, 4] b, float16[2, 4] c) => (float16[2, 4] y)"
        "{ y = Gemm(a, b, c) }"
    )
    half = np.float16
    feeds = {"a": np.ones((2, 3), half), "b": np.ones((3, 4), half), "c": np.ones((2, 4), half)}
    session = CannSession(model, tmp_path)
    with pytest.raises(Exception, match="Non-zero status code returned while running Gemm node"):
        session.run(feeds)
    assert fake.counts()["missing_op.GEMM"] == 1
    fake.reset()


def test_a_matrix_without_two_dimensions_is_refused(fake: FakeAcl, tmp_path: Path) -> None:
    model = model_of("(float[3, 5] a, float[5] b) => (float[3] y) { y = MatMul(a, b) }")
    session = CannSession(model, tmp_path)
    with pytest.raises(Exception, match="running MatMul node"):
        session.run({"a": np.ones((3, 5), np.float32), "b": np.ones(5, np.float32)})
    told = fake.take_violation()
    assert "BatchMatMul takes matrices: rank 2 or more" in told
    assert "inputs float32[3,5] float32[5], output float32[3]" in told


def test_dividing_integers_by_zero_is_an_error_of_the_run(fake: FakeAcl, tmp_path: Path) -> None:
    model = model_of("(int32[2] a, int32[2] b) => (int32[2] y) { y = Div(a, b) }")
    session = CannSession(model, tmp_path)
    with pytest.raises(Exception, match="CANN failure 100000"):
        session.run({"a": np.array([1, 2], np.int32), "b": np.array([1, 0], np.int32)})
    assert "Div divides an integer by zero" in fake.take_violation()


def test_an_empty_input_is_an_error_of_the_run(fake: FakeAcl, tmp_path: Path) -> None:
    """The provider copies 0 bytes to null, which ACL's interface does not allow.

    Models for CANN must not have empty caches. What a device does then was not seen.
    """
    model = model_of("(float[N] x) => (float[N] y) { y = Neg(x) }")
    with pytest.raises(Exception, match="CANN error executing aclrtMemcpyAsync"):
        CannSession(model, tmp_path).run({"x": np.zeros(0, np.float32)})
    assert fake.take_violation() == "aclrtMemcpyAsync host_to_device: the destination is null"
