"""SiLU of every spelling becomes one operator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ascend.lowering.parts import left_alone, lowered, numbers, part
from tq_onnx.ascend.lowering.swish import lower_swish
from tq_onnx.ops.domain import SWISH

FORMS = {
    "gate last": "s = Sigmoid(x)\ny = Mul(x, s)",
    "gate first": "s = Sigmoid(x)\ny = Mul(s, x)",
    "ONNX 24": "y = Swish(x)",
    "QuickGelu": "y = com.microsoft.QuickGelu<alpha = 1.0>(x)",
}
TWINS = {
    "of something else": "s = Sigmoid(z)\ny = Mul(x, s)",
    "another gate": "s = Tanh(x)\ny = Mul(x, s)",
    "plus the gate": "s = Sigmoid(x)\ny = Add(x, s)",
    "steeper, ONNX 24": "y = Swish<alpha = 2.0>(x)",
    "steeper": "y = com.microsoft.QuickGelu(x)",
}


CASES = [
    *((name, "float") for name in FORMS),
    # ONNX Runtime has no QuickGelu in half precision for the CPU.
    *((name, "float16") for name in FORMS if name != "QuickGelu"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_spelling_is_one_node(name: str, kind: str) -> None:
    dtype, tolerance = (np.float32, 1e-6) if kind == "float" else (np.float16, 4e-3)
    model = part(f"{kind}[B, 3, 8] x", f"{kind}[B, 3, 8] y", FORMS[name], opset=24)
    count, nodes = lowered(model, lower_swish, {"x": numbers(2, 3, 8, dtype=dtype)}, tolerance)
    assert (count, nodes) == (1, {f".{SWISH}": 1})


@pytest.mark.parametrize("name", TWINS)
def test_other_activations_stay(name: str) -> None:
    types = "float[B, 3, 8] x, float[B, 3, 8] z"
    left_alone(part(types, "float[B, 3, 8] y", TWINS[name], opset=24), lower_swish)


def test_doubles_stay() -> None:
    left_alone(part("double[B, 8] x", "double[B, 8] y", FORMS["gate last"]), lower_swish)
