"""Files that earlier versions converted open, run and verify; see ``tests/fixtures/README.md``."""

from __future__ import annotations

import lzma
from pathlib import Path

import onnx
import pytest

from tests.runtime.models import ids
from tq_onnx.plan import METADATA_PLAN, PLAN_VERSION, plan_in
from tq_onnx.verification.verify import verify

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted((FIXTURES / "converted").glob("*.onnx.xz"))
TEXT = ids(96, seed=7)[0] % 61


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


def test_plans_of_earlier_versions_say_the_same_in_this_one() -> None:
    for file in FILES:
        model = onnx.load_from_string(lzma.decompress(file.read_bytes()))
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        plan = plan_in(metadata)
        assert plan is not None and '"version"' not in metadata[METADATA_PLAN]
        text = plan.to_json()
        assert f'"version": {PLAN_VERSION}' in text
        assert plan_in({METADATA_PLAN: text}) == plan
        assert [cache.size for cache in plan.caches] == [16] * 4
