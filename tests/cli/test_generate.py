from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.run import Outcome, run
from tests.runtime.models import DYNAMO, converted, original
from tests.trained.pair import ONE_ROUTE
from tq_onnx.integrations.bundled import build_bundled, bundled_directory

PROMPT = ("--prompt", "The whale and the ship")
FEW = ("--max-new-tokens", 12, "--threads", 1)


@pytest.fixture(scope="module", params=ONE_ROUTE)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The bundled model, original and converted."""
    before = build_bundled(request.param, tmp_path_factory.mktemp(request.param) / "model")
    assert run("convert", before).code == 0
    return [before, before.with_name("model.int4.onnx")]


def continue_(model: Path, *more: object) -> Outcome:
    outcome = run("generate", model, *PROMPT, *FEW, *more)
    assert outcome.code == 0, outcome.err
    return outcome


def test_text_goes_to_stdout_and_figures_to_stderr(models: list[Path]) -> None:
    for model, per_token in zip(models, ("8,192 per token", "1,056 per token"), strict=True):
        outcome = continue_(model)
        assert outcome.out.endswith("\n")
        assert len(outcome.out.strip("\n")) > 3
        assert outcome.err.startswith(f"{model.name}: 22 + 12 tokens, ")
        assert per_token in outcome.err
        assert "tokens/s" in outcome.err


def test_every_way_to_run_a_converted_model_gives_the_same_text(models: list[Path]) -> None:
    texts = {
        continue_(models[1], *more).out
        for more in ((), ("--no-library",), ("--context", 100), ("--threads", 2))
    }
    assert len(texts) == 1


def test_json(models: list[Path]) -> None:
    outcome = continue_(models[1], "--json")
    assert outcome.err == ""
    document = outcome.document
    assert document["converted"] is True
    assert document["prompt"] == PROMPT[1]
    assert document["prompt_tokens"] == 22
    assert len(document["tokens"]) == 12
    assert document["capacity"] == 34
    assert document["cache_bytes"] == (34 + 144) * 1056  # with the rows of the exact window
    assert document["text"] == continue_(models[1]).out[:-1]
    assert continue_(models[0], "--json").document["converted"] is False


def test_a_prompt_cache(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", 8)
    options = ("--prompt-cache", tmp_path / "prompts")
    texts = [continue_(models[1], *options) for _ in range(2)]
    assert texts[0].out == texts[1].out == continue_(models[1]).out
    assert "22 + 12 tokens, " in texts[0].err
    assert "22 + 12 tokens (16 of them loaded), " in texts[1].err
    assert continue_(models[1], *options, "--json").document["cached_tokens"] == 16
    for path in (tmp_path / "prompts").iterdir():
        path.write_bytes(b"junk")
    damaged = continue_(models[1], *options)
    assert (damaged.out, damaged.err.count(" is damaged ")) == (texts[0].out, 1)
    small = run("generate", models[1], *PROMPT, *options, "--prompt-cache-size", "much")
    assert "'much' is no size" in small.sentence(2)


def test_sampling_follows_the_seed(models: list[Path]) -> None:
    def draw(seed: int) -> str:
        return continue_(models[1], "--temperature", 1.5, "--top-k", 40, "--seed", seed).out

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_prompt_from_stdin(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT[1]))
    outcome = run("generate", models[1], "--prompt", "-", *FEW)
    assert outcome.out == continue_(models[1]).out


def test_a_context_that_is_too_small(models: list[Path]) -> None:
    sentence = run("generate", models[1], *PROMPT, *FEW, "--context", 20).sentence(2)
    assert "need a capacity of 33, not 20; give a larger --context" in sentence


def test_an_empty_prompt(models: list[Path]) -> None:
    assert "prompt is empty" in run("generate", models[1], "--prompt", "").sentence(2)


def test_a_model_without_a_tokenizer() -> None:
    for model in (original(DYNAMO), converted(DYNAMO)):
        assert "--tokenizer" in run("generate", model, *PROMPT).sentence(4)


def test_a_tokenizer_that_knows_more_than_the_model() -> None:
    outcome = run("generate", converted(DYNAMO), *PROMPT, "--tokenizer", bundled_directory())
    assert "the model knows 97" in outcome.sentence(2)


def test_files_that_are_no_decoders(tmp_path: Path) -> None:
    assert "none.onnx" in run("generate", tmp_path / "none.onnx", *PROMPT).sentence(4)
    junk = tmp_path / "junk.onnx"
    junk.write_text("junk")
    assert "junk.onnx" in run("generate", junk, *PROMPT).sentence(4)


@pytest.mark.parametrize(
    "more", [("--temperature", -1), ("--max-new-tokens", 0), ("--context", 0), ("--top-k", -1)]
)
def test_options_out_of_range(more: tuple[object, ...]) -> None:
    assert run("generate", "model.onnx", *PROMPT, *more).code == 2


def test_a_prompt_is_required() -> None:
    assert run("generate", "model.onnx").code == 2


def test_a_folder_stands_for_the_model_in_it(models: list[Path], tmp_path: Path) -> None:
    folder = models[0].parent
    assert (
        continue_(folder, "--json").document["tokens"]
        == (continue_(models[0], "--json").document["tokens"])
    )
    assert run("convert", folder, "-o", tmp_path / "out").code == 0
    document = continue_(tmp_path / "out", "--json").document
    assert document["converted"] is True
    assert document["tokens"] == continue_(models[1], "--json").document["tokens"]


def test_a_tokenizer_one_folder_up(models: list[Path], tmp_path: Path) -> None:
    shutil.copytree(models[0].parent, tmp_path / "m")
    (tmp_path / "m" / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / "m" / name).rename(tmp_path / "m" / "onnx" / name)
    (tmp_path / "m" / "model.int4.onnx").unlink()
    assert continue_(tmp_path / "m").out == continue_(models[0]).out
    assert continue_(tmp_path / "m" / "onnx" / "model.onnx").out == continue_(models[0]).out
    (tmp_path / "m" / "onnx").rename(tmp_path / "m" / "other")
    outcome = run("generate", tmp_path / "m" / "other" / "model.onnx", *PROMPT)
    assert "no tokenizer.json" in outcome.sentence(4)
