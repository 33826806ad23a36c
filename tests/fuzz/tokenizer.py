"""The lane of tokenizers: what ``generate`` reads beside a model."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Final

from tests.fuzz import json_edits, model
from tests.fuzz.commands import Case
from tq_onnx.errors import TqOnnxError
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.integrations.huggingface import (
    EOS_FILES,
    TOKENIZER_FILE,
    TextStream,
    load_tokenizer,
)

EXPORT: Final = "dynamo-op23-sdpa"
TEXTS: Final = ("", "123", "a b\n", "\u00e9\U0001f600", "<|endoftext|>", "\0\x1b[31m", "\ud800")
EOS: Final = '{"eos_token_id": [49, 50], "model": {"eos_token_id": 49}}'
CODES: Final = (0, 2, 3, 4)


def check(draw: random.Random, folder: Path) -> Case:
    """Changes the files, makes tokens of texts and texts of tokens."""
    case = Case(folder)
    text = draw.choice(TEXTS)
    tokens = draw.choices((0, 1, 48, 97, 255, 256, 257, 258, 259, 10**6, 1 << 31), k=5)
    (folder / TOKENIZER_FILE).write_bytes(_tokenizer(draw))
    for name in EOS_FILES:
        if draw.random() < 0.4:
            (folder / name).write_bytes(json_edits.edited(EOS, draw))
    case.what = repr(text)
    try:
        words = load_tokenizer(folder)
        case.outcomes["tokenizer"] = "read"
        words.encode(text)
        words.decode(tokens)
        stream = TextStream(words)
        _ = [*map(stream.take, tokens), stream.rest()]
    except TqOnnxError as error:
        case.outcomes["tokenizer"] = f"refused, {error.exit_code}"
        if draw.randrange(16):
            return case
    path = folder / "model.onnx"
    path.write_bytes(conversion())
    if draw.randrange(4) == 0:
        given = ("--prompt", text, "--max-new-tokens", 2, "--threads", 1)
        case.run("generate", path, *given, codes=CODES)
    return case


def warm() -> None:
    """Makes what all cases share."""
    conversion()


def conversion() -> bytes:
    """A model that takes few tokens."""
    return model.conversion(EXPORT)


@cache
def _sound() -> str:
    return (bundled_directory() / TOKENIZER_FILE).read_text(encoding="utf-8")


def _tokenizer(draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        return _sound().encode()
    return json_edits.edited(_sound(), draw)
