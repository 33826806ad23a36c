"""Answers of a form: each that is complete is what the guidance describes.

With ``TQ_SCHEMAS=200`` so many random schemas are taken.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import tq_onnx
from tests.language.models import PROMPT, folder, language_model
from tq_onnx import Guidance, Sampling
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.language.text import LENGTH, STOP

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCHEMAS: Final = int(os.environ.get("TQ_SCHEMAS", "10"))


def schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema whose texts are short."""
    least = draw.randrange(-50, 50)
    plain: list[dict[str, Any]] = [
        {"type": "string", "maxLength": draw.randrange(12)},
        {"enum": draw.sample(["red", "green \u00e9", 3, None, True, 'a "b"'], 3)},
        {"type": "integer", "minimum": least, "maximum": least + draw.randrange(100)},
        {"type": "boolean"},
        {"const": {"a": [1, "b"]}},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    ]
    if not depth or draw.random() < 0.4:
        return draw.choice(plain)
    if draw.random() < 0.3:
        return {"anyOf": [schema(draw, 0), schema(draw, 0)]}
    if draw.random() < 0.4:
        low = draw.randrange(3)
        items = schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
    names = draw.sample(["name", "age", "tags", "x y", "\u00fc"], draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def test_complete_answers_are_valid_by_random_schemas() -> None:
    lm, complete = language_model("growing"), 0
    for seed in range(SCHEMAS):
        document = schema(random.Random(seed))
        completion = lm.generate(
            PROMPT,
            guidance=Guidance.of(schema=document),
            sampling=Sampling(temperature=seed % 3 / 2, seed=seed),
            speculate="ngram" if seed % 2 else None,
            max_new_tokens=400,
        )
        if completion.finish_reason == STOP:
            complete += 1
            jsonschema.validate(json.loads(completion.text), document)
    print(f"{complete} of {SCHEMAS} answers are complete and valid")
    assert complete > 0.9 * SCHEMAS


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[A-Z]{5} [0-9]{4}"}, "[A-Z]{5} [0-9]{4}"),
        ({"regex": "(?:na\u00efve|\u65e5\u672c)!"}, "na\u00efve!|\u65e5\u672c!"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ],
)
def test_an_answer_is_what_is_described(options: dict[str, str], pattern: str) -> None:
    guidance = Guidance.of(**options)
    for form in ("original", "window", "paged"):
        lm = language_model(form)
        completion = lm.generate(PROMPT, guidance=guidance, max_new_tokens=40)
        assert re.fullmatch(pattern, completion.text)
        assert completion.finish_reason == STOP
        pieces = list(lm.stream(PROMPT, guidance=guidance, max_new_tokens=40))
        assert "".join(piece.text for piece in pieces) == completion.text
    answer = language_model("growing").chat().ask("Which?", guidance=guidance)
    assert re.fullmatch(pattern, answer.text)


def test_an_answer_without_room_is_the_beginning_of_one() -> None:
    guidance = Guidance.of(regex="[a-c]{30}")
    completion = language_model("growing").generate(PROMPT, guidance=guidance, max_new_tokens=9)
    assert (completion.finish_reason, len(completion.text)) == (LENGTH, 9)
    assert set(completion.text) <= set("abc")


def test_guesses_keep_to_the_guidance() -> None:
    guidance = Guidance.of(regex="(?:ab ){20}[0-9]")
    lm = language_model("original")
    plain, guessed = (
        lm.generate(PROMPT, guidance=guidance, max_new_tokens=80, speculate=how)
        for how in (None, "ngram")
    )
    assert plain.text == guessed.text
    assert re.fullmatch("(?:ab ){20}[0-9]", plain.text)


def test_what_cannot_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = language_model("growing")
    for options, reason in (
        ({"regex": "("}, "guidance cannot be read: .*unclosed group"),
        ({"grammar": "start: unknown"}, "guidance cannot be read: .*unknown name"),
        ({"schema": {"type": "frob"}}, "guidance cannot be read: .*frob"),
    ):
        with pytest.raises(UsageError, match=reason):
            lm.generate(PROMPT, guidance=Guidance.of(**options))
    with pytest.raises(UsageError, match="guidance must be a Guidance"):
        lm.generate(PROMPT, guidance={"type": "object"})  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = tq_onnx.load(folder("int4"), threads=1)
    with pytest.raises(UsageError, match=r"llguidance.*is not installed; pip install 'tq-onnx"):
        other.generate(PROMPT, guidance=Guidance.of(regex="a"))
    for file in folder("int4").glob("model.onnx*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    without = tq_onnx.load(tmp_path / "model.onnx", threads=1)
    with pytest.raises(ModelFileError, match="tokenizer"):
        without.generate([1, 2], guidance=Guidance.of(regex="a"))
