"""The model for lm-eval in examples/evaluation: its likelihoods are those of ``report``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.quality.report import report

FOLDER = Path(__file__).parents[2] / "examples" / "evaluation"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


scoring = module("scoring")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source = build_bundled("dynamo", tmp_path_factory.mktemp("scoring") / "m")
    output = source.with_name("int4.onnx")
    convert(source, output, preset="int4")
    return source, output


def test_likelihoods_are_those_of_report(paths: tuple[Path, Path]) -> None:
    scorers = [scoring.Scorer(path, threads=1) for path in paths]
    tokens = scorers[0].encode(heldout_text())[:320]
    comparison = report(paths[0], [paths[1]], tokens, source="", context=80, threads=1)
    figures = comparison.models[0].quality
    blocks = [tokens[start : start + 80] for start in range(0, 320, 80)]
    for scorer, perplexity in zip(
        scorers, (comparison.perplexity, figures.converted_perplexity), strict=True
    ):
        total = sum(scorer.score(block[:1], block[1:])[0] for block in blocks)
        assert np.exp(-total / comparison.positions) == pytest.approx(perplexity, rel=1e-5)


def test_texts_are_greedy_and_known_as_such(paths: tuple[Path, Path]) -> None:
    scorer = scoring.Scorer(paths[1], threads=1)
    prompt = heldout_text()[:100]
    text = scorer.write(prompt, (), 12)
    assert text == scorer.model.generate(prompt, max_new_tokens=12).text
    lead = scorer.encode(prompt)
    assert scorer.score(lead, scorer.encode(text))[1]
    assert not scorer.score(lead, scorer.encode(text[:-1] + "@"))[1]
    assert scorer.score(lead, []) == (0.0, True)
    assert scorer.write(prompt, (text[4:6],), 12) == text[: text.index(text[4:6])]


def test_what_is_too_long_loses_its_beginning(paths: tuple[Path, Path]) -> None:
    scorer = scoring.Scorer(paths[1], threads=1, max_length=40)
    assert scorer.max_length == 40
    tokens = scorer.encode(heldout_text())[:100]
    assert scorer.score(tokens[:80], tokens[80:90]) == scorer.score(tokens[49:80], tokens[80:90])
    whole = scorer.score_text(heldout_text()[:50])
    parts = [([scorer.prefix], tokens[:40]), (tokens[9:40], tokens[40:50])]
    assert whole == pytest.approx(sum(scorer.score(*part)[0] for part in parts))


def test_windows_predict_every_token_once() -> None:
    assert list(scoring.rolling(range(10), -1, 4)) == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(scoring.rolling([], -1, 4)) == []


@pytest.mark.parametrize(
    ("request_", "stops", "count"),
    [
        ({"until": "\n", "max_gen_toks": 7}, ["\n"], 7),
        ({"until": ["a", "", "b"]}, ["a", "b"], 256),
        ({"max_new_tokens": 3, "until": None}, [], 3),
    ],
)
def test_arguments_of_a_generation(request_: Any, stops: list[str], count: int) -> None:
    assert scoring.arguments_of(request_) == (stops, count)


def test_lm_eval_takes_the_model(paths: tuple[Path, Path]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval and its 40 packages are not part of [test]")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    module("evaluate")
    model = get_model("tq_onnx")(model=str(paths[1]), threads=1)

    def asked(kind: str, *arguments: Any) -> Any:
        instance = Instance(request_type=kind, doc={}, arguments=arguments, idx=0)
        return getattr(model, kind)([instance], disable_tqdm=True)[0]

    scorer = scoring.Scorer(paths[1], threads=1)
    lead, answer = scorer.encode("The whale"), scorer.encode(" is")
    assert asked("loglikelihood", "The whale", " is") == scorer.score(lead, answer)
    assert asked("loglikelihood_rolling", "The whale") == scorer.score_text("The whale")
    options = {"until": ["\n"], "max_gen_toks": 5}
    assert asked("generate_until", "The whale", options) == scorer.write("The whale", ["\n"], 5)
