"""Rotations: orthogonal, seeded per layer, and the ones that torch would draw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tq_onnx.codec import rotation
from tq_onnx.codec.presets import HADAMARD, QR
from tq_onnx.codec.rotation import make_rotation, rotation_seed
from tq_onnx.errors import UsageError

TORCH = json.loads((Path(__file__).parents[1] / "golden" / "rotations_torch.json").read_text())
KINDS_AND_SIZES = [(QR, 8), (QR, 64), (QR, 80), (QR, 128), (HADAMARD, 64), (HADAMARD, 128)]


@pytest.mark.parametrize(
    ("head_size", "layer", "corner"),
    [
        (128, 0, [0.174885, 0.120727, 0.085467, -0.145567]),
        (128, 1, [0.000304, -0.022559, 0.024640, -0.117543]),
        (64, 0, [0.253686, 0.154918, 0.050313, -0.213609]),
    ],
)
def test_published_goldens(head_size: int, layer: int, corner: list[float]) -> None:
    np.testing.assert_allclose(make_rotation(QR, head_size, layer)[0, :4], corner, atol=1e-6)


@pytest.mark.parametrize("case", TORCH["cases"], ids=lambda c: f"{c['head_size']}-{c['layer']}")
def test_what_torch_drew(case: dict[str, list[float]]) -> None:
    matrix = make_rotation(QR, case["head_size"], case["layer"])
    normals = rotation._randn(16 * 16, rotation_seed(QR, case["layer"]))
    np.testing.assert_allclose(normals[:16], case["normals"], atol=1e-6)
    np.testing.assert_allclose(matrix[0, :8], case["first"], atol=1e-6)
    np.testing.assert_allclose(matrix[-1, -8:], case["last"], atol=1e-6)
    ramp = np.linspace(-1, 1, case["head_size"]) @ matrix.astype(np.float64)
    np.testing.assert_allclose(ramp, case["ramp"], atol=2e-6)


@pytest.mark.parametrize("head_size", [8, 64, 80, 128])
@pytest.mark.parametrize("layer", [0, 1, 35])
def test_torch_itself(head_size: int, layer: int) -> None:
    torch = pytest.importorskip("torch", reason="the frozen values above stand in for torch")
    generator = torch.Generator().manual_seed(rotation_seed(QR, layer))
    normals = torch.randn(head_size, head_size, generator=generator)
    q, t = torch.linalg.qr(normals.double())
    expected = (q * torch.sign(torch.diagonal(t))).numpy()
    matrix = make_rotation(QR, head_size, layer)
    np.testing.assert_allclose(matrix, expected, atol=1e-6)
    # torch's own factorisation in float32 is further from the truth than ours is.
    q, t = torch.linalg.qr(normals)
    np.testing.assert_allclose(matrix, (q * torch.sign(torch.diagonal(t))).numpy(), atol=1e-5)
    if head_size & (head_size - 1) == 0:
        generator.manual_seed(rotation_seed(HADAMARD, layer))
        signs = torch.randint(0, 2, (head_size,), generator=generator).numpy() * 2 - 1
        assert np.array_equal(np.sign(make_rotation(HADAMARD, head_size, layer)[:, 0]), signs)


@pytest.mark.parametrize(("kind", "head_size"), KINDS_AND_SIZES)
@pytest.mark.parametrize("layer", [0, 5])
def test_orthogonal(kind: str, head_size: int, layer: int) -> None:
    matrix = make_rotation(kind, head_size, layer)
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous
    exact = matrix.astype(np.float64)
    np.testing.assert_allclose(exact @ exact.T, np.eye(head_size), atol=5e-7)


@pytest.mark.parametrize("kind", [QR, HADAMARD])
def test_layers_and_seeds_differ(kind: str) -> None:
    first = make_rotation(kind, 64, 0)
    assert np.array_equal(first, make_rotation(kind, 64, 0, seed=42))
    assert not np.array_equal(first, make_rotation(kind, 64, 1))
    assert not np.array_equal(first, make_rotation(kind, 64, 0, seed=43))


def test_seeds() -> None:
    assert rotation_seed(QR, 3) == 42 + 3000
    assert rotation_seed(HADAMARD, 3, 7) == 7 + 3 * 1337


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**40 + 1])
def test_any_integer_is_a_seed(seed: int) -> None:
    matrix = make_rotation(QR, 64, 0, seed).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=5e-7)


def test_hadamard_spreads_a_constant_vector() -> None:
    # Without signs a constant vector is one spike, the worst case of a scalar quantiser.
    spread = np.ones(128) / np.sqrt(128) @ make_rotation(HADAMARD, 128, 0)
    assert np.abs(spread).max() < 0.5


def test_refusals() -> None:
    with pytest.raises(UsageError, match="no rotation 'haar'"):
        make_rotation("haar", 64, 0)
    with pytest.raises(UsageError, match="power of two, not 80; choose the qr rotation"):
        make_rotation(HADAMARD, 80, 0)
