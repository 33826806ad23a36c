"""Models with ONNX Runtime's own caches: they run without us, and ``verify`` sees what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from tests.cli.run import run
from tests.decoders.synthetic import UNMASKED, decoder
from tq_onnx.codec.channelcodes import ChannelCodes, best_steps, quantiles, unpacked
from tq_onnx.conversion.calibrationfile import read_calibration, write_calibration
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.conversion.scales import adaptation_digest
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.load import load
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.runtime.opening import open_model
from tq_onnx.targets.ortgqa.caches import constants_in, table_name
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.checks import failed
from tq_onnx.verification.ortcaches import ATTENTION, CODES, CONSTANTS, REACH
from tq_onnx.verification.verify import verify

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
CALIBRATED = 1024
READ = 96


@dataclass(frozen=True)
class Models:
    """The bundled model, its calibration, and its conversions by bits."""

    original: Path
    calibration: Path
    converted: dict[int, Path]
    text: Ids


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("ortgqa")
    build_bundled("dynamo", folder)
    original, calibration = folder / "model.onnx", folder / "model.calibration.safetensors"
    ids = np.asarray(load_tokenizer(folder).encode(heldout_text()[: 8 * CALIBRATED]), np.int64)
    statistics = calibrate(original, ids[:CALIBRATED], context=512, threads=2)
    write_calibration(calibration, statistics)
    converted = {}
    for bits in (8, 4):
        converted[bits] = folder / f"int{bits}.onnx"
        target = target_of("ort-gqa", kv_cache_bit_width=bits)
        options = Options(calibration=calibration)
        convert(original, converted[bits], preset="raw", options=options, target=target)
    return Models(original, calibration, converted, ids[-READ:])


class Plain:
    """A plain session of onnxruntime, without any library of ours."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.names = [entry.name for entry in self.session.get_outputs()]
        self.caches: dict[str, Any] = {}
        types = {"tensor(float)": "float32", "tensor(int8)": "int8", "tensor(uint8)": "uint8"}
        for entry in self.session.get_inputs():
            if entry.name.startswith("past"):
                shape = (1, entry.shape[1], 0, entry.shape[3])
                self.caches[entry.name] = np.zeros(shape, types[entry.type])
        self.past = 0

    def run(self, ids: Ids) -> Floats:
        """Logits ``[T, V]`` of more tokens."""
        end = self.past + len(ids)
        feeds = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self.past, end)[None],
        }
        found = dict(zip(self.names, self.session.run(None, feeds | self.caches), strict=True))
        self.past = end
        for name in self.caches:
            self.caches[name] = found[name.replace("past_key_values", "present")]
        logits: Floats = found[self.names[0]][0].astype(np.float64)
        return logits


def read(path: Path, text: Ids) -> Floats:
    """Logits of a text, of which half is a prompt, and the rest comes token by token."""
    model, half = Plain(path), len(text) // 2
    parts = [model.run(text[:half])]
    parts += [model.run(text[place : place + 1]) for place in range(half, len(text))]
    return np.concatenate(parts)


def divergence(expected: Floats, logits: Floats) -> float:
    def logs(values: Floats) -> Floats:
        shifted = values - values.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    wanted, found = logs(expected), logs(logits)
    return float((np.exp(wanted) * (wanted - found)).sum(axis=-1).mean())


def greedy(path: Path, prompt: Ids, count: int) -> list[int]:
    model = Plain(path)
    tokens = [int(model.run(prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(model.run(np.array(tokens[-1:]))[-1].argmax()))
    return tokens


def test_the_file_runs_without_us_and_loses_little(models: Models) -> None:
    nodes = load(models.converted[8]).model.graph
    assert not any(node.domain == "ai.turboquant" for node in nodes)
    expected = read(models.original, models.text)
    losses = {
        bits: divergence(expected, read(models.converted[bits], models.text)) for bits in (8, 4)
    }
    # Steps that are sixteen times as wide.
    assert 0 < 16 * losses[8] < losses[4]
    flat = divergence(expected, np.zeros_like(expected))
    assert losses[4] < flat / 16
    prompt = models.text[:32]
    assert greedy(models.converted[8], prompt, 16) == greedy(models.original, prompt, 16)


@pytest.mark.parametrize("bits", [8, 4])
def test_our_runtime_computes_the_same_in_place_too(models: Models, bits: int) -> None:
    opened = open_model(models.converted[bits], library=False, threads=1)
    assert opened.signature.bytes_per_token == 4 * 2 * 2 * 128 * bits // 8
    expected = read(models.converted[bits], models.text)
    for capacity in (None, READ + 8):
        runner = opened.decoder(capacity=capacity)
        half = READ // 2
        parts = [runner.prefill(models.text[None, :half])]
        parts += [runner.prefill(models.text[None, at : at + 1]) for at in range(half, READ)]
        logits = np.concatenate(parts, axis=1)[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [8, 4])
def test_verify_holds(models: Models, bits: int) -> None:
    report = verify(
        models.original, models.converted[bits], models.text, source="", threads=1, quick=True
    )
    assert report.holds, failed(report.checks)
    assert {CONSTANTS, CODES, REACH} <= {check.name for check in report.checks}
    # A prompt in pieces, too: the second one attends to the codes of the first.
    (detail,) = (check.detail for check in report.checks if check.name == ATTENTION)
    assert detail.endswith("in calls of 32, 31 and 1 tokens")


def damaged(path: Path, output: Path, factor: float, *, is_hidden: bool) -> Path:
    """Multiply the steps of one layer's keys, and write another digest into the plan if hidden."""
    proto = onnx.load(path)
    name = table_name("key", "steps", 1)
    (tensor,) = (entry for entry in proto.graph.initializer if entry.name == name)
    tensor.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name)
    )
    onnx.save(proto, output, save_as_external_data=False)
    if is_hidden:
        model = load(output).model
        plan = Plan.from_json(model.metadata_props[METADATA_PLAN])
        layers = list(plan.layers)
        digest = adaptation_digest(*constants_in(model, layers[1]).tables)
        layers[1] = replace(layers[1], adaptation=digest)
        for entry in proto.metadata_props:
            if entry.key == METADATA_PLAN:
                entry.value = replace(plan, layers=tuple(layers)).to_json()
        onnx.save(proto, output)
    return output


