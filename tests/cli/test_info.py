from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import onnxruntime
import pytest

from tests.cli.run import run
from tq_onnx import __version__
from tq_onnx.cli import flags
from tq_onnx.cli.main import COMMANDS, main
from tq_onnx.cli.retired import RETIRED
from tq_onnx.codec.presets import LISTED_PRESETS
from tq_onnx.codec.spec import layout_digest


def test_the_table() -> None:
    outcome = run("info")
    assert outcome.code == 0
    assert outcome.err == ""
    for word in ("tq-onnx", "onnx-ir", "numpy", "python", "CPUExecutionProvider", "kernels use"):
        assert word in outcome.out
    assert "library problem" not in outcome.out


def test_json() -> None:
    document = run("info", "--json").document
    assert document["packages"]["tq-onnx"] == __version__
    assert document["packages"]["onnxruntime"] == onnxruntime.__version__
    assert document["layout_digest"] == document["library"]["layout_digest"] == layout_digest()
    assert document["library"]["registers"] is True
    assert document["library"]["problem"] is None
    assert document["library"]["isa"] in document["library"]["isa_supported"]
    assert set(document["library"]["isa_supported"]) <= set(document["library"]["isa_compiled"])
    assert "CPUExecutionProvider" in document["providers"]
    assert isinstance(document["cpu_features"], list)


def test_a_missing_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    outcome = run("info")
    assert outcome.code == 0
    assert "library problem" in outcome.out
    library = run("info", "--json").document["library"]
    assert library["path"] is None
    assert library["registers"] is False
    assert "nowhere.so" in library["problem"]


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "library.so"
    path.write_text("no library")
    monkeypatch.setenv("TQ_ONNX_LIBRARY", str(path))
    library = run("info", "--json").document["library"]
    assert library["path"] == str(path)
    assert library["registers"] is False
    assert library["problem"]


def test_a_level_that_this_cpu_lacks() -> None:
    # In a process of its own: a library reads the variable once.
    found = subprocess.run(
        [sys.executable, "-m", "tq_onnx.cli.main", "info", "--json"],
        env={**os.environ, "TQ_ONNX_ISA": "none-such"},
        capture_output=True,
        check=True,
    )
    library = json.loads(found.stdout)["library"]
    assert library["isa"] is None
    assert "TQ_ONNX_ISA" in library["problem"]


def test_every_preset_is_listed_with_its_bytes() -> None:
    outcome = run("presets")
    assert (outcome.code, outcome.err) == (0, "")
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if line.strip()}
    names = [preset.name for preset in LISTED_PRESETS]
    assert set(names) <= set(lines)
    assert "(default)" in lines["int4"]
    assert " 132 " in lines["int4"] and "several gains" in lines["int4"]
    assert " 132 " in lines["mse4"] and "Algorithm 1" in lines["mse4"]
    for name, slot in (("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102)):
        assert f" {slot} " in lines[name]
        assert f"its slot: {slot} bytes" in lines[name]
    marked = {name for name in names if "experimental" in lines[name].replace(name, "")}
    assert marked == {preset.name for preset in LISTED_PRESETS if preset.experimental}


@pytest.mark.parametrize("head_size", [64, 128])
def test_as_json(head_size: int) -> None:
    found = {
        entry["preset"]: entry
        for entry in run("presets", "--json", "--head-size", head_size).document
    }
    assert list(found) == [preset.name for preset in LISTED_PRESETS]
    assert found["int4"]["bytes_per_token"] == head_size + 4
    assert found["raw"]["ratio"] == 1
    assert found["k8v4"]["vllm_slot"] == (196 if head_size == 128 else None)


def test_a_head_size_without_rows() -> None:
    assert "not a multiple of 8" in run("presets", "--head-size", 20).sentence(2)


# Words of earlier versions: one sentence says what to type instead.


TYPED: Final = {
    "verify-on-npu": ("verify-on-npu", "-o", "report.json"),
    "--expand-weights": ("convert", "model.onnx", "--target", "cann", "--expand-weights=float16"),
    "ort-gqa": ("convert", "model.onnx", "--calibrate", "--target", "ort-gqa"),
    "--kv-cache-bit-width": ("convert", "model.onnx", "--kv-cache-bit-width", 4),
    "cann-graph": ("verify", "model.onnx", "new.onnx", "--ep", "cann-graph"),
    "--speculate": ("chat", "model.onnx", "--speculate", "ngram"),
    "view": ("view", "model.onnx"),
    "--window": ("convert", "model.onnx", "--window", 8),
    "--sinks": ("convert", "model.onnx", "--sinks", 2),
    "--capacity": ("generate", "model.onnx", "--capacity", 64),
    **{
        option: ("report", "model.onnx", "new.onnx", option)
        for option in (
            "--peers",
            "--no-peers",
            "--card",
            "--generation",
            "--outliers",
            "--markdown",
        )
    },
}


@pytest.mark.parametrize("word", RETIRED)
def test_a_word_of_the_past_is_refused_with_what_replaced_it(word: str) -> None:
    assert f"{word} was removed; {RETIRED[word]}" in run(*TYPED[word]).sentence(2)


# Numbers on the command line: every option refuses what is no value of it, with its name.


HOSTILE = ("-1", "1.5e", "1e400", "nan", "inf", str(2**70), "9" * 5000, "1_0x", "")


def numbers() -> list[tuple[str, str]]:
    """Every option that takes a number: its command and its name."""
    context = click.Context(main)
    found = []
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
                assert isinstance(option.type, flags.Whole | flags.Real), (name, option.opts)
                found.append((name, option.opts[0]))
    return found


@pytest.mark.parametrize(("command", "option"), numbers(), ids=str)
def test_what_is_no_number_is_refused_by_the_name_of_the_option(command: str, option: str) -> None:
    arguments = ("model.onnx", "model.int4.onnx") if command in ("report", "verify") else ("m",)
    for text in HOSTILE:
        sentence = run(command, *arguments, option, text).sentence(2)
        assert f"'{option}'" in sentence, text
        assert "is not a " in sentence, text
        assert len(sentence) < 200, text


def test_a_seed_has_32_bits() -> None:
    sentence = run("convert", "model.onnx", "--seed", 2**32).sentence(2)
    assert "'4294967296' is not a whole number from 0 to 4294967295" in sentence
