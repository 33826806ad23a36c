"""Quantised operators in the real wheel: the provider claims none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CPU, CannSession, model_of

pytestmark = pytest.mark.cann

MODELS = {
    "DequantizeLinear": "(int8[4] x) => (float[4] y) {s = Constant<value_float = 0.5>() "
    "y = DequantizeLinear(x, s)}",
    "QuantizeLinear": "(float[4] x) => (uint8[4] y) {s = Constant<value_float = 0.5>() "
    "y = QuantizeLinear(x, s)}",
    "DynamicQuantizeLinear": "(float[4] x) => (uint8[4] y) {y, s, z = DynamicQuantizeLinear(x)}",
    "MatMulInteger": "(uint8[4, 4] x, int8[4, 4] w) => (int32[4, 4] y) {y = MatMulInteger(x, w)}",
    "QLinearMatMul": "(uint8[4, 4] x, uint8[4, 4] w, float s, uint8 z) => (uint8[4, 4] y) "
    "{y = QLinearMatMul(x, s, z, w, s, z, s, z)}",
}

BYTES = np.ones((4, 4), np.uint8)
FEEDS = {
    "DequantizeLinear": {"x": np.ones(4, np.int8)},
    "QuantizeLinear": {"x": np.ones(4, np.float32)},
    "DynamicQuantizeLinear": {"x": np.ones(4, np.float32)},
    "MatMulInteger": {"x": BYTES, "w": BYTES.astype(np.int8)},
    "QLinearMatMul": {
        "x": BYTES,
        "w": BYTES,
        "s": np.array(1, np.float32),
        "z": np.array(0, np.uint8),
    },
}


@pytest.mark.parametrize("op_type", MODELS)
def test_none_runs_on_the_device(fake: FakeAcl, tmp_path: Path, op_type: str) -> None:
    session = CannSession(model_of(MODELS[op_type], opset=13), tmp_path)
    session.run(FEEDS[op_type])
    assert {node.provider for node in session.end() if node.op == op_type} == {CPU}
