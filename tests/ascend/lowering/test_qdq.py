"""An export in the QDQ format, as ONNX Runtime's own tool writes it, converted for CANN."""

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


def test_its_weights_are_expanded(quantised: Path, tmp_path: Path) -> None:
    output = tmp_path / "cann.onnx"
    options = ("--target", "cann", "--expand-weights", "float32", "-o", output)
    assert run("convert", quantised, *options).code == 0
    operators = {node.op_type for node in onnx.load(output, load_external_data=False).graph.node}
    assert "DequantizeLinear" not in operators
    short = ("--tokens", 120, "--context", 64, "--new-tokens", 4)
    outcome = run("verify", quantised, output, *short, "--tokenizer", quantised.parent)
    assert "verified: 16 of 16 checks hold" in outcome.out, outcome.err


def test_without_the_option_it_is_refused_by_name(quantised: Path) -> None:
    sentence = run("convert", quantised, "--target", "cann").sentence(3)
    assert "(DequantizeLinear) is floating-point and has no kernel there" in sentence
    assert "give --expand-weights float16" in sentence
