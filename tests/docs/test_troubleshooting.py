"""docs/troubleshooting.md quotes messages and checks as the package says them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import onnxruntime
import pytest

from tests.decoders.running import FIXTURES
from tq_onnx.runtime.library import get_library_path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
FOREIGN = {"Domain already set in registry"}
VARYING = "\0"


def quoted() -> list[str]:
    """The messages in the first cells of the tables."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M)
    return [message for cell in cells for message in re.findall("`([^`]*)`", cell)]


def texts(path: Path) -> list[str]:
    """The string constants of a file; what an f-string inserts is one character."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else VARYING for part in node.values
            )
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_messages_are_those_of_the_source() -> None:
    source = [text for path in (ROOT / "tq_onnx").rglob("*.py") for text in texts(path)]
    messages = quoted()
    assert len(messages) > 40
    for message in messages:
        if message in FOREIGN:
            continue
        pieces = [piece for piece in re.split(r"\.\.\.", message) if piece.strip(" :();,")]
        assert max(map(len, pieces)) > 12, message
        pattern = ".*".join(re.escape(piece.strip(" :();,")) for piece in pieces)
        assert any(re.search(pattern, text, re.S) for text in source), message


def test_a_library_that_is_registered_twice() -> None:
    options = onnxruntime.SessionOptions()
    for _ in range(2):
        options.register_custom_ops_library(str(get_library_path()))
    with pytest.raises(Exception, match="Domain already set in registry"):
        onnxruntime.InferenceSession(str(FIXTURES / "optimum.onnx"), options)
