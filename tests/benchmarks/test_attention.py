from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
OURS, YARDSTICK, GONE = "tq-onnx int4", "ort gqa float32", "llama.cpp f16"
PRODUCT = "ort matmul"
EXACT = f"{OURS} window 4+2"
HEADS, CONTEXT = 2, 64
ROW_BYTES = 66
"""Of int4 at head size 128."""
ENTRY_ROWS = 4
"""That hold 128 float16 numbers and a tag."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run prints with one peer whose process ends at once."""
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    done = subprocess.run(
        [
            *(sys.executable, str(FOLDER / "attention.py"), "--json"),
            *("--shapes", "4/2", "--contexts", str(CONTEXT), "--threads", "1"),
            *("--prefill", "8", "--past", "0,24"),
            *("--windows", "0,4+2", "--seconds", "0.05", "--cold-mb", "2"),
            *("--peers", ",".join([OURS, YARDSTICK, PRODUCT, GONE])),
            *("--peer-python", f"llama.cpp={python}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def by_peer(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in rows}


def test_every_contender_has_a_row(found: dict[str, Any]) -> None:
    for rows in (found["rows"], found["prefill"]):
        assert all((row["shape"], row["threads"]) == ("4/2", 1) for row in rows)
    assert [row["peer"] for row in found["rows"]] == [OURS, EXACT, YARDSTICK, GONE]
    assert {row["context"] for row in found["rows"]} == {CONTEXT}
    assert [row["peer"] for row in found["prefill"]] == 2 * [OURS, EXACT, YARDSTICK, PRODUCT]
    assert {row["tokens"] for row in found["prefill"]} == {8}
    assert [row["past"] for row in found["prefill"]] == 4 * [0] + 4 * [24]
    assert [row["context"] for row in found["prefill"]] == 4 * [8] + 4 * [32]
    for at in (0, 4):
        product = found["prefill"][at + 3]["ms"]
        for row in found["prefill"][at : at + 4]:
            assert row["matmul_ratio"] == pytest.approx(row["ms"] / product)
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["isa"]
    assert {"tq-onnx", "onnxruntime"} <= set(found["machine"]["versions"])


def test_cache_bytes_are_those_of_keys_and_values(found: dict[str, Any]) -> None:
    rows = by_peer(found["rows"])
    assert rows[OURS]["cache_bytes"] == 2 * HEADS * CONTEXT * ROW_BYTES
    slots = CONTEXT + (4 + 2) * ENTRY_ROWS
    assert rows[EXACT]["cache_bytes"] == 2 * HEADS * slots * ROW_BYTES
    assert rows[EXACT]["ms"] > 0
    assert rows[YARDSTICK]["cache_bytes"] == 2 * HEADS * CONTEXT * 128 * 4


def test_ratios_are_to_the_floor_of_int4(found: dict[str, Any]) -> None:
    rows = by_peer(found["rows"])
    for name in (OURS, YARDSTICK):
        row = rows[name]
        floor_ms = rows[OURS]["cache_bytes"] / (row["bandwidth_gb_s"] * 1e9) * 1e3
        assert 0 < row["fastest_ms"] <= row["quartiles_ms"][0] <= row["ms"]
        assert row["ms"] <= row["quartiles_ms"][1]
        assert row["bandwidth_gb_s"] > 0
        assert row["floor_ms"] == pytest.approx(floor_ms)
        assert row["floor_ratio"] == pytest.approx(row["ms"] / floor_ms)
        own = rows[OURS]["cache_bytes"] / row["cache_bytes"]
        assert row["own_floor_ratio"] == pytest.approx(row["floor_ratio"] * own)
        assert row["times_ort_gqa_float32"] == pytest.approx(rows[YARDSTICK]["ms"] / row["ms"])
        assert row["times_fastest_ort_gqa"] == row["times_ort_gqa_float32"]


def test_a_peer_that_cannot_run_is_named_as_missing(found: dict[str, Any]) -> None:
    row = by_peer(found["rows"])[GONE]
    assert row["missing"] == "its process ended with status 3"
    assert row["ms"] is None
    assert row["floor_ratio"] is None


def test_without_a_compiler_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bandwidth = importlib.import_module("bandwidth")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(bandwidth.NoCompilerError, match=r"^no C compiler "):
        bandwidth.compile_probe(tmp_path)
