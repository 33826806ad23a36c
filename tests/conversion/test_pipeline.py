from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.covering import exports
from tests.files.models import DYNAMO, FIXTURES, GENAI, external, inline, snapshot
from tests.runtime.models import ids, original
from tq_onnx.codec.presets import HADAMARD, PRESETS, Preset
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import UNIFORM
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import STEPS, convert
from tq_onnx.errors import (
    AlreadyConvertedError,
    ModelFileError,
    OutputExistsError,
    TqOnnxError,
    UsageError,
)
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import Progress
from tq_onnx.runtime.opening import open_model

ALL = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


@pytest.mark.parametrize("fixture", exports(ALL))
def test_every_export_converts(tmp_path: Path, fixture: str) -> None:
    path = external(tmp_path, fixture)
    before = snapshot(tmp_path)
    seen: list[Progress] = []
    offered = inspect(path)
    report = convert(path, tmp_path / "new.onnx", on_progress=seen.append)
    assert seen == [Progress(step, done, 6) for done, step in enumerate(STEPS)]
    after = snapshot(tmp_path)
    assert set(after) - set(before) == {"new.onnx"}
    assert all(after[name] == digest for name, digest in before.items())
    assert report.bytes_per_token_after == report.plan.bytes_per_token
    assert report.bytes_per_token_before == offered.bytes_per_token
    assert report.bytes_per_token_after == offered.presets[0].bytes_per_token
    assert report.ratio == pytest.approx(offered.presets[0].ratio)
    size = report.plan.layers[0].head_size
    width = ir.DataType[report.plan.layers[0].dtype].itemsize
    assert report.ratio == pytest.approx(size * width / (size // 2 + 2))
    found = inspect(tmp_path / "new.onnx")
    assert found.plan == report.plan
    assert found.bytes_per_token == report.bytes_per_token_after
    json.dumps(asdict(report), default=str)
    json.dumps(asdict(found), default=str)


@pytest.mark.parametrize("fixture", [DYNAMO, GENAI])
def test_the_weights_are_the_same_bytes_and_references(tmp_path: Path, fixture: str) -> None:
    path = external(tmp_path, fixture)
    convert(path, tmp_path / "new.onnx")
    old = onnx.load(path, load_external_data=False).graph.initializer
    new = onnx.load(tmp_path / "new.onnx", load_external_data=False).graph.initializer
    here = {tensor.name: tensor for tensor in new}
    assert any(tensor.external_data for tensor in old)
    for tensor in old:
        if tensor.external_data:
            assert here[tensor.name].external_data == tensor.external_data
        elif tensor.name in here:
            assert here[tensor.name].raw_data == tensor.raw_data


def test_a_float16_cache_is_3_88_times_smaller(tmp_path: Path) -> None:
    report = convert(inline(tmp_path, "dynamo-op18-sdpa-hd128-fp16"), tmp_path / "new.onnx")
    assert round(report.ratio, 2) == 3.88


def test_options_reach_the_plan(tmp_path: Path) -> None:
    path = inline(tmp_path)
    report = convert(
        path, tmp_path / "a.onnx", preset="int2", options=Options(seed=3, rotation="hadamard")
    )
    assert (report.plan.preset, report.plan.seed, report.plan.rotation) == ("int2", 3, "hadamard")
    for bad in ({"preset": "int9"}, {"options": Options(rotation="twist")}):
        with pytest.raises(UsageError, match="is not one of"):
            convert(path, tmp_path / "b.onnx", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "b.onnx").exists()


def test_an_output_that_exists_is_refused_before_the_work(tmp_path: Path) -> None:
    path = inline(tmp_path)
    seen: list[Progress] = []
    with pytest.raises(OutputExistsError):
        convert(path, FIXTURES / f"{GENAI}.onnx", on_progress=seen.append)
    assert [progress.doing for progress in seen] == ["Reading the graph"]


def test_a_conversion_that_goes_wrong_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(model: ir.Model, plan: Plan) -> None:
        bake_metadata(model, plan)
        model.metadata_props.pop("tq_onnx.layout_digest")

    monkeypatch.setattr(pipeline, "bake_metadata", forgetful)
    path = external(tmp_path / "in")
    before = snapshot(tmp_path)
    with pytest.raises(TqOnnxError, match="digest"):
        convert(path, tmp_path / "out" / "new.onnx")
    assert snapshot(tmp_path) == before


def test_a_pass_that_fails_on_a_valid_model_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(pipeline.ConvertPass):
        def ensures(self, model: ir.Model) -> None:
            raise ir.passes.PostconditionError("it went wrong")

    monkeypatch.setattr(pipeline, "ConvertPass", Failing)
    with pytest.raises(TqOnnxError, match=r"it went wrong.*defect") as caught:
        convert(inline(tmp_path), tmp_path / "new.onnx")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "new.onnx").exists()


def test_inspect_names_the_file_of_a_model_with_our_nodes_but_no_plan(tmp_path: Path) -> None:
    convert(inline(tmp_path), tmp_path / "new.onnx")
    proto = onnx.load(tmp_path / "new.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "bare.onnx")
    with pytest.raises(AlreadyConvertedError, match=r"bare\.onnx"):
        inspect(tmp_path / "bare.onnx")


def test_a_plan_without_its_caches_is_refused(tmp_path: Path) -> None:
    convert(inline(tmp_path), tmp_path / "new.onnx")
    proto = onnx.load(tmp_path / "new.onnx")
    text = next(p.value for p in proto.metadata_props if p.key == METADATA_PLAN)
    original = onnx.load(FIXTURES / f"{GENAI}.onnx")
    past = Plan.from_json(text).layers[0].key.past
    for value in (*original.graph.input,):
        if value.name == past:
            value.name = "renamed"
    for node in original.graph.node:
        for index, name in enumerate(node.input):
            if name == past:
                node.input[index] = "renamed"
    original.metadata_props.add(key=METADATA_PLAN, value=text)
    onnx.save(original, tmp_path / "liar.onnx")
    with pytest.raises(ModelFileError, match="metadata"):
        inspect(tmp_path / "liar.onnx")


def test_reports_are_frozen_all_the_way_down(tmp_path: Path) -> None:
    report = convert(inline(tmp_path), tmp_path / "new.onnx")

    def frozen(data: Any) -> None:
        assert not isinstance(data, list | dict | set)
        if is_dataclass(data):
            assert data.__dataclass_params__.frozen  # type: ignore[union-attr]
            for field in fields(data):
                frozen(getattr(data, field.name))
        elif isinstance(data, tuple):
            for item in data:
                frozen(item)

    frozen(report)
    frozen(inspect(tmp_path / "new.onnx"))
    frozen(inspect(tmp_path / "model.onnx"))


def test_an_added_preset_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is all that it takes; kernels and bodies agree."""
    row = Preset("k5v2", Codec(LLOYD_MAX, 5), Codec(UNIFORM, 2), HADAMARD, "a test")
    with pytest.raises(UsageError, match="preset 'k5v2' is not one of"):
        convert(original(DYNAMO), tmp_path / "model.onnx", preset="k5v2")
    monkeypatch.setitem(PRESETS, row.name, row)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")  # as the bodies
    report = convert(original(DYNAMO), tmp_path / "model.onnx", preset="k5v2")
    assert report.plan.preset == "k5v2"
    logits = []
    for library in (True, False):
        opened = open_model(tmp_path / "model.onnx", library=library, threads=1)
        decoder = opened.decoder()
        logits += [decoder.prefill(ids(17)), decoder.step(ids(1))]
        widths = [row_layout(codec, 64).row_bytes for codec in (row.key, row.value)]
        assert [decoder.cache(index).shape[-1] for index in range(2)] == widths
    for kernel, body in zip(logits[:2], logits[2:], strict=True):
        np.testing.assert_allclose(kernel, body, atol=1e-4 * np.abs(body).max())
