"""What people do to an export before they deploy it, by the tools that they use.

Each takes a model and returns another one. None may keep a promise that the exporter made: names of
sizes are made up, shapes are lost, nodes are no longer in topological order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.shape_inference
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    QuantFormat,
)
from onnxruntime.transformers.float16 import convert_float_to_float16

Processor = Callable[[onnx.ModelProto], onnx.ModelProto]

BLOCK = 16


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """As ``onnx.shape_inference`` leaves it, which makes up names for sizes."""
    return onnx.shape_inference.infer_shapes(model)


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without shapes, as quantizers leave what they have replaced."""
    del model.graph.value_info[:]
    return model


def q4(model: onnx.ModelProto) -> onnx.ModelProto:
    return _blocks(bare(model), bits=4)


def q4_table(model: onnx.ModelProto) -> onnx.ModelProto:
    """The embeddings, too."""
    return _blocks(bare(model), bits=4, table=True)


def q4_asymmetric(model: onnx.ModelProto) -> onnx.ModelProto:
    return _blocks(model, bits=4, symmetric=False)


def q4_dequantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights through DequantizeLinear."""
    return _blocks(model, bits=4, form=QuantFormat.QDQ)


def q8(model: onnx.ModelProto) -> onnx.ModelProto:
    return _blocks(bare(model), bits=8)


def _blocks(
    model: onnx.ModelProto,
    *,
    bits: int,
    symmetric: bool = True,
    table: bool = False,
    form: QuantFormat = QuantFormat.QOperator,
) -> onnx.ModelProto:
    kinds, axes = ("MatMul", "Gather"), (("MatMul", 0), ("Gather", 1))
    quantizer = MatMulNBitsQuantizer(
        model,
        algo_config=DefaultWeightOnlyQuantConfig(
            block_size=BLOCK,
            is_symmetric=symmetric,
            bits=bits,
            quant_format=form,
            op_types_to_quantize=kinds if table else kinds[:1],
            quant_axes=axes if table else axes[:1],
        ),
    )
    quantizer.process()
    return quantizer.model.model


def bnb4(model: onnx.ModelProto) -> onnx.ModelProto:
    quantizer = MatMulBnb4Quantizer(bare(model), MatMulBnb4Quantizer.NF4, 64)
    quantizer.process()
    return quantizer.model.model


def dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """As transformers.js' script quantises (``model_quantized.onnx``)."""

    def quantize(source: Path, target: Path) -> None:
        options = {"EnableSubgraph": True, "MatMulConstBOnly": True}
        quantize_dynamic(source, target, weight_type=QuantType.QUInt8, extra_options=options)

    return _by_files(model, quantize)


def dynamic_optimised(model: onnx.ModelProto) -> onnx.ModelProto:
    return optimised(dynamic(model))


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    return convert_float_to_float16(model)


def half_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inputs, outputs and caches stay float32 (``model_fp16.onnx``)."""
    return convert_float_to_float16(model, keep_io_types=True)


def half_inside_bare(model: onnx.ModelProto) -> onnx.ModelProto:
    return convert_float_to_float16(bare(model), keep_io_types=True, disable_shape_infer=True)


def half_but_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    kinds = ["Pow", "ReduceMean"]
    return convert_float_to_float16(model, keep_io_types=True, op_block_list=kinds)


def q4_half_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model_q4f16.onnx``."""
    return half_inside(q4_asymmetric(model))


def optimised(model: onnx.ModelProto) -> onnx.ModelProto:
    """As ONNX Runtime saves what it runs."""

    def optimise(source: Path, target: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return _by_files(model, optimise)


def _by_files(model: onnx.ModelProto, process: Callable[[Path, Path], None]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
        onnx.save(model, source)
        process(source, target)
        return onnx.load(target)
