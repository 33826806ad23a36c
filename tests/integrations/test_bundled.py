"""The bundled model is rebuilt without torch, and both routes give the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.integrations import bundled
from tq_onnx.integrations.bundled import (
    COMPANION_FILES,
    DATA_FILE,
    METADATA_WEIGHTS,
    MODEL_FILE,
    ROUTES,
    WEIGHTS_FILE,
    WeightRecipe,
    build_bundled,
    bundled_directory,
    heldout_text,
    recipes_from_json,
    recipes_to_json,
)
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.integrations.weights import read_safetensors

TOLERANCE = 1e-4
Caches = dict[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bundled")
    return {route: build_bundled(route, root / route) for route in ROUTES}


@pytest.fixture(scope="module")
def sessions(models: dict[str, Path]) -> dict[str, onnxruntime.InferenceSession]:
    return {
        route: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for route, path in models.items()
    }


def step(
    session: onnxruntime.InferenceSession, tokens: list[int], caches: Caches, past: int
) -> tuple[npt.NDArray[np.float32], Caches]:
    """Run new tokens after ``past`` cached ones; return the logits and the grown caches."""
    total = past + len(tokens)
    feeds = {
        "input_ids": np.array([tokens], np.int64),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(past, total, dtype=np.int64)[None],
    }
    for info in session.get_inputs():
        if info.name.startswith("past_key_values"):
            empty = np.zeros((1, 2, 0, 128), np.float32)
            present = info.name.replace("past_key_values", "present")
            feeds[info.name] = caches.get(present, empty)
    wanted = {info.name for info in session.get_inputs()}
    results = session.run(None, {name: feed for name, feed in feeds.items() if name in wanted})
    named = dict(zip((info.name for info in session.get_outputs()), results, strict=True))
    return named.pop("logits"), named


def test_files_are_those_of_an_export(models: dict[str, Path]) -> None:
    for path in models.values():
        names = {entry.name for entry in path.parent.iterdir()}
        assert names == {MODEL_FILE, DATA_FILE, *COMPANION_FILES}
        assert METADATA_WEIGHTS not in ir.load(path).metadata_props


def test_weights_are_external_and_stored_once(models: dict[str, Path]) -> None:
    stored = sum(t.size for t in read_safetensors(bundled_directory() / WEIGHTS_FILE).values())
    for path in models.values():
        assert path.stat().st_size < 1_200_000
        data = (path.parent / DATA_FILE).stat().st_size
        # Float32, with gaps for alignment; an export may hold the tied embedding twice.
        assert 4 * stored <= data < 4 * (stored + 260 * 192) + 64 * 64


def test_no_weight_is_left_inside_a_skeleton() -> None:
    for route in ROUTES:
        model = ir.load(bundled_directory() / f"{route}.skeleton.onnx")
        inside = {
            name
            for name, value in model.graph.initializers.items()
            if value.const_value is not None
            and not isinstance(value.const_value, ir.ExternalTensor)
            and value.const_value.size > 64
        }
        assert inside <= {"cos_cache", "sin_cache"}


def test_routes_differ_in_form(models: dict[str, Path]) -> None:
    operators = {
        route: {node.op_type for node in ir.load(path).graph} for route, path in models.items()
    }
    assert "GroupQueryAttention" in operators["genai"]
    assert "Softmax" in operators["dynamo"]
    assert "GroupQueryAttention" not in operators["dynamo"]
    assert ir.load(models["dynamo"]).opset_imports[""] == 18


def test_routes_agree_on_heldout_text(
    sessions: dict[str, onnxruntime.InferenceSession],
) -> None:
    tokens = load_tokenizer(bundled_directory()).encode(heldout_text()[:1000])[:320]
    past: dict[str, Caches] = {route: {} for route in ROUTES}
    position = 0
    # A prefill, another one on top of it, then single tokens: the caches are fed back.
    for count in (256, 60, 1, 1, 1, 1):
        new = tokens[position : position + count]
        logits = {}
        for route in ROUTES:
            logits[route], past[route] = step(sessions[route], new, past[route], position)
        np.testing.assert_allclose(logits["dynamo"], logits["genai"], rtol=0, atol=TOLERANCE)
        position += count
        for name, cache in past["dynamo"].items():
            assert cache.shape == (1, 2, position, 128)
            np.testing.assert_allclose(cache, past["genai"][name], rtol=0, atol=TOLERANCE)


def test_agreement_is_not_vacuous(sessions: dict[str, onnxruntime.InferenceSession]) -> None:
    """Negative twin: another token changes the logits by far more than the tolerance."""
    tokens = load_tokenizer(bundled_directory()).encode(heldout_text()[:64])
    logits, _ = step(sessions["dynamo"], tokens, {}, 0)
    other, _ = step(sessions["genai"], [tokens[0] ^ 1, *tokens[1:]], {}, 0)
    assert np.abs(logits - other).max() > 100 * TOLERANCE


def test_the_model_has_learned_english(
    sessions: dict[str, onnxruntime.InferenceSession],
) -> None:
    tokens = load_tokenizer(bundled_directory()).encode(heldout_text()[:512])
    logits = step(sessions["dynamo"], tokens, {}, 0)[0][0, :-1].astype(np.float64)
    largest = logits.max(-1)
    normaliser = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    nats = normaliser - logits[np.arange(len(logits)), tokens[1:]]
    # 5.56 is chance, about 3.1 the frequencies of single letters, which need no attention.
    assert nats.mean() < 2.3


def test_unknown_route(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dynamo or genai"):
        build_bundled("legacy", tmp_path)


@pytest.mark.parametrize("name", [MODEL_FILE, DATA_FILE])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputExistsError, match="exists already"):
        build_bundled("genai", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A copy of the bundled files that a test may damage."""
    directory = tmp_path / "source"
    directory.mkdir()
    for name in (WEIGHTS_FILE, "genai.skeleton.onnx"):
        (directory / name).write_bytes((bundled_directory() / name).read_bytes())
    yield directory
    assert not (tmp_path / "out").exists(), "a refusal must leave nothing behind"


