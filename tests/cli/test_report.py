from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from tests.cli.run import run
from tests.runtime.models import DYNAMO, GENAI, converted, original
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled, bundled_directory
from tq_onnx.targets.registry import TARGETS
from tq_onnx.targets.restore import METADATA_LAYERS

FEW = ("--tokens", 64, "--context", 32, "--threads", 1)


@pytest.fixture(scope="module")
def plain() -> tuple[Path, Path]:
    return original(DYNAMO), converted(DYNAMO)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for JavaScript runtimes, without TurboQuant operators."""
    output = tmp_path_factory.mktemp("web") / "model.onnx"
    convert(original(DYNAMO), output, preset="int4", target=TARGETS["web"])
    return output


def test_a_table_and_a_picture(plain: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "cost.svg"
    outcome = run("report", *plain, *FEW, "--layers", "--picture", picture)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    for words in ("int4", "3.76", "lloyd_max 4"):
        assert words in outcome.out
    assert "62 predictions, 2 windows of 32 tokens" in outcome.out
    assert "pseudo-random ids, no language: a weak test; use --text and --tokenizer" in outcome.out
    assert ">int4, no window<" in picture.read_text()


def test_json_is_one_document(plain: tuple[Path, Path]) -> None:
    outcome = run("report", *plain, *FEW, "--json", "--no-library")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["kernels"] is False
    (model,) = document["models"]
    assert model["preset"] == "int4"
    assert model["path"] == str(plain[1])
    assert model["bytes_per_token"] == 272
    assert model["compression"] == pytest.approx(256 / 34)
    assert {"kl_mean", "kl_p99", "perplexity_change", "top1_agreement"} <= set(model["quality"])
    assert [layer["layer"] for layer in model["layers"]] == [0, 1]
    assert model["layers"][0]["attention_cosine"] > 0.98


def test_the_bundled_model_reads_its_held_out_text(tmp_path: Path) -> None:
    model = build_bundled("dynamo", tmp_path / "m")
    assert (
        run("convert", model, "--preset", "int4", "--residual-length", 0, "--sink-tokens", 0).code
        == 0
    )
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.move(model.with_name("model.int4.onnx"), folder / "model.onnx")
    shutil.copyfile(model.with_name("model.onnx.data"), folder / "model.onnx.data")
    models = (tmp_path / "m", folder, "--tokens", 512, "--context", 256)
    outcome = run("report", *models, "--json", "--threads", 1)
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["source"] == "the held-out text of the bundled model"
    assert document["windows"] == 2
    int4 = document["models"][0]
    assert 3 < document["perplexity"] < 5
    assert abs(int4["quality"]["perplexity_change"]) < 0.01
    for layer in int4["layers"]:
        assert layer["key_error"] == pytest.approx(layer["key_theory"], rel=0.05)
        assert layer["value_error"] == pytest.approx(layer["value_theory"], rel=0.05)


def test_a_web_model_has_the_figures_that_verify_has(plain: tuple[Path, Path], web: Path) -> None:
    outcome = run("report", plain[0], web, *FEW, "--stride", 16, "--json")
    assert outcome.code == 0, outcome.err
    (model,) = outcome.document["models"]
    found = run("verify", plain[0], web, *FEW, "--new-tokens", 2, "--json").document["report"]
    for name in ("kl_mean", "top1_agreement"):
        assert model["quality"][name] == pytest.approx(found["quality"][name], rel=1e-5)
    assert [layer["key_error"] < 0.01 for layer in model["layers"]] == [True, True]


def test_no_figures_of_a_damaged_web_model(
    plain: tuple[Path, Path], web: Path, tmp_path: Path
) -> None:
    model = onnx.load(web)
    (weight,) = (w for w in model.graph.initializer if w.name.endswith("model.norm.weight"))
    weight.raw_data = weight.raw_data[4:] + weight.raw_data[:4]
    onnx.save(model, tmp_path / "weight.onnx")
    (record,) = (entry for entry in model.metadata_props if entry.key == METADATA_LAYERS)
    record.value = "[]"
    onnx.save(model, tmp_path / "record.onnx")
    reasons = {"weight": "weights and nodes are the original's", "record": "its operators are not"}
    for name, reason in reasons.items():
        path = tmp_path / f"{name}.onnx"
        assert reason in run("report", plain[0], path, *FEW).sentence(5)


def test_what_is_refused(plain: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = plain
    assert run("report", before).code == 2
    assert run("report", before, after, "--tokens", 3).code == 2
    assert "missing.onnx" in run("report", before, tmp_path / "missing.onnx").sentence(4)
    assert "was not converted" in run("report", before, after, before, *FEW).sentence(3)
    assert "was not made from" in run("report", original(GENAI), after, *FEW).sentence(5)
    picture = run("report", *plain, *FEW, "--picture", tmp_path / "cost.txt")
    assert "cost.txt" in picture.sentence(2)
    text = tmp_path / "text.txt"
    text.write_text("No digit of it, no word of it: only what the tokenizer knows. " * 4)
    assert "--tokenizer" in run("report", *plain, *FEW, "--text", text).sentence(2)
    sentence = run(
        "report", *plain, *FEW, "--text", text, "--tokenizer", bundled_directory()
    ).sentence(2)
    assert "the model knows 97" in sentence
