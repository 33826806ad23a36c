"""``verify`` on real exports, and on conversions that were tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.codec.theory import unrounded
from tests.files.models import external
from tests.runtime.models import CONVERTIBLE, DYNAMO, GENAI, HALF, converted, ids, original
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, UsageError, VerificationError
from tq_onnx.measure.feeding_modes import compare_feeding_modes
from tq_onnx.measure.windows import text_of
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import Progress
from tq_onnx.runtime.opening import open_converted
from tq_onnx.verification.findings import VerifyReport
from tq_onnx.verification.tables import verify_tables
from tq_onnx.verification.verify import verify

TEXT = ids(160, seed=7)[0]


def check(before: Path, after: Path, *, library: bool = True) -> VerifyReport:
    return verify(
        before, after, TEXT, source="a test", new_tokens=8, context=96, library=library, threads=1
    )


def failed(report: VerifyReport) -> str:
    return "; ".join(entry.name for entry in report.checks if not entry.holds)


@pytest.mark.parametrize("name", [*CONVERTIBLE, HALF])
def test_a_conversion_holds(name: str) -> None:
    report = check(original(name), converted(name))
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    assert len(report.checks) == 17
    assert len(report.layers) == 4
    assert len(report.ladder) == 4
    assert report.memory.original_bytes == 64 * report.memory.original_bytes_per_token
    assert report.memory.ratio == pytest.approx(3.88 if name == HALF else 7.53, abs=0.01)
    assert report.modes.in_place_bytes_differing == 0
    assert 0 < report.quality.kl_mean < 0.05
    assert all(0.005 < drift.key < 0.06 for drift in report.drift)


def test_weights_that_round_activations_are_no_fault(tmp_path: Path) -> None:
    """MatMulNBits may round what it multiplies to int8, which float noise tips."""
    before, after = original("genai-cpu-int4-hd128"), tmp_path / "model.onnx"
    convert(before, after)  # its window makes chunks of one token
    opened = open_converted(after, threads=1, exact=True)
    text = text_of(opened, 384)[264:]  # some of its codes tip
    tipped, _ = compare_feeding_modes(opened, text[:64])
    found = verify(before, after, text, source="ids", context=96, new_tokens=2, threads=1).modes
    assert found.chunk == tipped.chunk == 1
    rows = found.chunk_layer_rows_differing, tipped.chunk_layer_rows_differing
    assert rows[0] <= 4 < rows[1]  # a tie of gains tips a whole row


def sinking(path: Path, sinks: np.ndarray | None) -> Path:
    """A model of GroupQueryAttention with these sinks; None for a smooth softmax."""
    model = onnx.load(original(GENAI))
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        if sinks is None:
            node.attribute.append(
                onnx.AttributeProto(name="smooth_softmax", type=onnx.AttributeProto.INT, i=1)
            )
        else:
            node.input.extend([""] * (12 - len(node.input)))
            node.input[11] = "sinks"
    if sinks is not None:
        model.graph.initializer.append(numpy_helper.from_array(sinks, "sinks"))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "sinks", [np.array([1.5, -1, 0.3, 4], np.float32), None], ids=["sinks", "smooth"]
)
def test_a_conversion_with_sinks_holds(tmp_path: Path, sinks: np.ndarray | None) -> None:
    before, after = sinking(tmp_path / "before.onnx", sinks), tmp_path / "after.onnx"
    convert(before, after)
    report = check(before, after)
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    assert len(report.ladder) == 4
    assert "sinks" in inspect(before).layers[0].mask


def test_sinks_that_were_lost_are_seen(tmp_path: Path) -> None:
    """Each operator is right on its own inputs; the whole model is far from its original."""
    before = sinking(tmp_path / "before.onnx", np.full(4, 3, np.float32))
    after = tmp_path / "after.onnx"
    convert(before, after)
    kept = check(before, after).quality.kl_mean
    model = onnx.load(after)
    (sinks,) = (tensor for tensor in model.graph.initializer if tensor.name == "sinks")
    sinks.CopyFrom(numpy_helper.from_array(np.full(4, -np.inf, np.float32), "sinks"))
    onnx.save(model, after)
    assert check(before, after).quality.kl_mean > 4 * kept


@pytest.mark.parametrize("preset", ["int3", "int2"])
def test_other_presets_hold_too(tmp_path: Path, preset: str) -> None:
    output = tmp_path / "model.onnx"
    convert(original(DYNAMO), output, preset=preset, options=Options(seed=7, rotation="hadamard"))
    report = check(original(DYNAMO), output)
    assert report.holds, [entry for entry in report.checks if not entry.holds]


@pytest.mark.parametrize(
    ("preset", "name", "options", "checks"),
    [
        ("k8v4", DYNAMO, Options(), 17),
        ("k8v4", HALF, Options(), 17),
        ("3bit_nc", HALF, Options(), 18),
        ("prod4", DYNAMO, Options(layers="1"), 17),
        ("ascend-u8", GENAI, Options(), 17),
        ("safe-lowbit", GENAI, Options(equal_rows=True), 18),
        ("raw", DYNAMO, Options(), 17),
    ],
)
def test_every_kind_of_codec_holds(
    tmp_path: Path, preset: str, name: str, options: Options, checks: int
) -> None:
    output = tmp_path / "model.onnx"
    convert(original(name), output, preset=preset, options=options)
    report = check(original(name), output)
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    assert len(report.checks) == checks
    assert len(verify_tables(report)) == 3


def test_bodies_alone() -> None:
    report = check(original(DYNAMO), converted(DYNAMO), library=False)
    assert report.holds
    assert {one.backend for one in report.ladder} == {"function body"}
    assert report.logits_kernel_body is None


def test_external_data(tmp_path: Path) -> None:
    before = external(tmp_path)
    after = tmp_path / "after.onnx"
    convert(before, after)
    assert check(before, after).holds


def test_pseudo_random_tokens_are_the_same_every_time() -> None:
    """Windows are no longer than the tables of positions, of 64 rows here, whatever is asked."""
    name = "mobius-default"

    def one() -> VerifyReport:
        return verify(original(name), converted(name), 80, source="", new_tokens=4, threads=1)

    first = one()
    assert first.holds
    assert first.tokens == 80
    assert first.quality == one().quality


def test_progress_is_told() -> None:
    seen: list[Progress] = []
    verify(
        original(DYNAMO),
        converted(DYNAMO),
        TEXT[:32],
        source="",
        new_tokens=2,
        context=32,
        threads=1,
        on_progress=seen.append,
    )
    assert all(progress.done <= (progress.total or 0) for progress in seen)
    doing = [progress.doing for progress in seen]
    assert "Reading the text with both models" in doing
    assert "Comparing the layers with the reference" in doing


def test_a_report_is_drawn() -> None:
    report = check(original(DYNAMO), converted(DYNAMO))
    text = "".join(map(str, verify_tables(report)))
    for word in ("perplexity", "KL divergence", "cache bytes per token", "lloyd_max 4", "ok"):
        assert word in text


Tamper = Callable[[onnx.ModelProto], None]


def tampered(tmp_path: Path, tamper: Tamper, name: str = DYNAMO) -> Path:
    proto = onnx.load(converted(name))
    tamper(proto)
    path = tmp_path / "tampered.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def table(proto: onnx.ModelProto, index: int, layer: int = 0) -> onnx.TensorProto:
    """An initializer of the first encode node of a layer."""
    nodes = [node for node in proto.graph.node if node.op_type == ENCODE]
    wanted = nodes[2 * layer].input[index]
    return next(tensor for tensor in proto.graph.initializer if tensor.name == wanted)


def change(tensor: onnx.TensorProto, by: Callable[[np.ndarray], np.ndarray]) -> None:
    array = by(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def stretch_rotation(proto: onnx.ModelProto) -> None:
    change(table(proto, 3, layer=1), lambda r: (r * 1.2).astype(np.float32))


def other_rotation(proto: onnx.ModelProto) -> None:
    change(table(proto, 3), lambda r: np.ascontiguousarray(r[:, ::-1]))


def other_centroids(proto: onnx.ModelProto) -> None:
    change(table(proto, 4), lambda c: (c * 1.5).astype(np.float32))


def other_boundaries(proto: onnx.ModelProto) -> None:
    change(table(proto, 5), lambda t: (t + np.float32(0.05)).astype(np.float32))


def optimal_boundaries(proto: onnx.ModelProto) -> None:
    book = unrounded(4, table(proto, 3).dims[0])
    change(table(proto, 5), lambda _: book.boundaries)


def other_scale(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == ATTENTION:
            next(a for a in node.attribute if a.name == "scale").f *= 1.1
            return


def other_seed(proto: onnx.ModelProto) -> None:
    for entry in proto.metadata_props:
        if entry.key == METADATA_PLAN:
            entry.value = replace(Plan.from_json(entry.value), seed=43).to_json()


def other_weights(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if "embed" in t.name and len(t.dims) == 2)
    change(tensor, lambda w: np.ascontiguousarray(w[::-1]))


@pytest.mark.parametrize(
    ("tamper", "check_name"),
    [
        (stretch_rotation, "baked tables"),
        (other_rotation, "baked tables"),
        (other_centroids, "baked tables"),
        (other_boundaries, "baked tables"),
        (other_boundaries, "reconstruct"),
        (optimal_boundaries, "baked tables"),
        (other_scale, "attention: kernel"),
        (other_scale, "attention: function body"),
        (other_seed, "baked tables"),
        (other_weights, "first layer caches"),
    ],
)
def test_tampering_is_found(tmp_path: Path, tamper: Tamper, check_name: str) -> None:
    report = check(original(DYNAMO), tampered(tmp_path, tamper))
    assert not report.holds
    assert check_name in failed(report)


def test_the_wrong_original_is_told_at_once() -> None:
    with pytest.raises(VerificationError, match="was not made from"):
        check(original(HALF), converted(DYNAMO))


@pytest.mark.parametrize("name", [DYNAMO, GENAI])
def test_roles_must_not_be_swapped(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="converted one already"):
        check(converted(name), converted(name))
    with pytest.raises(UnsupportedModelError, match="was not converted by tq-onnx"):
        check(original(name), original(name))


def test_an_original_that_the_cpu_cannot_run(tmp_path: Path) -> None:
    fixture = original("genai-cuda-fp16")
    after = tmp_path / "after.onnx"
    convert(fixture, after)
    with pytest.raises(UnsupportedModelError, match="exported for a GPU") as caught:
        check(fixture, after)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1] * 8, "too short"), ([96] * 20 + [97], "knows 97"), ([-1] * 20, "-1")],
)
def test_texts_that_do_not_fit(tokens: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify(original(DYNAMO), converted(DYNAMO), tokens, source="", threads=1)


def test_files_stay_as_they_are(tmp_path: Path) -> None:
    files = [
        Path(shutil.copyfile(path, tmp_path / name))
        for path, name in ((original(DYNAMO), "a.onnx"), (converted(DYNAMO), "b.onnx"))
    ]
    before = [path.read_bytes() for path in files]
    check(*files)
    assert [path.read_bytes() for path in files] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
