"""Biases of the projections of keys: found in every export, and taken from the keys or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

import tq_onnx
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.biases import NO_BIASES, Biases, _Search, find_biases
from tq_onnx.conversion.original import recognise_original
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.load import load
from tq_onnx.verification.checks import failed

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMS = (
    *("dynamo-llama", "dynamo-phi3", "dynamo-gemma3", "dynamo-op18-sdpa-hd128-fp16"),
    *("dynamo-op23-sdpa", "dynamo-op24-sdpa", "legacy-op17-sdpa", "legacy-one-token", "optimum"),
    *("hf-decode", "hf-ortcpu-prefill", "hf-static-decode", "hf-static-prefill", "mobius-default"),
    *("mobius-static", "genai-cpu-int4", "genai-cpu-fp16", "genai09-cpu-fp32", "genai-dml-fp16"),
)

SCALED = frozenset(
    {
        *("dynamo-gemma3", "dynamo-op18-sdpa-hd128-fp16", "dynamo-op24-sdpa", "hf-decode"),
        *("hf-static-decode", "hf-static-prefill", "optimum", "legacy-op17-sdpa"),
        "legacy-one-token",
    }
)


def plant(name: str, folder: Path, norm: float = 300.0) -> tuple[Path, list[npt.NDArray]]:
    """Write an export whose keys have biases, and return these as its nodes add them."""
    path, planted = folder / f"{name}.onnx", []
    loaded = load(FIXTURES / f"{name}.onnx")
    recognition = recognise_original(loaded, path).recognition
    assert recognition.interface is not None
    search, graph = _Search(loaded.model, recognition.interface, recognition), loaded.model.graph
    rng = np.random.default_rng(0)
    for site in recognition.sites:
        (value,) = search._sources(site, "key").values
        width = int(value.shape[-1])  # type: ignore[index,arg-type]
        bias = rng.standard_normal(width) * norm / np.sqrt(site.head_size)
        assert value.dtype is not None
        tensor = ir.tensor(bias.astype(value.dtype.numpy()), name=f"bias.{site.layer}")
        constant = ir.Value(name=tensor.name, const_value=tensor, type=value.type)
        constant.shape = ir.Shape(bias.shape)
        graph.register_initializer(constant)
        uses, maker = [*value.uses()], value.producer()
        node = ir.Node("", "Add", [value, constant])
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        node.outputs[0].name = f"biased.{site.layer}"
        assert maker is not None
        graph.insert_after(maker, node)
        for use in uses:
            use.node.replace_input_with(use.idx, node.outputs[0])
        planted.append(np.asarray(tensor.numpy(), np.float64))
    ir.save(loaded.model, path)
    return path, planted


def biases_of(path: Path) -> Biases:
    loaded = load(path)
    return find_biases(loaded.model, recognise_original(loaded, path).recognition)


@pytest.mark.parametrize("name", FORMS)
def test_a_bias_is_found_with_its_angles(name: str, tmp_path: Path) -> None:
    path, planted = plant(name, tmp_path)
    biases = biases_of(path)
    assert not biases_of(FIXTURES / f"{name}.onnx").layers
    assert biases.turning == {*range(len(planted))}
    for index, bias in enumerate(planted):
        known = biases.layers[index]
        assert not known.reason
        assert known.norm > 100
        if name in SCALED:  # the weight of a norm follows
            continue
        expected = bias[-known.key.size :] if bias.size >= known.key.size else bias
        if name == "dynamo-phi3":  # queries, keys and values side by side
            expected = bias[-2 * known.key.size : -known.key.size]
        heads = expected.reshape(-1, known.key.shape[1])
        assert np.allclose(known.key, np.broadcast_to(heads, known.key.shape), rtol=1e-6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path, _ = plant("dynamo-llama", tmp_path_factory.mktemp("llama"))
    converted = path.with_suffix(".int4.onnx")
    report = tq_onnx.convert(path, output=converted, residual_length=0, sink_tokens=0)
    assert report.key_bias > 250
    return path, converted


def test_verify_holds(llama: tuple[Path, Path]) -> None:
    assert tq_onnx.verify(*llama, quick=True).holds


def test_verify_holds_in_pages(llama: tuple[Path, Path], tmp_path: Path) -> None:
    report = tq_onnx.convert(llama[0], output=tmp_path / "pages.onnx", target="paged")
    assert report.plan.rotary
    assert tq_onnx.verify(llama[0], report.output, quick=True).holds


def test_a_bias_that_was_left_fails(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "find_biases", lambda *_: NO_BIASES)
    report = tq_onnx.convert(llama[0], output=tmp_path / "left.onnx")
    lost = failed(tq_onnx.verify(llama[0], report.output, quick=True).checks)
    assert any("the keys keep a bias of norm" in check.detail for check in lost)


def test_padding_on_the_left_costs_nothing(llama: tuple[Path, Path]) -> None:
    session = ort.InferenceSession(llama[1], tq_onnx.session_options())
    rng = np.random.default_rng(1)
    ids, beside = rng.integers(0, 60, (1, 40)), rng.integers(0, 60, (1, 57))

    def last(ids: npt.NDArray, mask: npt.NDArray) -> npt.NDArray:
        feeds = {}
        for port in session.get_inputs():
            if port.type == "tensor(uint8)":
                sizes = [len(ids), port.shape[1], 0, port.shape[3]]
                feeds[port.name] = np.zeros(sizes, np.uint8)
            else:
                places = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
                feeds[port.name] = {"input_ids": ids, "attention_mask": mask}.get(port.name, places)
        return session.run(None, feeds)[0][0, -1]

    mask = np.ones((2, 57), np.int64)
    mask[0, :17] = 0
    padded = np.concatenate([np.pad(ids, ((0, 0), (17, 0))), beside])
    assert np.allclose(last(ids, np.ones((1, 40), np.int64)), last(padded, mask), atol=1e-4)


@pytest.mark.parametrize("target", ["web", "cann"])
def test_targets_without_offsets_refuse_long_biases(target: str, tmp_path: Path) -> None:
    path, _ = plant("dynamo-op18-sdpa", tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"keys have a bias of norm [0-9]+, which would"
    ):
        tq_onnx.convert(path, output=tmp_path / "out.onnx", target=target)
    assert not (tmp_path / "out.onnx").exists()
