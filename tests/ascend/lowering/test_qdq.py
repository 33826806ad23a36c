"""An export in the QDQ format, as ONNX Runtime's own tool writes it, which CANN does not take."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from tests.cli.run import run
from tq_onnx.integrations.bundled import build_bundled


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
