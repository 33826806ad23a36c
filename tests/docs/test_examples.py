"""The Python of README.md runs as it stands there, on the bundled model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tq_onnx.integrations.bundled import build_bundled

ROOT = Path(__file__).parents[2]


def test_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert len(blocks) == 5
    build_bundled("dynamo", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert "7.76 times smaller" in capsys.readouterr().out
    assert names["logits"].shape == (1, 1, 260)
    assert len(names["done"].text) > 3
    assert [len(names[name]) for name in ("one", "other")] == [23, 10]
