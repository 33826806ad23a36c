"""``report``: several conversions, and their layers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoders import synthetic
from tests.runtime.models import DYNAMO, GENAI, VOCABULARY, ids, opened, original
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, UsageError, VerificationError
from tq_onnx.measure.divergence import compare
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.windows import Window, blocks, windows
from tq_onnx.ops.domain import ATTENTION
from tq_onnx.quality import recording as recordings
from tq_onnx.quality.figures import ComparisonReport
from tq_onnx.quality.layers import LayerErrors, measure_layers
from tq_onnx.quality.recording import Recording
from tq_onnx.quality.report import report as make_report
from tq_onnx.quality.tables import (
    layer_table,
    report_notes,
    report_table,
)
from tq_onnx.runtime.opening import open_model
from tq_onnx.verification.verify import verify

TEXT = ids(200, seed=7)[0]
CONTEXT = 64
HEADS, HEAD_SIZE, LAYERS = 2, 64, 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("report")

    @cache
    def make(name: str, preset: str) -> Path:
        output = folder / f"{name}.{preset}.onnx"
        convert(original(name), output, preset=preset)
        return output

    return make


@pytest.fixture(scope="module")
def report(models: Callable[[str, str], Path]) -> ComparisonReport:
    paths = [models(DYNAMO, preset) for preset in ("int4", "int2", "raw")]
    return make_report(original(DYNAMO), paths, TEXT, source="made up", context=CONTEXT, threads=1)


@given(st.integers(2, 500), st.integers(2, 80))
def test_blocks_stand_side_by_side(tokens: int, context: int) -> None:
    found = blocks(tokens, context)
    assert all(block.scored == block.start for block in found)
    size = min(context, tokens)
    assert [block.start for block in found] == [index * size for index in range(tokens // size)]
    assert {block.stop - block.start for block in found} == {size}


@pytest.mark.parametrize(("tokens", "context"), [(1, 8), (9, 1)])
def test_blocks_that_make_no_sense(tokens: int, context: int) -> None:
    with pytest.raises(UsageError):
        blocks(tokens, context)


def test_a_recording_compares_as_two_open_models_do() -> None:
    todo = windows(len(TEXT), CONTEXT, 20)
    with Recording(
        opened(DYNAMO, "original").decoder(), TEXT, todo, vocabulary=VOCABULARY
    ) as recording:
        found = [recording.compare(opened(DYNAMO, "kernel").decoder(), stride=20) for _ in range(2)]
    wanted = compare(
        opened(DYNAMO, "original").decoder(),
        opened(DYNAMO, "kernel").decoder(),
        TEXT,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        stride=20,
    )
    assert found == [wanted, wanted]
    assert wanted.positions == len(TEXT) - 1


def test_a_recording_that_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recordings.shutil, "disk_usage", lambda _: SimpleNamespace(free=199 * VOCABULARY * 4 - 1)
    )
    with pytest.raises(UsageError, match="TMPDIR"):
        Recording(
            opened(DYNAMO, "original").decoder(),
            TEXT,
            [Window(0, 200, 0)],
            vocabulary=VOCABULARY,
        )


def test_figures_are_those_of_the_definition(report: ComparisonReport) -> None:
    assert (report.windows, report.tokens, report.positions) == (3, 192, 3 * (CONTEXT - 1))
    converted = open_model(report.models[0].path, threads=1)
    own, other = opened(DYNAMO, "original").decoder(), converted.decoder()
    losses, kl = [], []
    for start in range(0, 192, CONTEXT):
        window = TEXT[start : start + CONTEXT]
        logs = []
        for decoder in (own, other):
            decoder.reset()
            logits = decoder.prefill(window[None])[0, :-1].astype(np.float64)
            logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        losses.append([-log[np.arange(CONTEXT - 1), window[1:]] for log in logs])
        kl.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1))
    before, after = np.exp(np.concatenate(losses, axis=1).mean(axis=1))
    int4 = report.models[0].quality
    assert report.perplexity == pytest.approx(before, rel=1e-6)
    assert int4.converted_perplexity == pytest.approx(after, rel=1e-6)
    assert int4.perplexity_change == pytest.approx(after / before - 1, rel=1e-3)
    assert int4.kl_mean == pytest.approx(np.mean(kl), rel=1e-4)
    assert int4.kl_first_half == pytest.approx(np.mean([one[:32] for one in kl]), rel=1e-4)
    assert int4.kl_second_half == pytest.approx(np.mean([one[32:] for one in kl]), rel=1e-4)
    assert int4.kl_by_position == pytest.approx((np.mean(kl),), rel=1e-4)
    assert int4.kl_p99 == pytest.approx(np.percentile(np.concatenate(kl), 99), rel=1e-4)
    assert int4.kl_error == pytest.approx(np.std(kl) / np.sqrt(3 * 63), rel=1e-4)
    change = np.concatenate(losses, axis=1)
    spread = np.std(change[1] - change[0]) / np.sqrt(3 * 63)
    assert int4.perplexity_change_error == pytest.approx(after / before * spread, rel=1e-4)


def test_models_are_told_apart(report: ComparisonReport) -> None:
    int4, int2, raw = report.models
    assert [model.name for model in report.models] == ["int4", "int2", "raw"]
    assert raw.quality.kl_mean < 1e-9 < int4.quality.kl_mean < int2.quality.kl_mean
    assert raw.quality.top1_agreement == 1


def test_sizes_are_those_of_the_types(report: ComparisonReport) -> None:
    values = 2 * LAYERS * HEADS * HEAD_SIZE
    assert report.bytes_per_token == 4 * values
    int4, int2, raw = report.models
    row = HEAD_SIZE // 2 + 2
    assert int4.bytes_per_token == 2 * LAYERS * HEADS * row
    window = 36 * -(-(2 * HEAD_SIZE + 4) // row)
    assert int4.window_bytes == window * int4.bytes_per_token
    assert int4.bytes_at == tuple(
        int4.bytes_per_token * (tokens + window) / tokens for tokens in (1024, 8192, 32768)
    )
    assert raw.bytes_at == (raw.bytes_per_token,) * 3
    assert int4.bits_per_value == pytest.approx(4 + 16 / HEAD_SIZE)
    assert int2.compression == pytest.approx(32 / (2 + 16 / HEAD_SIZE))
    assert (raw.bits_per_value, raw.compression) == (32, 1)


def test_layers_answer_for_themselves(report: ComparisonReport) -> None:
    int4, int2, raw = report.models
    for layer in raw.layers:
        assert layer.key_error == layer.value_error == 0
        assert (layer.key_theory, layer.value_theory) == (None, None)
        assert layer.attention_cosine_lowest == pytest.approx(1, abs=1e-10)
    for model, wanted in ((int4, 0.0070), (int2, 0.126)):
        for layer in model.layers:
            for error, theory in (
                (layer.key_error, layer.key_theory),
                (layer.value_error, layer.value_theory),
            ):
                assert error == pytest.approx(theory, rel=0.2)
                assert theory == pytest.approx(wanted, rel=0.05)
            assert layer.attention_cosine_lowest < layer.attention_cosine < 1 - 1e-5
    assert int2.layers[0].attention_cosine < int4.layers[0].attention_cosine
    assert int2.layers[1].attention_cosine < int4.layers[1].attention_cosine


def lowest(layers: tuple[LayerErrors, ...]) -> list[float]:
    return [layer.attention_cosine_lowest for layer in layers]


def test_attention_that_is_wrong_is_seen(
    models: Callable[[str, str], Path], tmp_path: Path
) -> None:
    proto = onnx.load(models(DYNAMO, "raw"))
    node = next(node for node in proto.graph.node if node.op_type == ATTENTION)
    next(attribute for attribute in node.attribute if attribute.name == "scale").f *= 3
    path = tmp_path / "wrong.onnx"
    path.write_bytes(proto.SerializeToString())
    first, second = lowest(measure_layers(expose_internals(path), TEXT[:CONTEXT], threads=1))
    assert first < 0.999
    assert second == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("name", ["legacy-one-token", "hf-static-decode", GENAI])
def test_layers_of_graphs_that_are_fed_otherwise(
    models: Callable[[str, str], Path], name: str
) -> None:
    layers = measure_layers(
        expose_internals(models(name, "raw")), ids(24, seed=3)[0] % 61, threads=1
    )
    assert min(lowest(layers)) == pytest.approx(1, abs=1e-8)
    assert [layer.key_error for layer in layers] == [0] * len(layers)


def test_without_kernels(models: Callable[[str, str], Path]) -> None:
    stages: list[str] = []
    found = make_report(
        original(DYNAMO),
        [models(DYNAMO, "int4")],
        TEXT,
        source="",
        context=CONTEXT,
        stride=20,
        library=False,
        threads=1,
        on_progress=lambda progress: stages.append(progress.doing),
    )
    assert found.positions == len(TEXT) - 1
    assert found.stride == 20
    assert "the function bodies ran" in " ".join(report_notes(found))
    assert list(dict.fromkeys(stages)) == [
        "Opening the original",
        "Comparing everything but the codecs with the original",
        "Reading the text with the original",
        "Opening int4",
        "Reading the text with int4",
        "Reading the layers of int4",
    ]


def test_models_with_one_preset_are_named_by_their_files(
    models: Callable[[str, str], Path], tmp_path: Path
) -> None:
    paths = [models(DYNAMO, "int4"), tmp_path / "again.onnx"]
    shutil.copyfile(*paths)
    found = make_report(original(DYNAMO), paths, 64, source="", context=32, threads=1)
    assert [model.name for model in found.models] == [f"int4 ({path.name})" for path in paths]


def test_refusals(models: Callable[[str, str], Path]) -> None:
    int4 = models(DYNAMO, "int4")
    with pytest.raises(UnsupportedModelError, match="was not converted"):
        make_report(original(DYNAMO), [int4, original(DYNAMO)], 64, source="")
    with pytest.raises(UnsupportedModelError, match="converted one already"):
        make_report(int4, [int4], 64, source="")
    with pytest.raises(VerificationError, match="was not made from"):
        make_report(original(GENAI), [int4], 64, source="")
    wide = original("dynamo-op18-sdpa-hd128-fp16")
    with pytest.raises(VerificationError, match="the caches have other heads"):
        make_report(wide, [int4], 64, source="")
    longer = ir.load(int4)
    longer.graph.outputs[0].shape = ir.Shape(["B", "T", 98])
    ir.save(longer, int4.with_name("longer.onnx"))
    with pytest.raises(VerificationError, match="the model has 98 logits, not 97"):
        make_report(original(DYNAMO), [int4.with_name("longer.onnx")], 64, source="")
    with pytest.raises(UsageError, match="too short"):
        make_report(original(DYNAMO), [int4], [1] * 8, source="")
    with pytest.raises(UsageError, match="the model knows 97"):
        make_report(original(DYNAMO), [int4], [97] * 64, source="")
    with pytest.raises(UsageError, match="cannot advance by 64"):
        make_report(original(DYNAMO), [int4], 128, source="", context=64, stride=64)


def test_tables(report: ComparisonReport) -> None:
    table = report_table(report)
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[0] for row in table.rows] == ["original", "int4", "int2", "raw"]
    assert table.columns[:2] == ("model", ">bits/value")
    assert table.rows[1][:6] == ("int4", "4.25", "310", "277", "273", "3.75")
    layers = layer_table(report.models[0], 64)
    assert [row[:2] for row in layers.rows] == [("0", "lloyd_max 4"), ("1", "lloyd_max 4")]
    assert all("%" in row[3] for row in layers.rows)


def test_the_same_model_opens_as_before() -> None:
    """``refuse_tokens`` is what verify and report share."""
    found = open_model(original(DYNAMO), threads=1)
    found.refuse_tokens(TEXT)
    with pytest.raises(UsageError, match="-1"):
        found.refuse_tokens(np.array([-1]))


def test_caches_that_keep_a_window_of_the_tokens(tmp_path: Path) -> None:
    """No call sees all rows that were written, so that layers cannot be judged by them."""
    parts = {
        "cache": synthetic.SLIDING_CACHE,
        "repeat": synthetic.SLIDING_REPEAT,
        "mask": synthetic.SLIDING_MASK,
        "infer": False,
    }
    before, after = tmp_path / "model.onnx", tmp_path / "model.k8v4.onnx"
    ir.save(synthetic.decoder(**parts), before)
    convert(before, after, preset="k8v4")
    found = make_report(before, [after], 48, source="", threads=1)
    assert found.models[0].layers == ()
    assert 0 < found.models[0].quality.kl_mean < 1
    with pytest.raises(UnsupportedModelError, match="keep a window of the tokens"):
        verify(before, after, 48, source="", new_tokens=4, threads=1)
