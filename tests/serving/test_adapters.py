"""Adapters (LoRA) of onnxruntime-genai do the same to a conversion as to its original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

import onnxruntime_genai as og

from tests.integrations.genai_folder import bundled_genai
from tq_onnx.graph.builder import Builder
from tq_onnx.integrations.folderconversion import convert_folder

RANK, NEW = 4, 16


def with_adapter(folder: Path, file: Path) -> None:
    """Adds LoRA to the first projection: weights of zeros, which an adapter may replace."""
    path = folder / "model.onnx"
    model = ir.load(path)
    graph = model.graph
    node = next(node for node in graph if node.op_type == "MatMul")
    read, weight, output = node.inputs[0], node.inputs[1], node.outputs[0]
    rows, columns = (int(size) for size in weight.shape)
    shapes = {"lora_A": (rows, RANK), "lora_B": (RANK, columns)}
    behind = [(use.node, use.idx) for use in output.uses()]
    build = Builder(graph)
    down, up = (build.constant(name, np.zeros(shape, np.float32)) for name, shape in shapes.items())
    graph.inputs.extend([down, up])
    with build.before(behind[0][0], "lora"):
        small = build.op("MatMul", [read, down], "down", dtype=output.dtype)
        large = build.op("MatMul", [small, up], "up", dtype=output.dtype)
        summed = build.op("Add", [output, large], "sum", dtype=output.dtype, shape=output.shape)
    for reader, slot in behind:
        reader.replace_input_with(slot, summed)
    ir.save(model, path)
    adapter, rng = onnxruntime.AdapterFormat(), np.random.default_rng(0)
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    values = onnxruntime.OrtValue
    adapter.set_parameters(
        {name: values.ortvalue_from_numpy(weight) for name, weight in weights.items()}
    )
    adapter.export_adapter(str(file))


def answer(folder: Path, adapter: Path | None) -> list[int]:
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=64, do_sample=False)
    generator = og.Generator(model, parameters)
    if adapter is not None:
        adapters = og.Adapters(model)
        adapters.load(str(adapter), "adapter")
        generator.set_active_adapter(adapters, "adapter")
    generator.append_tokens(np.array([list(b"The state of ")], np.int32))
    found = []
    for _ in range(NEW):
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


def test_adapters_survive_a_conversion(tmp_path: Path) -> None:
    original, file = bundled_genai(tmp_path / "original", "genai"), tmp_path / "a.onnx_adapter"
    with_adapter(original, file)
    converted = convert_folder(original, tmp_path / "converted", preset="raw").output

    expected = answer(original, file)
    assert answer(converted, file) == expected
    assert answer(converted, None) == answer(original, None) != expected
