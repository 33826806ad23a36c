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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.javascript.browser import shown
from tests.javascript.conftest import CACHE_BYTES, PROMPT, TOKENS, Web
from tests.language.models import TEMPLATE
from tests.netron.page import chromium
from tq_onnx.integrations.bundled import heldout_text

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
TRANSFORMERS_RUNTIME = tuple(f"ort-wasm-simd-threaded.asyncify.{end}" for end in ("mjs", "wasm"))

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
    folder = hub_folder(web, tmp_path / "model")
    told = node(packages, "generate.mjs", folder, PROMPT, TOKENS)
    assert told["tokens"] == web.tokens


def hub_folder(web: Web, folder: Path, *, external: str | None = None) -> Path:
    """Makes the folder that transformers.js opens.

    Args:
        web: the model.
        folder: the folder.
        external: the file of the weights; None for weights in the model.
    """
    (folder / "onnx").mkdir(parents=True)
    for file in web.folder.glob("*.json"):
        shutil.copy(file, folder)
    model = onnx.load(web.model)
    path = folder / "onnx" / "model.onnx"
    onnx.save(model, path, save_as_external_data=external is not None, location=external)
    if external is not None:
        config = json.loads((folder / "config.json").read_text())
        config["transformers.js_config"] = {"use_external_data_format": True}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(folder: Path) -> Tokenizer:
    """Gives a model tokens that are parts of words, with the ids of special tokens that it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([heldout_text()], trainers.BpeTrainer(vocab_size=256))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="needs Chromium (Debian package: chromium)"
)


@needs_chromium
@pytest.mark.parametrize("has_template", [False, True])
def test_the_page_shows_the_text_of_transformers_js(
    packages: Path, web: Web, tmp_path: Path, has_template: bool
) -> None:
    site = tmp_path / "site"
    folder = hub_folder(web, site / "models" / "model", external="model.onnx_data")
    tokenizer = words(folder)
    prompt = PROMPT
    if has_template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        prompt = f"user: {PROMPT}\nassistant: "
    transformers = packages / "node_modules" / "@huggingface" / "transformers"
    runtime = transformers / "node_modules" / "onnxruntime-web" / "dist"
    if not runtime.is_dir():  # it is the same version as that of the other page
        runtime = packages / "node_modules" / "onnxruntime-web" / "dist"
    files = [*(EXAMPLES / "browser").iterdir(), transformers / "dist" / "transformers.min.js"]
    for file in (*files, *(runtime / name for name in TRANSFORMERS_RUNTIME)):
        shutil.copy(file, site)
    told = node(packages, "generate.mjs", folder, PROMPT, TOKENS)
    text = tokenizer.decode(told["tokens"])
    assert told["text"] == text
    page = shown(
        site, tmp_path / "page.png", prompt=PROMPT, tokens=TOKENS, page="transformers.html"
    )
    assert "Done." in page, page
    assert f"{PROMPT}{chr(10) * has_template}{text}" in page
    cached = len(tokenizer.encode(prompt).ids) + TOKENS - 1
    assert f"tokens in the cache\t{cached}\n" in page
    assert f"bytes of the cache\t{CACHE_BYTES * cached:,}" in page


@needs_chromium
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
