"""What fuzzing has found stays found, and the fuzzers see it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.fuzz import model
from tests.fuzz.commands import Case
from tests.fuzz.found import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    export, edit = MODELS[name]
    proto = onnx.load_from_string(model.export(export))
    edit(proto)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    case = Case(tmp_path)
    case.convert(path)
    assert case.problems == []
