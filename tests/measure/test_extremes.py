"""Keys and values outside the range of float16: every command that measures counts and warns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.cli.run import run
from tests.decoders.synthetic import decoder
from tq_onnx.codec.extremes import Extremes
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations import tokens as tokens_module
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.quality.report import report
from tq_onnx.verification.verify import verify

LARGE, SMALL = 5, 7
TEXT = np.arange(96) % 12
"""Each of both tokens comes eight times."""
HEADS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 makes keys and values of one token too large, and of another too small."""
    made = decoder()
    table, head = (made.graph.initializers[name] for name in ("table", "head"))
    assert table.const_value is not None
    assert head.const_value is not None
    rows = table.const_value.numpy().copy()
    rows[LARGE] *= 1e5
    rows[SMALL] *= 1e-12
    table.const_value = ir.tensor(rows, name="table")
    # Logits stay such as a perplexity can be taken of.
    head.const_value = ir.tensor(1e-5 * head.const_value.numpy(), name="head")
    path = tmp_path_factory.mktemp("extremes") / "model.onnx"
    ir.save(made, path)
    return path


@pytest.fixture(scope="module")
def converted(model: Path) -> Path:
    output = model.with_name("model.int4.onnx")
    convert(model, output)
    return output


def check(found: list[Extremes]) -> None:
    """Every cache of layer 0 is counted exactly; later layers mix the tokens."""
    first = [one for one in found if one.layer == 0]
    assert [one.cache for one in first] == ["key", "value"]
    for one in first:
        assert one.vectors == HEADS * len(TEXT)
        assert (one.clamped, one.vanished, one.not_finite) == (HEADS * 8, HEADS * 8, 0)


def told(warnings: tuple[str, ...]) -> None:
    (sentence,) = warnings
    assert "layer 0 keys (16 too large and clamped, 16 too small and stored as zeros" in sentence


def test_calibrate_counts(model: Path) -> None:
    found = calibrate(model, TEXT, context=48, library=False, threads=1)
    check(list(found.extremes))


def test_report_counts(model: Path, converted: Path) -> None:
    found = report(model, [converted], TEXT, source="a test", library=False, threads=1)
    check([one for layer in found.models[0].layers for one in layer.extremes])
    told(tuple(warning.removeprefix("int4: ") for warning in found.warnings))


def test_verify_counts(model: Path, converted: Path) -> None:
    found = verify(model, converted, TEXT, source="a test", new_tokens=2, library=False, threads=1)
    check([one.extremes for one in found.layers if one.extremes])
    told(found.warnings)


class Words:
    """A tokenizer of the twelve tokens of ``TEXT``."""

    eos_ids = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        raise AssertionError


def as_on_stderr(sentence: str) -> str:
    """A warning with the flag of the parameter that it names."""
    return f"warning: {sentence.replace('`layers`', '--layers')}\n"


def test_calibrate_warns_on_stderr_and_in_json(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "load_tokenizer", lambda _: Words())
    (tmp_path / "tokenizer.json").touch()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, TEXT)))
    outcome = run(
        "calibrate", model, "--text", text, "-o", tmp_path / "m.calibration.safetensors",
        "--tokenizer", tmp_path, "--no-library", "--threads", 1, "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    document = outcome.document
    (sentence,) = document["warnings"]
    told((sentence,))
    assert outcome.err == as_on_stderr(sentence)
    assert document["extremes"][0] == {
        "layer": 0, "cache": "key", "vectors": 192, "clamped": 16, "vanished": 16, "not_finite": 0
    }  # fmt: skip

    calibration = tmp_path / "m.calibration.safetensors"
    refused = run("convert", model, "-o", tmp_path / "m.onnx", "--calibration", calibration)
    assert refused.code == 3
    assert "longer than 65,504, the most that rows hold, in layers 0, 1; leave" in refused.err


COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "report": lambda model, made: ("report", model, made),
    "verify": lambda model, made: ("verify", model, made),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_warn_on_stderr_and_in_json(command: str, model: Path, converted: Path) -> None:
    outcome = run(
        *COMMANDS[command](model, converted), "--tokens", 96, "--no-library", "--threads", 1,
        "--json",
    )  # fmt: skip
    document = outcome.document
    (sentence,) = document.get("report", document)["warnings"]
    assert outcome.err.startswith(as_on_stderr(sentence))
    assert "layer 0 keys" in sentence
