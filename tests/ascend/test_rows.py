"""The room is reached by rows: no module of another room names it in code or text."""

from __future__ import annotations

from pathlib import Path

import tq_onnx


def test_only_tables_name_the_room() -> None:
    package = Path(tq_onnx.__file__).parent
    modules = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    named = {
        name
        for name, path in modules.items()
        if not name.startswith("ascend/") and "tq_onnx.ascend" in path.read_text(encoding="utf-8")
    }
    assert named == {"targets/registry.py"}
