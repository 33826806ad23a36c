"""Answers that have to look like something."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.consumers import begin_together
from tq_onnx import Engine, Guidance, Sampling
from tq_onnx.errors import EngineError, UsageError

TEXT = "Call me Ishmael. Some years ago"
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"enum": ["whale", "captain"]},
        "years": {"type": "integer", "minimum": 10, "maximum": 99},
        "alive": {"type": "boolean"},
    },
    "required": ["who", "years", "alive"],
    "additionalProperties": False,
}


def written(engine: Engine, guidance: Guidance, **options: Any) -> tuple[str, str | None]:
    pieces = list(engine.stream(TEXT, guidance=guidance, **{"max_new_tokens": 80, **options}))
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


@pytest.mark.parametrize("name", ["paged", "int4"])
def test_answers_look_as_they_have_to(name: str, request: pytest.FixtureRequest) -> None:
    with Engine(request.getfixturevalue(name)) as engine:
        text, finish = written(engine, Guidance.of(regex="[A-Z]{5} [0-9]{4}"))
        assert finish == "stop"
        assert re.fullmatch("[A-Z]{5} [0-9]{4}", text)
        for sampling in (Sampling(), Sampling(temperature=1.5)):
            text, finish = written(engine, Guidance.of(schema=SCHEMA), sampling=sampling)
            assert finish == "stop"
            answer = json.loads(text)
            assert set(answer) == {"who", "years", "alive"}
            assert answer["who"] in ("whale", "captain")
            assert 10 <= answer["years"] <= 99
            assert answer["alive"] in (True, False)
        grammar = 'start: "<call>" number "</call>"\nnumber: /[0-9]{3}/'
        text, finish = written(engine, Guidance.of(grammar=grammar))
        assert re.fullmatch("<call>[0-9]{3}</call>", text)
        # Others beside it are as free as before.
        free = engine.stream(TEXT, max_new_tokens=8)
        written(engine, Guidance.of(regex="a{8}"))
        again = engine.stream(TEXT, max_new_tokens=8)
        assert [piece.text for piece in free] == [piece.text for piece in again]


@pytest.mark.parametrize("name", ["paged", "int4"])
def test_text_without_tokens_ends_its_answer(name: str, request: pytest.FixtureRequest) -> None:
    """The bundled tokenizer has this character in four tokens, of which none is a text."""
    with Engine(request.getfixturevalue(name)) as engine:
        free = [piece.text for piece in engine.stream(TEXT, max_new_tokens=8)]
        begin_together(engine, 2)
        beside = engine.stream(TEXT, max_new_tokens=8)
        with pytest.raises(UsageError, match="finds no token for a character"):
            written(engine, Guidance.of(regex="a\U0001f600"))
        if name == "paged":
            assert [piece.text for piece in beside] == free
        else:
            with pytest.raises(EngineError, match="send it again"):
                list(beside)
        assert [piece.text for piece in engine.stream(TEXT, max_new_tokens=8)] == free


@pytest.mark.parametrize(
    "described",
    [{"regex": "("}, {"regex": "a(?=b)"}, {"schema": {"type": "x"}}, {"grammar": "start: nothing"}],
)
def test_what_cannot_be_read_ends_its_answer(paged: Path, described: dict[str, Any]) -> None:
    with Engine(paged) as engine:
        with pytest.raises(UsageError, match="Error creating grammar"):
            written(engine, Guidance.of(**described))
        assert written(engine, Guidance.of(regex="ab"))[0] == "ab"
        assert engine.occupancy.free_pages == engine.batching.num_blocks


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ({}, "nothing was given"),
        ({"regex": "a", "schema": {}}, "schema and regex was given, and one is taken"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": 5}, "regex must be"),
        ({"schema": "{}"}, "schema must be a mapping"),
        ({"schema": {"const": float("nan")}}, "schema is no JSON"),
        ({"schema": {"const": object()}}, "schema is no JSON"),
    ],
)
def test_what_is_no_guidance_is_refused(described: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Guidance.of(**described)
