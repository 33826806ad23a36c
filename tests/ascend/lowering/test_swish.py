"""SiLU of every spelling becomes one operator."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from tests.ascend.lowering.parts import left_alone, lowered, numbers, part
from tests.cli.run import run
from tq_onnx.ascend.lowering.swish import lower_swish
from tq_onnx.integrations.bundled import build_bundled
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


# An export in the QDQ format, as ONNX Runtime's own tool writes it, which CANN does not take.


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exported = build_bundled("dynamo", tmp_path_factory.mktemp("exported"))
    config = DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=False, quant_format=QuantFormat.QDQ
    )
    logging.disable(logging.WARNING)
    try:
        maker = MatMulNBitsQuantizer(onnx.load(exported), algo_config=config)
        maker.process()
    finally:
        logging.disable(logging.NOTSET)
    path = exported.with_name("qdq.onnx")
    maker.model.save_model_to_file(str(path), use_external_data_format=False)
    return path


def test_it_is_refused_by_name(quantised: Path) -> None:
    sentence = run("convert", quantised, "--target", "cann").sentence(3)
    assert "(DequantizeLinear) is floating-point and has no kernel there" in sentence
    assert "export its weights in float32 or float16" in sentence
