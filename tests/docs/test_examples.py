"""The Python of README.md and of docs runs as it stands there, on the bundled model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.genai_folder import bundled_genai
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of

ROOT = Path(__file__).parents[2]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if blocks(page))


def test_readme_and_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one test, because the pages use the model that README.md converts."""
    build_bundled("dynamo", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md"):
        exec(block, names)
    for block in blocks(ROOT / "docs" / "api.md"):
        exec(block, names)
    assert "7.76 times smaller" in capsys.readouterr().out
    assert names["logits"].shape == (1, 1, 260)
    assert len(names["done"].text) > 3
    assert [len(names[name]) for name in ("one", "other")] == [23, 10]

    paged = target_of("paged", num_blocks=20)
    genai = bundled_genai(tmp_path / "qwen3-genai", "genai")
    convert_folder(genai, tmp_path / "qwen3-genai-int4-paged", target=paged)
    has_genai = importlib.util.find_spec("onnxruntime_genai") is not None
    convert_folder(genai, tmp_path / "qwen3-genai-int4")
    assert [page.stem for page in PAGES] == ["api", "genai", "how-it-works", "serving"]
    for page in PAGES[1:]:
        names = {}
        capsys.readouterr()
        for block in blocks(page):
            if has_genai or not (page.stem == "genai" or "tq_onnx.Engine" in block):
                exec(block, names)
        if has_genai and page.stem == "genai":
            assert len(capsys.readouterr().out) == 40
