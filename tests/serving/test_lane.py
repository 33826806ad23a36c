"""The fuzz lane of the server finds what it looks for."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "httpx", "onnxruntime_genai")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    from tests.fuzz import server
    from tests.fuzz.lanes import lane

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]


def kinds(folder: Path, number: int) -> set[str]:
    case = lane("server").check(random.Random(number), folder)
    return {problem.partition(":")[0] for problem in case.problems}


def test_nothing_is_found(tmp_path: Path) -> None:
    for number in range(10):
        assert kinds(tmp_path, number) == set()


def defect(*_: Any) -> Any:
    raise KeyError


@pytest.mark.parametrize("name", ["explained", "refusal"])
def test_a_defect_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_onnx.serving.server." + name, defect)
    assert "answer" in kinds(tmp_path, 0)


def test_another_text_lost_pages_and_memory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = server._server()
    monkeypatch.setattr(served, "plain", "another")
    monkeypatch.setattr(served, "cases", server.WARM)
    monkeypatch.setattr(served, "resident", -server.MOST_GROWTH)
    assert kinds(tmp_path, 0) == {"text", "growth"}
    monkeypatch.setattr(server, "SECONDS", 1)
    monkeypatch.setattr(served.model.engine._thread, "_free", -7)
    assert kinds(tmp_path, 0) >= {"pages"}