@pytest.mark.parametrize(
    ("factor", "is_hidden", "name"), [(1.01, False, CONSTANTS), (0.125, True, REACH)]
)
def test_verify_sees_damaged_steps(
    models: Models, tmp_path: Path, factor: float, is_hidden: bool, name: str
) -> None:
    path = damaged(models.converted[8], tmp_path / "x.onnx", factor, is_hidden=is_hidden)
    report = verify(models.original, path, models.text, source="", threads=1, quick=True)
    assert [check.name for check in failed(report.checks)] == [name]


def test_commands(models: Models, tmp_path: Path) -> None:
    converted = models.converted[8]
    assert "int8 with steps, 128 bytes a row" in run("inspect", converted).out
    kept = ("--prompt-cache", tmp_path / "prompts", "--max-new-tokens", 4)
    told = [run("generate", converted, "--prompt", "Call me Ishmael", *kept) for _ in range(2)]
    assert [each.code for each in told] == [0, 0]
    assert told[0].out == told[1].out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "only statistics of a model tell the steps of caches"),
        (("--preset", "int4", "--calibrate"), "codes of their own, and no preset"),
        (("--layers", "0", "--calibrate"), "and no --layers 0; leave it out"),
        (("--sink-tokens", "4", "--calibrate"), "and no --sink-tokens 4"),
        (("--kv-cache-bit-width", "5", "--calibrate"), "5 is neither 8 nor 4"),
    ],
)
def test_what_is_refused(
    models: Models, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    output = tmp_path / "x.onnx"
    told = run("convert", models.original, "--target", "ort-gqa", "-o", output, *flags)
    assert sentence in told.sentence(2)
    assert not output.exists()


def test_a_calibration_of_an_older_version_is_refused(models: Models, tmp_path: Path) -> None:
    known = read_calibration(models.calibration)
    layers = tuple(
        replace(layer, k_quantiles=None, v_quantiles=None, k_range=None) for layer in known.layers
    )
    write_calibration(tmp_path / "old", replace(known, layers=layers))
    flags = ("--target", "ort-gqa", "--calibration", tmp_path / "old", "-o", tmp_path / "x.onnx")
    told = run("convert", models.original, *flags).sentence(2)
    assert "does not tell the steps of codes" in told


def test_attention_that_sees_the_future_is_refused(tmp_path: Path) -> None:
    path, statistics = tmp_path / "model.onnx", tmp_path / "statistics"
    ir.save(decoder(mask=UNMASKED), path)
    ids = np.random.default_rng(0).integers(0, 32, 128)
    write_calibration(statistics, calibrate(path, ids, context=64, threads=1))
    options = Options(calibration=statistics)
    with pytest.raises(UnsupportedModelError, match="not shown to be causal"):
        prepare(path, preset="raw", options=options, target=target_of("ort-gqa"))


def test_channel_codes() -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2, 400, 8)).astype(np.float32)
    rows[0, 0, 3] = 40  # of one token, as sinks have them
    table = quantiles(rows[:, 1:], rows.min(axis=1), rows.max(axis=1))
    assert (np.diff(table, axis=0) >= 0).all()
    wide = ChannelCodes.reaching(table[[0, -1]], 8)
    np.testing.assert_allclose(wide.steps, np.abs(rows).max(axis=1) / 127, rtol=1e-6)
    narrow = ChannelCodes.of(table, 4, centered=True)

    def error(codes: ChannelCodes) -> Floats:
        centered = rows - codes.offset[:, None]
        numbers = np.clip(np.rint(centered / codes.steps[:, None]), -8, 7)
        squares: Floats = ((numbers * codes.steps[:, None] - centered) ** 2).sum(axis=1)
        return squares

    largest = np.abs(rows).max(axis=1)
    zeros = 0 * narrow.offset
    reaching = ChannelCodes(4, zeros, largest / 7)
    nearest = ChannelCodes(4, zeros, best_steps(rows, largest, 4))
    # Of the head whose extremes are no outliers.
    losses = [error(codes)[1].sum() for codes in (nearest, narrow, reaching)]
    assert losses[1] < 1.1 * losses[0] < losses[2]
    numbers = rng.integers(-8, 8, (3, 8)).astype(np.int8)
    raised = (numbers + 8).astype(np.uint8)
    np.testing.assert_array_equal(unpacked(raised[:, ::2] + 16 * raised[:, 1::2]), numbers)
