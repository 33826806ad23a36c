"""What fuzzing has found stays found, and the fuzzers see it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.fuzz import model
from tests.fuzz.commands import Case
from tests.fuzz.found import MODELS, VERIFIED, Edit
from tq_onnx.errors import ModelFileError
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.integrations.huggingface import TOKENIZER_FILE, load_tokenizer


def edited(folder: Path, export: str, edit: Edit) -> Path:
    proto = onnx.load_from_string(model.export(export))
    edit(proto)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    path = edited(tmp_path, *MODELS[name])
    case = Case(tmp_path)
    case.convert(path)
    assert case.problems == []


@pytest.mark.parametrize("preset", ["raw", "int4"])
@pytest.mark.parametrize("name", VERIFIED)
def test_verify(name: str, preset: str, tmp_path: Path) -> None:
    *rest, code = VERIFIED[name]
    path = edited(tmp_path, *rest)
    case = Case(tmp_path)
    converted = tmp_path / "converted.onnx"
    case.run("convert", path, "--preset", preset, "-o", converted, codes=[0])
    case.run("verify", path, converted, "--threads", 1, codes=[code])
    assert case.problems == []


def test_a_tokenizer_with_which_its_library_panics(tmp_path: Path) -> None:
    fields = json.loads((bundled_directory() / TOKENIZER_FILE).read_text(encoding="utf-8"))
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps({**fields, "normalizer": [""]}))
    with pytest.raises(ModelFileError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path).encode("a b\n")
