from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import run
from tests.files.models import snapshot
from tests.runtime.models import DYNAMO, converted, original
from tq_onnx.conversion.calibrationfile import read_calibration
from tq_onnx.integrations import tokens as tokens_module
from tq_onnx.integrations.bundled import build_bundled, bundled_directory, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.integrations.tokens import calibration_text
from tq_onnx.quality.calibrate import calibrate

BODIES = ("--no-library", "--threads", 1)
NAME = "model.calibration.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, and a text."""
    model = build_bundled("dynamo", tmp_path_factory.mktemp("calibrate") / "m")
    (model.parent / "text.txt").write_text(heldout_text(), encoding="utf-8")
    return model.parent


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small model with the tokenizer of another, and a text; for what is refused before."""
    path = Path(shutil.copyfile(original(DYNAMO), tmp_path / "model.onnx"))
    shutil.copyfile(bundled_directory() / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("What the tokenizer knows. " * 40)
    return path


def test_a_model_and_a_text(folder: Path) -> None:
    before = snapshot(folder)
    model, target = folder / "model.onnx", folder / NAME
    text = ("--text", folder / "text.txt", "--tokens", 300, "--context", 128)
    outcome = run("calibrate", model, *text, *BODIES)
    assert outcome.code == 0, outcome.err
    few = "the calibration has read 300 tokens, too few to tell all directions"
    told = f"{few}: calibrate on a text of 4,096 tokens or more"
    assert outcome.err == f"warning: {told}\n"
    size = target.stat().st_size
    assert "tokens  300 in windows of up to 128" in outcome.out
    assert f"{target} ({size:,} bytes)" in outcome.out
    assert f"tq-onnx convert {model} --calibration {target}" in outcome.out
    after = snapshot(folder)
    assert after.pop(NAME)
    assert after == before
    found = read_calibration(target)
    ids = load_tokenizer(folder).encode(heldout_text())[:300]
    wanted = calibrate(model, ids, context=128, library=False, threads=1)
    np.testing.assert_allclose(
        found.layers[1].k_energy, wanted.layers[1].k_energy, rtol=1e-5, atol=1e-9
    )
    assert found.text_digest == wanted.text_digest

    sentence = run("calibrate", model, *text, *BODIES).sentence(4)
    assert sentence == f"{target}: the output exists; give --overwrite or another output"
    # A folder stands for the decoder in it; --skip leaves out what comes before.
    outcome = run("calibrate", folder, *text, *BODIES, "--skip", 300, "--overwrite", "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["output"] == str(target)
    assert document["bytes"] == size
    assert (document["tokens"], document["context"]) == (300, 128)
    assert [text[: len(few) - 27] for text in document["warnings"]] == [few[:-27]]
    assert document["layers"] == len(found.layers)
    skipped = load_tokenizer(folder).encode(heldout_text())[300:600]
    wanted = calibrate(model, skipped, context=128, library=False, threads=1)
    assert document["text_digest"] == wanted.text_digest != found.text_digest
    target.unlink()


def test_without_a_text(folder: Path, tmp_path: Path) -> None:
    """The one that comes with tq-onnx is read, in windows as long as the model takes."""
    output = tmp_path / "own"
    few = ("--tokens", 80, "-o", output)
    outcome = run("calibrate", folder, *few, *BODIES, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["source"] == "the text that comes with tq-onnx"
    ids = load_tokenizer(folder).encode(calibration_text())[:80]
    digest = hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()
    assert outcome.document["text_digest"] == digest
    assert outcome.document["context"] == 80  # no window is longer than the text
    configuration = json.loads((folder / "config.json").read_text())
    try:
        changed = configuration | {"max_position_embeddings": 70}
        (folder / "config.json").write_text(json.dumps(changed))
        outcome = run("calibrate", folder, *few, *BODIES, "--json", "--overwrite")
        assert outcome.document["context"] == 70
    finally:
        (folder / "config.json").write_text(json.dumps(configuration))


def test_enough_text_is_not_spoken_of(folder: Path, tmp_path: Path) -> None:
    output = ("--tokens", 600, "--context", 256, "-o", tmp_path / "own")
    outcome = run("calibrate", folder, *output, *BODIES)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""


def test_the_text_that_comes_along_is_a_mixture() -> None:
    text = calibration_text()
    assert 30_000 < len(text.encode()) < 40_000
    for piece in (
        "def parse_duration",
        "Der Zug hielt",
        "SELECT c.name",
        "今天早上",
        '{\n  "name"',
    ):
        assert piece in text


def test_what_is_refused(small: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    text = ("--text", tmp_path / "text.txt")
    pipe = tmp_path / "pipe"
    short = tmp_path / "short.txt"
    binary = tmp_path / "binary"
    elsewhere = tmp_path / "elsewhere"

    assert "--tokens" in run("calibrate", small, *text, "--tokens", 63).sentence(2)
    assert "missing" in run("calibrate", tmp_path / "missing", *text).sentence(4)
    assert "no such file" in run("calibrate", small, "--text", tmp_path / "no").sentence(4)
    assert "UTF-8" in run("calibrate", small, "--text", tmp_path).sentence(4)
    binary.write_bytes(b"\xff\xfe\x00" * 99)
    assert "UTF-8" in run("calibrate", small, "--text", binary).sentence(4)
    binary.unlink()

    short.write_text("Not much.")
    sentence = run("calibrate", small, "--text", short).sentence(2)
    assert sentence.endswith("statistics need at least 64; give a longer text")
    sentence = run("calibrate", small, *text, "--skip", 10**6).sentence(2)
    assert "behind the first 1,000,000 tokens there are 0 tokens" in sentence
    short.write_text("")
    assert "there are 0 tokens" in run("calibrate", small, "--text", short).sentence(2)
    short.unlink()

    # The tokenizer is of a larger model.
    assert "the model knows 97" in run("calibrate", small, *BODIES).sentence(2)
    assert "the model knows 97" in run("calibrate", small, *text, *BODIES).sentence(2)
    outcome = run("calibrate", small, *text, "--tokenizer", tmp_path / "none")
    assert "there is no readable tokenizer" in outcome.sentence(4)

    for output, code, says in (
        (small, 4, "is no calibration file"),
        (tmp_path / "text.txt", 4, "is no calibration file"),
        (tmp_path, 4, "the output is a folder"),
        (tmp_path / "text.txt" / "x", 4, "text.txt"),
    ):
        outcome = run("calibrate", small, *text, "-o", output, "--overwrite")
        assert says in outcome.sentence(code)
    os.mkfifo(pipe)
    outcome = run("calibrate", small, *text, "-o", pipe, "--overwrite")
    assert "the output is no regular file" in outcome.sentence(4)
    pipe.unlink()

    assert snapshot(tmp_path) == before
    shutil.copytree(tmp_path, elsewhere, ignore=shutil.ignore_patterns("elsewhere"))
    (elsewhere / "tokenizer.json").unlink()
    outcome = run("calibrate", elsewhere / "model.onnx", *text)
    assert "there is no tokenizer.json beside the model" in outcome.sentence(4)
    assert "--tokenizer" in outcome.sentence(4)
    # `convert` has no such flag.
    sentence = run("convert", elsewhere, "--calibrate").sentence(4)
    told = "run `tq-onnx calibrate` first, with the folder that has it as --tokenizer"
    assert sentence.endswith(f"beside the model; {told}")
    shutil.copyfile(converted(DYNAMO), elsewhere / "model.onnx")
    outcome = run("calibrate", elsewhere, *text, "--tokenizer", tmp_path, *BODIES)
    assert "already" in outcome.sentence(3)
    assert "calibration" not in "".join(snapshot(tmp_path))


def test_a_damaged_model_is_refused_as_convert_refuses_it(small: Path) -> None:
    """Before the tokenizer is looked for, which may be missing, too."""
    small.write_bytes(small.read_bytes()[:-1000])
    (small.parent / "tokenizer.json").unlink()
    sentence = run("convert", small).sentence(4)
    assert "damaged or cut short" in sentence
    assert run("calibrate", small).sentence(4) == sentence
    for model in (small, small.parent):
        assert run("convert", model, "--calibrate").sentence(4) == sentence
    assert {path.name for path in small.parent.iterdir()} == {small.name, "text.txt"}


class BeginningTokenizer:
    """Every text begins with token 5."""

    eos_ids = ()

    def encode(self, text: str) -> list[int]:
        return [5, *(1 + ord(char) % 50 for char in text)]

    def decode(self, tokens: list[int]) -> str:
        raise AssertionError


@pytest.mark.parametrize("skip", [0, 100])
def test_every_window_begins_as_texts_do(
    small: Path, monkeypatch: pytest.MonkeyPatch, skip: int
) -> None:
    monkeypatch.setattr(tokens_module, "load_tokenizer", lambda _: BeginningTokenizer())
    text = small.with_name("text.txt")
    outcome = run(
        "calibrate", small, "--text", text, *BODIES, "--skip", skip,
        "--tokens", 64, "--context", 16, "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.document["tokens"] == 64
    found = read_calibration(Path(outcome.document["output"]))
    ids = BeginningTokenizer().encode(text.read_text())[max(skip, 1) :][:64]
    wanted = calibrate(small, ids, context=16, begin=[5], library=False, threads=1)
    assert found.text_digest == wanted.text_digest
    # Five windows of 15 tokens and what begins them.
    assert found.counts[0] == 5
    assert found.counts.sum() == 64 + 5
    np.testing.assert_array_equal(
        found.layers[0].k_mean[0], wanted.layers[0].k_mean[0].astype(np.float32)
    )
    variance = found.layers[0].k_energy[0] - found.layers[0].k_mean[0] ** 2
    np.testing.assert_allclose(variance, 0, atol=1e-5)


def test_convert_calibrate_convert_in_the_order_of_the_readme(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "tiny"
    ignored = shutil.ignore_patterns("*.calibration.safetensors", "*.int*")
    shutil.copytree(folder, source, ignore=ignored)
    assert run("convert", source / "model.onnx").code == 0
    outcome = run("calibrate", source, "--tokens", 512, "--context", 64, "--threads", 1)
    assert outcome.code == 0, outcome.err
    file = source / "model.calibration.safetensors"
    assert f"tq-onnx convert {source} --calibration {file}\n" in outcome.out
    for words in (source, source / "model.onnx"):
        assert run("convert", words, "--calibration", file).code == 0
    assert (source / "model.int4-cal.onnx").is_file()
    assert (tmp_path / "tiny-int4-cal" / "model.onnx").is_file()


def test_an_output_that_exists_is_told_before_the_model_reads_a_text(small: Path) -> None:
    occupied = small.with_name("occupied")
    occupied.mkdir()
    output = occupied / "model.onnx"
    output.touch()
    for model, place in ((small, output), (small.parent, occupied), (small.parent, output)):
        outcome = run("convert", model, "-o", place, "--calibrate")
        assert "output" in outcome.sentence(4)
    assert not list(small.parent.glob("*.safetensors"))
