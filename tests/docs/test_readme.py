"""Every command of README.md runs in the order of the page, and every number has a source."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.decoders.running import FIXTURES
from tests.integrations.genai_folder import bundled_genai
from tq_onnx.cli.main import main
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.spec import row_layout
from tq_onnx.codec.window import window_of
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.ops.domain import BODY_OPSET
from tq_onnx.runtime.library import get_library_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")

# ---- commands

OF_THE_RUN = ("python3 -m venv", ". .venv/bin/activate", "pip install .")
"""A virtual environment with the package: that in which the tests run."""
ELSEWHERE = {
    "python3 -m venv .venv-test": "the command of the tests themselves",
    "python -m onnxruntime_genai.models.builder": "needs an exporter and a network: tests/exports",
    "optimum-cli": "the same",
}
"""Commands that do not run here, with the reason."""
COMMAND = re.compile(
    r"^```console\n(?P<block>.*?)^```|^```python\n(?P<python>.*?)^```|`(?P<line>tq-onnx [^`]+)`",
    re.S | re.M,
)


def is_whole(command: str) -> bool:
    """Whether a command in a sentence names what it reads; others name an option only."""
    words = command.split()
    found = main.get_command(click.Context(main), words[1])
    assert found is not None, command
    needed = any(isinstance(one, click.Argument) and one.required for one in found.params)
    return not needed or any("." in word or "qwen3" in word for word in words[2:])


def commands() -> list[str]:
    """What a reader runs, in the order of the page, as lines of a shell."""
    found: list[str] = []
    lines = TEXT.splitlines()
    for match in COMMAND.finditer(TEXT):
        if match["python"]:
            found.append(f"python - <<'END'\n{match['python']}END")
        elif match["line"] and match["line"] not in lines and is_whole(match["line"]):
            found.append(match["line"])
        for line in (match["block"] or "").splitlines():
            if not line.startswith(tuple(ELSEWHERE)):
                found += [part for part in line.split(" && ") if not part.startswith(OF_THE_RUN)]
    return found


@pytest.mark.readme
def test_commands_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    """In a folder of the files that the page takes a reader to have, and nothing else."""
    build_bundled("genai", tmp_path)
    bundled_genai(tmp_path / "qwen3-genai", "genai")
    (tmp_path / "your.txt").write_text(heldout_text()[:10_000])
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TQ_ONNX_LIBRARY": str(get_library_path()),
    }
    printed: dict[str, str] = {}
    for line in commands():
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed[line] = done.stdout
    [table] = re.findall(r"^```text\n(.*?)^```", TEXT, re.S | re.M)
    assert len(table.splitlines()) == 9
    for line in table.splitlines()[4:]:
        assert_alike(line, printed["tq-onnx demo"])


def assert_alike(row: str, printed: str) -> None:
    """Compares a row of a table with the printed one, small changes of a measurement aside."""
    cells = re.split(r"\s{2,}", row.strip())
    [own] = [line for line in printed.splitlines() if line.strip().startswith(cells[0] + "  ")]
    if cells[0].startswith("cache bytes"):
        assert re.split(r"\s{2,}", own.strip()) == cells
        return
    if cells[0].startswith("tokens/s"):  # of this machine
        return
    numbers = [
        [float(word) for word in re.findall(r"-?\d+\.\d+(?:e-\d+)?", line)] for line in (row, own)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.3 if "KL" in row else 1e-3, abs=0.02)


def test_the_page_has_the_commands() -> None:
    found = commands()
    assert len(TEXT.splitlines()) <= 180
    assert len(found) >= 14
    plain, calibrated = ("tq-onnx convert model.onnx", "tq-onnx convert model.onnx --calibrate")
    assert found.index(plain) < found.index(calibrated)
    for start in ELSEWHERE:
        assert f"\n{start}" in TEXT


# ---- numbers

INT4 = PRESETS["int4"]
HEAD_SIZE = 128
ROW = row_layout(INT4.key, HEAD_SIZE).row_bytes


def document(name: str) -> Any:
    return json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))


def ratios(peer: str, least: int) -> list[float]:
    """Times of a step with one thread, by that of reading the int4 cache once."""
    return [
        row["floor_ratio"]
        for row in document("measurements/decode.json")["rows"]
        if row["peer"].startswith(peer)
        and row["threads"] == 1
        and row["context"] >= least
        and row["ms"]
    ]


def loss(part: str, name: str) -> str:
    [entry] = [one for one in document(f"quality-{part}.json")["models"] if one["name"] == name]
    return f"{100 * entry['quality']['perplexity_change']:+.1f}"


def in_pages(place: str) -> str:
    figures = document("quality-pages.json")["1024"][place]["int4"]
    return f"{100 * figures['perplexity_change']:+.1f}"


def window_tokens() -> int:
    """Rows that the exact tokens of int4 take."""
    return (INT4.window + INT4.sinks) * -(-(2 * HEAD_SIZE + 4) // ROW)


def python_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["requires-python"]).removeprefix(">=")


def avx2() -> list[str]:
    rows = document("measurements/decode-avx2.json")["rows"]
    steps = {(row["shape"], row["peer"]): row["ms"] for row in rows if row["context"] == 4096}
    return [
        f"{steps[shape, 'ort gqa int8 vnni'] / steps[shape, 'tq-onnx int4']:.1f}"
        for shape in ("16/8", "40/8")
    ]


def contexts(least: int) -> str:
    return f"{least:,}"


STEPS = ratios("tq-onnx int4", 4096)
SMALLER = f"{2 * HEAD_SIZE / ROW:.2f}"
CLAIMS: list[tuple[str, Callable[[], list[str]]]] = [
    (r"cache ([\d.]+) times smaller than float16 for", lambda: [SMALLER]),
    (r"key of (\d+) numbers takes (\d+) bytes instead of (\d+) in float16",
     lambda: ["128", str(ROW), str(2 * HEAD_SIZE)]),
    (r"takes ([\d.]+) to ([\d.]+) times as long as reading",
     lambda: [f"{min(STEPS):.1f}", f"{max(STEPS):.1f}"]),
    (r"\(([\d,]+) tokens or more, one thread", lambda: [contexts(4096)]),
    (r"is float32 here, hence ([\d.]+); against float16 the factor is ([\d.]+\d)",
     lambda: [f"{4 * HEAD_SIZE / ROW:.2f}", SMALLER]),
    (r"keeps the (\d+) newest and\s+(\d+) first tokens in float16, a fixed cost of (\d+) tokens",
     lambda: [str(INT4.window), str(INT4.sinks), str(window_tokens())]),
    (r"as (\d)-bit \[TurboQuant\]", lambda: [str(INT4.key.bits)]),
    (r"Python ([\d.]+) or newer", lambda: [python_version()]),
    (r"runtime with opset (\d+) runs", lambda: [str(BODY_OPSET)]),
    (r"head\s+size (\d+)\. Quality", lambda: [str(HEAD_SIZE)]),
    (r"one thread, head\s+size (\d+),", lambda: [str(HEAD_SIZE)]),
    (r"the same ([\d,]+) predictions in\s+windows of ([\d,]+) tokens",
     lambda: [f"{document('quality-smollm2.json')[key]:,}" for key in ("positions", "context")]),
    (r"also at ([\d,]+) tokens",
     lambda: [f"{document('quality-smollm2-8192.json')['context']:,}"]),
    (r"With (\d)-bit weights they lose (\S+) %\s+where others lose (\S+) %",
     lambda: ["4", in_pages("pages"), in_pages("rows")]),
    (r"is ([\d.]+) times \(16/8 heads\) and ([\d.]+) times \(40/8\)", avx2),
    (r"as `ort gqa int8\s+vnni` at ([\d,]+) tokens", lambda: [contexts(4096)]),
    (r"\|\s*a graph converter: rotated (\d)-bit codes, ([\d.]+) bits per value",
     lambda: [str(INT4.key.bits), f"{8 * ROW / HEAD_SIZE + 1e-9:.2f}"]),
    (r"blocks of (\d+) with a float16 scale, ([\d.]+) / ([\d.]+) bits",
     lambda: ["32", f"{8 + 16 / 32}", f"{4 + 16 / 32}"]),
    (r"stays below ([\d.]+), ONNX Runtime's caches take (\d+) to (\d+)",
     lambda: ["2.5", "5", "60"]),
    (r"opset (\d+) to (\d+)\)", lambda: ["14", "24"]),
]  # fmt: skip
"""Sentences with numbers, and what the numbers must be."""
UNCLAIMED = {
    "16/8": "the name of a shape",
    "40/8": "the name of a shape",
    "2.0": "Apache-2.0",
    "64": "head size of SmolLM2",
    "128": "head size of most models",
    "2": "Gemma 2",
    "3": "Gemma 3",
    "8": "rounds the query to 8 bits: what the operators do",
}


@pytest.mark.parametrize(("sentence", "numbers"), CLAIMS, ids=[claim for claim, _ in CLAIMS])
def test_a_number(sentence: str, numbers: Callable[[], list[str]]) -> None:
    found = re.search(sentence, TEXT)
    assert found is not None
    assert list(found.groups()) == numbers()


def test_bounds_of_the_picture() -> None:
    """The one in whose description they stand."""
    ours, theirs = ratios("tq-onnx int4", 0), ratios("ort", 0)
    assert 2 < max(ours) < 2.5
    assert 5 < min(theirs) < 6
    assert 50 < max(theirs) < 60


def test_exporters_of_the_oldest_and_newest_opset() -> None:
    names = {path.stem for path in FIXTURES.glob("*.onnx")}
    assert {"legacy-op14-eager", "dynamo-op24-sdpa"} <= names


def test_the_window_is_that_of_the_operators() -> None:
    window = window_of(INT4.window, INT4.sinks, [(HEAD_SIZE, ROW)])
    assert window.overlay_rows == window_tokens()


def test_every_number_is_generated_or_tested() -> None:
    text = re.sub(r"<!-- generated: .*?<!-- end generated -->", "", TEXT, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for sentence, _ in CLAIMS:
        text = re.sub(sentence, "", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    numbers = re.findall(r"(?<![\w.+/-])\d[\d.,/]*\d|(?<![\w.+/-])\d\b", text)
    assert {number for number in numbers if number not in UNCLAIMED} == set()
