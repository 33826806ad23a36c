"""The benchmark of whole models runs, on a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.models import DYNAMO, GENAI, original

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "end_to_end.py"
FEW = ("--contexts", "64,120", "--tokens", "2", "--threads", "1", "--presets", "int4", "--json")


def rows(name: str) -> dict[tuple[str, int], dict[str, object]]:
    command = [sys.executable, str(SCRIPT), "--model", str(original(name)), *FEW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["cores"] > 0
    assert document["yardstick"] == "ort gqa float32"
    return {(row["peer"], row["context"]): row for row in document["rows"]}


def test_every_cache_against_the_original() -> None:
    found = rows(GENAI)
    for context in (64, 120):
        ours = found["tq-onnx int4", context]
        # The default exact window: 32 + 4 entries of 4 rows.
        assert ours["cache_bytes"] == 272 * (context + 36 * 4)
        ratio = float(str(ours["yardstick_ms"])) / float(str(ours["ms"]))
        assert ours["times_original"] == pytest.approx(ratio)
        assert "no float16 cache" in str(found["ort gqa float16", context]["reason"])
        for cache, size in (("int8", 512), ("int4", 256)):
            peer = found[f"ort gqa {cache}", context]
            # Or this onnxruntime has no such cache, and says so.
            assert peer["reason"] or peer["cache_bytes"] == size * context


def test_caches_that_a_model_cannot_have_are_named() -> None:
    found = rows(DYNAMO)
    for cache in ("int8", "int4"):
        assert "not GroupQueryAttention" in str(found[f"ort gqa {cache}", 64]["reason"])
    assert found["tq-onnx int4", 64]["reason"] == ""
