"""The benchmark of products: frozen caches, paired differences, and no comparison with itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.measure.divergence import log_softmax
from tq_onnx.runtime.opening import open_converted, open_original

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "products.py"
WINDOWS, CONTEXT, SKIP, STRIDE = 2, 96, 30, 11
FEW = (
    *("--windows", str(WINDOWS), "--context", str(CONTEXT)),
    *("--skip", str(SKIP), "--stride", str(STRIDE), "--threads", "1"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model; conversions go beside it."""
    folder: Path = tmp_path_factory.mktemp("products")
    build_bundled("genai", folder)
    path = folder / "model.onnx"
    convert(
        path, folder / "int4.onnx", preset="int4", options=Options(residual_length=0, sink_tokens=0)
    )
    return path


def run(model: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(model), str(model.with_name(name)), *FEW, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(model: Path, *options: str) -> dict[str, dict[str, Any]]:
    done = run(model, "int4.onnx", "--json", *options)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return {row["products"]: row for row in found}


def test_figures_are_those_of_single_steps_from_one_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(model, "--products", "float,8")
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")
    walker = open_converted(model.with_name("int4.onnx"), threads=1).decoder()
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "8")
    stepper = open_converted(model.with_name("int4.onnx"), threads=1).decoder()
    original = open_original(model, threads=1).decoder()
    ids = np.asarray(load_tokenizer(model.parent).encode(heldout_text())[: WINDOWS * CONTEXT])
    kl: dict[str, list[float]] = {"float": [], "8": []}
    for window in ids.reshape(WINDOWS, CONTEXT):
        walker.reset()
        original.reset()
        own = log_softmax(original.prefill(window[None])[0])
        for at in range(SKIP, CONTEXT, STRIDE):
            walker.prefill(window[None, walker.length : at])
            for name, decoder in (("float", walker.copy()), ("8", stepper)):
                decoder.restore(walker.snapshot())
                other = log_softmax(decoder.step([window[at]])[0])
                kl[name].append(float((np.exp(own[at]) * (own[at] - other)).sum()))
    rise = np.subtract(kl["8"], kl["float"])
    assert found["8"]["predictions"] == len(rise) == WINDOWS * len(range(SKIP, CONTEXT, STRIDE))
    assert found["float"]["kl"] == pytest.approx(np.mean(kl["float"]), rel=1e-2)
    assert found["8"]["rise"] == pytest.approx(rise.mean(), rel=5e-2, abs=0.05 * rise.std())
    assert found["8"]["rise_error"] == pytest.approx(rise.std() / np.sqrt(len(rise)), rel=5e-2)


@pytest.mark.parametrize("options", [(), ("--free",)])
def test_verdicts_follow_from_figures(model: Path, options: tuple[str, ...]) -> None:
    found = rows(model, *options)
    assert list(found) == ["float", "8"]
    for row in found.values():
        assert row["rise"] == pytest.approx(row["kl"] - found["float"]["kl"], abs=1e-12)
        assert row["allowed"] == pytest.approx(0.01 * found["float"]["kl"] + 0.0002)
        assert row["passes"] == (row["rise"] <= row["allowed"])
    assert found["float"]["kl_of_products"] == 0
    assert found["8"]["kl_of_products"] > 0


def test_products_that_are_the_same_are_no_comparison(model: Path) -> None:
    convert(model, model.with_name("raw.onnx"), preset="raw")
    done = run(model, "raw.onnx")
    assert done.returncode == 1
    assert "products of float and of 8 give the same logits" in done.stderr
