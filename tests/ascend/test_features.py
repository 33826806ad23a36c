"""The record of the kernels: its header is current, and a plan is refused by it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tq_onnx
from tq_onnx.ascend import featureheader
from tq_onnx.ascend.features import CODECS, TABLE
from tq_onnx.codec.presets import PRESETS

HEADER = Path(__file__).parents[2] / "custom_ops" / "cann" / "host" / "device_features.h"


def test_committed_header_is_current(tmp_path: Path) -> None:
    assert featureheader.main(["--check", str(HEADER)]) == 0, (
        f"run: python -m tq_onnx.ascend.featureheader {HEADER.name}"
    )
    other = tmp_path / HEADER.name
    other.write_text(HEADER.read_text(encoding="utf-8").replace("{64, 128}", "{64, 96}"))
    assert featureheader.main(["--check", str(other)]) == 1


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "int5", "k5v3", "mse1", "balanced"])
def test_presets_that_there_are_kernels_for(name: str) -> None:
    assert {PRESETS[name].key, PRESETS[name].value} <= set(CODECS)


def test_names_are_told_apart() -> None:
    names = [name for name, _ in TABLE]
    assert len(names) == len(set(names))


# The room is reached by rows: no module of another room names it in code or text.


def test_only_tables_name_the_room() -> None:
    package = Path(tq_onnx.__file__).parent
    modules = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    named = {
        name
        for name, path in modules.items()
        if not name.startswith("ascend/") and "tq_onnx.ascend" in path.read_text(encoding="utf-8")
    }
    assert named == {"targets/registry.py"}