def refusal(source: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        build_bundled("genai", source.parent / "out", source=source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_truncated_weights(source: Path) -> None:
    weights = source / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    assert WEIGHTS_FILE in refusal(source)


def rename_in_header(path: Path, old: str, new: str) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(old.encode(), new.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def test_weights_of_another_model(source: Path) -> None:
    rename_in_header(source / WEIGHTS_FILE, "layers.3.self_attn.v_proj", "layers.9.v_proj")
    assert "model.layers.3.attn.qkv_proj.MatMul.weight" in refusal(source)


def test_weights_of_another_shape(source: Path) -> None:
    rename_in_header(source / WEIGHTS_FILE, '"shape":[192,512]', '"shape":[512,192]')
    assert "o_proj" in refusal(source)


def test_a_missing_and_a_damaged_skeleton(source: Path) -> None:
    skeleton = source / "genai.skeleton.onnx"
    content = skeleton.read_bytes()
    skeleton.unlink()
    assert "missing or damaged" in refusal(source)
    skeleton.write_bytes(content[: len(content) // 2])
    assert "missing or damaged" in refusal(source)


def test_recipes_survive_json_and_join_in_order() -> None:
    recipes = {"w": WeightRecipe(1, (("a", True), ("b", False)))}
    assert recipes_from_json(recipes_to_json(recipes)) == recipes
    a, b = np.arange(6, dtype=np.float16).reshape(2, 3), np.ones((3, 1), np.float16)
    joined = recipes["w"].assemble({"a": a, "b": b})
    np.testing.assert_array_equal(joined, np.concatenate([a.T, b], axis=1))


def test_an_installation_without_the_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "tq_onnx" / "integrations" / "bundled.py"
    monkeypatch.setattr(bundled, "__file__", str(elsewhere))

    def no_package(name: str) -> None:
        raise bundled.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bundled.importlib.metadata, "distribution", no_package)
    with pytest.raises(ModelFileError, match="missing from this installation"):
        bundled_directory()
    installed = tmp_path / "tq_onnx" / "bundled"
    installed.mkdir(parents=True)
    (installed / WEIGHTS_FILE).touch()
    assert bundled_directory() == installed


def test_no_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import json, pathlib, sys\n"
        "from tq_onnx.integrations.bundled import build_bundled\n"
        "from tq_onnx.integrations.huggingface import load_tokenizer\n"
        "path = build_bundled('dynamo', pathlib.Path(sys.argv[1]))\n"
        "load_tokenizer(path.parent).encode('a')\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert not {"torch", "transformers"} & set(json.loads(done.stdout))


# The committed models are those that the manifest describes.


ROOT = Path(__file__).resolve().parents[2]


def test_manifest() -> None:
    done = subprocess.run(
        [sys.executable, "models/make_manifest.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
