"""Edits of JSON documents: of their values, and of their text."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 64, 1 << 31, 1 << 63, 10**30, 0.5, float("nan"), 1e308),
    *("", "x", "..", "/etc/passwd", "../secret", "a/b", "model.onnx", "C:\\x", "a\0b", "\x1b[31m"),
    *("\ud800", "n" * 300, "%d", "past_key_values.%d.key", "cuda", [], {}, [[]], [None], {"": {}}),
    *([1, "a"], {"filename": "model.onnx"}, [{"cuda": {}}], [7], [[{"a": 1}]], {"x": None}),
)


def edited(text: str, draw: random.Random) -> bytes:
    """The document with one or several edits."""
    if draw.random() < 0.1:
        return _damaged(text.encode(), draw)
    document = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        document = _changed(document, draw)
    made = json.dumps(document, ensure_ascii=draw.random() < 0.7, indent=draw.choice((None, 4)))
    return made.encode("utf-8", "surrogatepass")


def _changed(document: Any, draw: random.Random) -> Any:
    """Walks down to a random place and changes it."""
    if not (isinstance(document, dict | list) and document) or draw.random() < 0.05:
        return copy.deepcopy(draw.choice(VALUES))
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = draw.choice(keys)
    if isinstance(document[key], dict | list) and document[key] and draw.random() < 0.85:
        document[key] = _changed(document[key], draw)
        return document
    kind = draw.randrange(6)
    if kind == 0:
        del document[key]
    elif kind == 1 and isinstance(document, dict):
        document[draw.choice(("x", "", "filename", "pipeline", "session_options"))] = copy.deepcopy(
            document[key]
        )
    elif kind == 2:
        document[key] = [document[key]]
    elif kind == 3 and isinstance(document, list):
        document += copy.deepcopy(document[:1000])
    else:
        document[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def _damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes that may be no JSON at all."""
    at = draw.randrange(len(content) + 1)
    deep = draw.choice((900, 100_000))
    insertion = draw.choice(
        (b"\xff\xfe", b"\xef\xbb\xbf", b"[" * deep, b'{"a":' * deep, b"9" * 5000, b"\0", b'"', b"}")
    )
    kind = draw.randrange(4)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return insertion + content
    if kind == 2:
        return insertion
    return content[:at] + insertion + content[at:]
