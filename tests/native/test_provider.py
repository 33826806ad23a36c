"""The library as an execution provider: the second door to the same kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.language.models import folder
from tests.native import provider_door
from tq_onnx.runtime.library import get_library_path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "plugin"
HEADERS = "TQ_ORT_INCLUDE"

has_providers = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24),
    reason="providers bring operators since ONNX Runtime 1.24",
)


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def inputs(model: Path) -> list[str]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(get_library_path()))
    session = onnxruntime.InferenceSession(str(model), options)
    return [each.name for each in session.get_inputs()]


@has_providers
def test_the_same_kernels_by_a_registration_of_the_process() -> None:
    model = folder("int4") / "model.onnx"
    found = json.loads(run(sys.executable, "-m", provider_door.__name__, model))
    assert found["devices"] == ["CPU"]
    for turn in ("first", "second"):  # the library was unloaded between
        assert all(found[turn]["equal"].values()), found
        assert found[turn]["providers"] == ["CPUExecutionProvider"]
        assert found[turn]["kernels"] > 0
        assert found[turn]["kernels by name"] == 0  # as examples/plugin/README.md says
    assert found["left"] == []


@has_providers
def test_the_example_in_python() -> None:
    model = folder("int4") / "model.onnx"
    out = run(sys.executable, EXAMPLES / "session.py", get_library_path(), model)
    assert out.split() == inputs(model)


@pytest.mark.skipif(
    HEADERS not in os.environ, reason=f"{HEADERS} names no folder of ONNX Runtime's headers"
)
def test_the_example_in_cpp(tmp_path: Path) -> None:
    model = folder("int4") / "model.onnx"
    (file,) = Path(onnxruntime.__file__, "..", "capi").resolve().glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(file)
    program = tmp_path / "session"
    warnings = ("-Wall", "-Wextra", "-Werror", "-std=c++17")
    libraries = ("-L", tmp_path, "-lonnxruntime", "-o", program)
    source = EXAMPLES / "session.cpp"
    run("g++", *warnings, "-I", os.environ[HEADERS], source, *libraries)
    out = run(program, get_library_path(), model, LD_LIBRARY_PATH=str(tmp_path))
    assert out.split() == inputs(model)
