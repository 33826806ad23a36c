from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.run import run
from tests.runtime.models import DYNAMO, converted, original
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.ops.operators import Encode

FEW = ("--tokens", 64, "--context", 64, "--new-tokens", 4, "--threads", 1)


@pytest.fixture(scope="module")
def plain() -> tuple[Path, Path]:
    return original(DYNAMO), converted(DYNAMO)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A conversion whose first rotation was tampered with."""
    proto = onnx.load(converted(DYNAMO))
    encoder = next(node for node in proto.graph.node if node.op_type == Encode.name)
    name = encoder.input[Encode.rotation.slot]
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor) * np.float32(1.2)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    path = tmp_path / "bad.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_a_good_conversion(plain: tuple[Path, Path]) -> None:
    outcome = run("verify", *plain, *FEW)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert "verified: 17 of 17 checks hold" in outcome.out
    assert "FAILED" not in outcome.out
    assert "7.53 times smaller" in outcome.out
    assert "pseudo-random ids, no language: a weak test; use --text and --tokenizer" in outcome.out


def test_a_tampered_conversion(plain: tuple[Path, Path], bad: Path) -> None:
    outcome = run("verify", plain[0], bad, *FEW)
    sentence = outcome.sentence(5)
    assert "baked tables match the plan" in sentence
    assert str(bad) in sentence
    assert "NOT verified" in outcome.out


def test_json_is_one_document_whatever_the_verdict(plain: tuple[Path, Path], bad: Path) -> None:
    good = run("verify", *plain, *FEW, "--json")
    assert good.code == 0
    assert good.err == ""
    document = good.document
    assert document["holds"] is True
    report = document["report"]
    assert report["memory"]["converted_bytes_per_token"] == 272
    assert len(report["greedy"]["original"]) == 4
    assert {check["holds"] for check in report["checks"]} == {True}
    failed = run("verify", plain[0], bad, *FEW, "--json")
    failed.sentence(5)
    assert failed.document["holds"] is False


def test_quick_says_what_it_leaves_out(plain: tuple[Path, Path], bad: Path) -> None:
    outcome = run("verify", *plain, "--threads", 1, "--quick")
    assert outcome.code == 0, outcome.err
    left_out = (
        "quality on a text and greedy continuation, caches fed in chunks and in place, errors of "
        "rows against theory, function bodies beside the kernels"
    )
    last = outcome.out.strip().splitlines()[-1]
    assert last == f"verified: 12 of 12 checks hold; --quick left out: {left_out}"
    document = run("verify", *plain, "--threads", 1, "--quick", "--json").document
    report = document["report"]
    assert ", ".join(report["left_out"]) == left_out
    assert [report[name] for name in ("quality", "greedy", "modes", "layers")] == [None] * 3 + [[]]
    assert report["tokens"] == 64
    assert {one["backend"] for one in report["ladder"]} == {"kernel"}
    sentence = run("verify", plain[0], bad, "--threads", 1, "--quick").sentence(5)
    assert "baked tables match the plan" in sentence
    assert run("verify", *plain, *FEW, "--json").document["report"]["left_out"] == []


def test_a_long_verification_says_how_long_it_takes(
    plain: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tq_onnx.cli import terminal as module

    monkeypatch.setattr(module, "_LONG", 0)
    outcome = run("verify", *plain, *FEW)
    (said,) = outcome.duration.splitlines()
    assert said.startswith("this takes about ")
    assert said.endswith("; verify --quick leaves out what takes longest")
    assert "--quick" not in run("verify", *plain, "--threads", 1, "--quick").duration


def test_bodies_only(plain: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    outcome = run("verify", *plain, *FEW, "--no-library")
    assert outcome.code == 0
    assert "kernel equals" not in outcome.out
    assert "nowhere.so" in run("verify", *plain, *FEW).sentence(4)


def test_a_text_is_read_with_the_tokenizer(plain: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("No digit of it, no word of it: only what the tokenizer knows. " * 4)
    sentence = run("verify", *plain, *FEW, "--text", text).sentence(2)
    assert "--tokenizer" in sentence
    # The bundled tokenizer is bytes; the fixture knows 97 tokens only.
    sentence = run(
        "verify", *plain, *FEW, "--text", text, "--tokenizer", bundled_directory()
    ).sentence(2)
    assert "the model knows 97" in sentence


def test_a_text_that_is_not_there(plain: tuple[Path, Path], tmp_path: Path) -> None:
    sentence = run(
        "verify",
        *plain,
        "--text",
        tmp_path / "none.txt",
        "--tokenizer",
        bundled_directory(),
    ).sentence(4)
    assert "none.txt" in sentence


def test_a_folder_without_a_tokenizer(plain: tuple[Path, Path], tmp_path: Path) -> None:
    assert str(tmp_path) in run("verify", *plain, "--tokenizer", tmp_path).sentence(4)


def test_files_that_are_not_what_they_should_be(plain: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = plain
    assert "missing.onnx" in run("verify", tmp_path / "missing.onnx", after).sentence(4)
    assert "missing.onnx" in run("verify", before, tmp_path / "missing.onnx").sentence(4)
    junk = tmp_path / "junk.onnx"
    junk.write_text("junk")
    assert "junk.onnx" in run("verify", before, junk).sentence(4)
    assert "converted one already" in run("verify", after, after).sentence(3)
    assert "was not converted" in run("verify", before, before).sentence(3)
    assert run("verify", before).code == 2
    assert run("verify", before, after, "--tokens", 3).code == 2


def test_the_tokenizer_beside_the_model_gives_the_held_out_text(tmp_path: Path) -> None:
    from tq_onnx.integrations.bundled import build_bundled

    model = build_bundled("dynamo", tmp_path / "m")
    assert run("convert", model).code == 0
    outcome = run("verify", model, model.with_name("model.int4.onnx"), *FEW)
    assert outcome.code == 0, outcome.err
    assert "held-out text of the bundled model" in outcome.out
    shutil.rmtree(tmp_path / "m")


def test_folders_stand_for_the_models_in_them(tmp_path: Path) -> None:
    for path, name in ((original(DYNAMO), "a"), (converted(DYNAMO), "b")):
        (tmp_path / name).mkdir()
        shutil.copyfile(path, tmp_path / name / "model.onnx")
    outcome = run("verify", tmp_path / "a", tmp_path / "b", *FEW)
    assert outcome.code == 0, outcome.err
    assert "verified: 17 of 17 checks hold" in outcome.out
    assert run("verify", tmp_path / "b", tmp_path / "a", *FEW).code == 3
