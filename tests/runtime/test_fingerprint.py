"""Calibrations and models: all exports of one model are taken, another model is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from tests.runtime.models import DYNAMO, GENAI, HALF, original
from tq_onnx.codec.calibration import Calibration
from tq_onnx.errors import UsageError
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.runtime.fingerprint import expect_model_of

OTHER = "the calibration file is of another model"
WEIGHT = 32
"""Smallest dimension of the weights that a layer multiplies with."""


def words(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 61, count)


@cache
def calibration(path: Path) -> Calibration:
    return calibrate(path, words(96), context=24, library=False, threads=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as one export, whose weights are in the file."""
    folder = tmp_path_factory.mktemp("trained")
    model = onnx.load(build_bundled("dynamo", folder / "m"))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def changed(path: Path, change: Callable[[onnx.ModelProto], None], name: str) -> Path:
    model = onnx.load(path)
    change(model)
    output = path.with_name(f"{name}.onnx")
    onnx.save(model, output)
    return output


def in_int4(path: Path) -> Path:
    quantiser = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantiser.process()
    output = path.with_name("int4.onnx")
    quantiser.model.save_model_to_file(str(output))
    return output


def rounded_to_half(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).clip(-6e4, 6e4)
            array = array.astype(np.float16).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def renamed(model: onnx.ModelProto) -> None:
    names = {tensor.name: f"w{n}" for n, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def of_another_training(model: onnx.ModelProto) -> None:
    """The same shapes, and weights of the same sizes."""
    rng = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and min(tensor.dims) >= WEIGHT:
            array = numpy_helper.to_array(tensor)
            draws = rng.standard_normal(array.shape).astype(array.dtype) * array.std()
            tensor.CopyFrom(numpy_helper.from_array(draws, tensor.name))


def test_every_export_of_the_model_is_taken(
    trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = calibration(trained)
    fused = build_bundled("genai", tmp_path_factory.mktemp("fused") / "m")
    for path in (
        trained,
        fused,
        in_int4(trained),
        changed(trained, rounded_to_half, "half"),
        changed(trained, renamed, "renamed"),
    ):
        assert expect_model_of(path, found) == ()


@pytest.mark.parametrize(
    ("name", "other"),
    [(GENAI, DYNAMO), ("hf-prefill", "hf-decode"), ("legacy-one-token", "legacy-op17-sdpa")],
)
def test_other_forms_of_the_model_are_taken(name: str, other: str) -> None:
    """Rotary embedding inside an operator, no caches, single tokens."""
    assert expect_model_of(original(name), calibration(original(other))) == ()
    assert expect_model_of(original(other), calibration(original(name))) == ()


def test_another_model_of_the_same_shape_is_refused(trained: Path) -> None:
    other = changed(trained, of_another_training, "other")
    for model, of in ((other, trained), (trained, other)):
        with pytest.raises(UsageError, match=f"{OTHER}: .*layer 0 caches something else") as caught:
            expect_model_of(model, calibration(of))
        assert "\n" not in str(caught.value)


def exchange_layers(found: Calibration) -> Calibration:
    first, second, *rest = found.layers
    return replace(found, layers=(second, first, *rest))


def reverse_heads(found: Calibration) -> Calibration:
    layers = [
        replace(layer, k_fingerprint=layer.k_fingerprint[::-1])  # type: ignore[index]
        for layer in found.layers
    ]
    return replace(found, layers=(*found.layers[:2], *layers[2:]))


def exchange_caches(found: Calibration) -> Calibration:
    layers = [
        replace(layer, k_fingerprint=layer.v_fingerprint, v_fingerprint=layer.k_fingerprint)
        for layer in found.layers
    ]
    return replace(found, layers=(*found.layers[:1], *layers[1:]))


@pytest.mark.parametrize(
    ("change", "layer"), [(exchange_layers, 0), (reverse_heads, 2), (exchange_caches, 1)]
)
def test_other_layers_and_heads_are_refused(
    trained: Path, change: Callable[[Calibration], Calibration], layer: int
) -> None:
    with pytest.raises(UsageError, match=f"{OTHER}: .*layer {layer} caches"):
        expect_model_of(trained, change(calibration(trained)))


def test_what_cannot_be_known_is_said() -> None:
    found = calibration(original(DYNAMO))
    (note,) = expect_model_of(original("genai-cuda-fp16"), found)
    assert "was not run to tell whether the calibration file is of it" in note
    assert "implemented only on the CUDA and WebGPU EPs" in note
    (note,) = expect_model_of(original("hf-static-prefill"), calibration(original("hf-decode")))
    assert "it takes no prompt of 16 tokens" in note
    with pytest.raises(UsageError, match=f"{OTHER}: it knows token 94, and this model 61 tokens"):
        expect_model_of(original("hf-decode"), found)


def test_half_precision() -> None:
    assert expect_model_of(original(HALF), calibration(original(HALF))) == ()
