"""Files that earlier versions converted open, run and verify; see ``tests/fixtures/README.md``."""

from __future__ import annotations

import lzma
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from tests.runtime.models import ids
from tq_onnx.plan import METADATA_PLAN, PLAN_VERSION, plan_in
from tq_onnx.verification import planned
from tq_onnx.verification.planned import plan_problems
from tq_onnx.verification.verify import verify

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted((FIXTURES / "converted").glob("*.onnx.xz"))
TEXT = ids(96, seed=7)[0] % 61
CHANGED = {
    "before-pages": ["TurboQuantDequantAttention"],
    "before-windows": [
        *("CodesOf", "RowScales", "PlainScales", "PackCodes", "LloydMaxRows"),
        "TurboQuantDequantAttention",
    ],
}
"""Function bodies of a file that later versions make otherwise, on purpose."""


def model_of(file: Path) -> onnx.ModelProto:
    return onnx.load_from_string(lzma.decompress(file.read_bytes()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.split(".")[0])
def test_a_file_of_an_earlier_version_holds(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(lzma.decompress(file.read_bytes()))
    report = verify(
        FIXTURES / "genai09-cpu-fp32.onnx",
        path,
        TEXT,
        source="a test",
        new_tokens=8,
        context=64,
        threads=1,
    )
    assert report.kernels and report.holds, report.checks


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.split(".")[0])
def test_function_bodies_are_those_of_this_version(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are compared with them where ``tool_version`` is the same: files that users have."""
    model = ir.serde.deserialize_model(model_of(file))
    plan = plan_in(dict(model.metadata_props))
    assert plan is not None
    monkeypatch.setattr(planned, "__version__", plan.tool_version)
    told = " is not this version's"
    found = [line for line in plan_problems(model, plan, plan) if line.endswith(told)]
    names = [line.removesuffix(told).removeprefix("the function body of ") for line in found]
    assert sorted(names) == sorted(CHANGED.get(file.name.split(".")[0], []))


def test_plans_of_earlier_versions_say_the_same_in_this_one() -> None:
    for file in FILES:
        metadata = {entry.key: entry.value for entry in model_of(file).metadata_props}
        plan = plan_in(metadata)
        assert plan is not None
        assert ('"version"' in metadata[METADATA_PLAN]) == file.name.startswith("plan-3")
        text = plan.to_json()
        assert f'"version": {PLAN_VERSION}' in text
        assert plan_in({METADATA_PLAN: text}) == plan
        assert [cache.size for cache in plan.caches] == [16] * 4
