"""Tanh, GELU by tanh and small powers become what the device has, to float noise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ascend.lowering.parts import left_alone, lowered, part
from tq_onnx.ascend.lowering.claims import CLAIMED
from tq_onnx.ascend.lowering.tanh import lower_tanh
from tq_onnx.ops.domain import SWISH

VALUES = np.concatenate(
    [
        *(sign * np.logspace(-38, 18, 211) for sign in (-1, 1)),
        np.linspace(-12, 12, 301),
        [0.0, -0.0, 1e-6, -1e-6],
    ]
).astype(np.float32)[None]
SHAPES = "float[B, 727] x", "float[B, 727] y"
FORMS = {
    "Tanh": ("y = Tanh(x)", VALUES),
    "GELU of ONNX": ('y = Gelu<approximate = "tanh">(x)', VALUES[np.abs(VALUES) < 1e4][None]),
    "FastGelu": ("y = com.microsoft.FastGelu(x)", VALUES[np.abs(VALUES) < 1e4][None]),
}
POWERS = {"square": 2.0, "cube": 3.0}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_same_function(name: str) -> None:
    body, x = FORMS[name]
    types = [text.replace("727", str(x.size)) for text in SHAPES]
    # Beside numbers as large as these, relative to them.
    scale = np.maximum(np.abs(x), 1) if name != "Tanh" else np.ones_like(x)
    model = part(
        *types, f"{body.replace('y =', 'z =')}\ny = Div(z, scale)", {"scale": scale}, opset=20
    )
    count, nodes = lowered(model, lower_tanh, {"x": x}, 1e-6)
    assert count == 1
    assert nodes.keys() <= {*CLAIMED, f".{SWISH}"}


@pytest.mark.parametrize("name", POWERS)
def test_small_powers_are_products(name: str) -> None:
    x = np.linspace(-2, 2, 33, dtype=np.float32)[None]
    power = {"power": np.array(POWERS[name], np.float32)}
    model = part("float[B, 33] x", "float[B, 33] y", "y = Pow(x, power)", power)
    count, nodes = lowered(model, lower_tanh, {"x": x}, 2e-6)
    assert (count, set(nodes)) == (1, {"Mul"})


@pytest.mark.parametrize(
    "body",
    [
        "y = Sinh(x)",
        "y = Gelu(x)",
        "y = com.microsoft.FastGelu(x, bias)",
        "y = Pow(x, half)",
    ],
)
def test_others_stay(body: str) -> None:
    weights = {"bias": np.ones(8, np.float32), "half": np.array(0.5, np.float32)}
    model = part("float[B, 8] x", "float[B, 8] y", body, weights, opset=20)
    left_alone(model, lower_tanh)


def test_half_precision_stays() -> None:
    """It overflows on the way: infinity over infinity is no number."""
    left_alone(part("float16[B, 8] x", "float16[B, 8] y", "y = Tanh(x)"), lower_tanh)
