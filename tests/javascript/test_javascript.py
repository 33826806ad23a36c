"""JavaScript runtimes run a converted model without the library, and make the same tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.javascript.browser import shown
from tests.javascript.conftest import CACHE_BYTES, PROMPT, TOKENS, Web
from tests.netron.page import chromium

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")

pytestmark = pytest.mark.javascript


def node(packages: Path, script: str, *arguments: object) -> dict[str, Any]:
    """What an example prints."""
    done = subprocess.run(
        ["node", str(EXAMPLES / "node" / script), *map(str, arguments)],
        cwd=packages,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("web", ["int4", "k5v3"], indirect=True)
def test_node_makes_the_tokens_of_the_library(packages: Path, web: Web) -> None:
    told = node(packages, "complete.mjs", web.model, PROMPT, TOKENS)
    assert told["tokens"] == web.tokens
    # The last token was not fed.
    assert told["cache_bytes"] == CACHE_BYTES * (len(PROMPT) + TOKENS - 1)


def test_transformers_js_makes_the_tokens_of_the_library(
    packages: Path, web: Web, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for file in web.folder.glob("*.json"):
        shutil.copy(file, folder)
    onnx.save(onnx.load(web.model), folder / "onnx" / "model.onnx")
    told = node(packages, "generate.mjs", folder, PROMPT, TOKENS)
    assert told["tokens"] == web.tokens


@pytest.mark.skipif(chromium() is None, reason="needs Chromium (Debian package: chromium)")
def test_the_page_answers_in_a_browser(packages: Path, web: Web, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    files = [*(EXAMPLES / "browser").iterdir(), *web.model.parent.iterdir()]
    runtime = packages / "node_modules" / "onnxruntime-web" / "dist"
    for file in (*files, web.folder / "config.json", *(runtime / name for name in RUNTIME)):
        shutil.copy(file, site)
    page = shown(site, tmp_path / "page.png", prompt=PROMPT, tokens=TOKENS)
    assert "Done." in page, page
    assert PROMPT + bytes(web.tokens).decode() in page
    assert f"{CACHE_BYTES * (len(PROMPT) + TOKENS - 1):,}" in page
    assert "7.76 times" in page
    assert (tmp_path / "page.png").stat().st_size > 0


def test_the_benchmark_writes_what_the_page_is_made_from(packages: Path, web: Web) -> None:
    command = [ROOT / "benchmarks" / "javascript.py", packages, web.folder / "model.onnx", "--json"]
    few = ["--runtimes", "node", "--contexts", "40", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, *command, *few], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    kept = json.loads((ROOT / "docs" / "measurements" / "javascript.json").read_text())
    assert {*told} == {*kept}
    assert {*told["machine"]["versions"]} == {*kept["machine"]["versions"]}
    assert {key for row in told["rows"] for key in row} == {*kept["rows"][0]}
    original, converted = told["rows"]
    assert (original["form"], converted["form"]) == ("original", "--target web")
    assert original["times_original"] == 1
    assert original["cache_bytes"] > 7 * converted["cache_bytes"] > 0
