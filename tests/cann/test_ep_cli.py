"""``--ep cann`` of the commands, in the wheel that has the provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cann.ep_models import LAYERS, decoder
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN
from tests.cli.run import run
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("kernels_named")]

LEFT_OVER = "runs on CPUExecutionProvider (and"
NO_KERNEL = "on CANNExecutionProvider: causal is 0, expected causal"


@pytest.fixture(scope="module")
def for_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An original and its conversion for another provider."""
    folder = tmp_path_factory.mktemp("cpu")
    original = build_bundled("dynamo", folder)
    convert(original, folder / "int4.onnx", options=Options(residual_length=0, sink_tokens=0))
    return original, folder / "int4.onnx"


def test_info_of_the_provider(fake: FakeAcl) -> None:
    outcome = run("info", "--check", "--ep", "cann", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.document
    assert found["provider"]["provider"] == CANN
    assert found["provider"]["placement"]["on_provider"] == 1
    assert found["packages"]["onnxruntime-cann"] == "1.24.4"
    assert "1 of 1 nodes on CANNExecutionProvider" in run("info", "--check", "--ep=cann").out


def test_info_of_a_model(fake: FakeAcl, tmp_path: Path) -> None:
    path = decoder(tmp_path / "model.onnx")
    outcome = run("info", path, "--check", "--ep", "cann", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.document["provider"]["placement"]
    assert found["misplaced"] == []
    assert found["nodes"] == found["on_provider"]
    assert (found["encode"], found["attention"], found["layers"]) == (2 * LAYERS, LAYERS, LAYERS)


def test_info_of_a_model_that_is_not_for_it(fake: FakeAcl, for_the_cpu: tuple[Path, Path]) -> None:
    original, converted = for_the_cpu
    sentence = run("info", original, "--check", "--ep", "cann").sentence(5)
    assert sentence.startswith(f"{original}: node ")
    assert LEFT_OVER in sentence
    found = run("info", original, "--ep", "cann", "--json").document["provider"]
    assert found["problem"] == sentence
    assert len(found["placement"]["misplaced"]) > 30
    assert set(found["placement"]["misplaced"][0]) == {"name", "op_type", "domain", "provider"}
    sentence = run("info", converted, "--check", "--ep", "cann").sentence(5)
    assert sentence.startswith(f"{converted}: onnxruntime")
    assert NO_KERNEL in sentence


def test_a_model_that_is_not_for_it_is_not_run(
    fake: FakeAcl, for_the_cpu: tuple[Path, Path]
) -> None:
    original, converted = for_the_cpu
    for command, reason in (
        (["verify", original, converted], NO_KERNEL),
        (["generate", converted, "--prompt", "x"], NO_KERNEL),
        (["generate", original, "--prompt", "x"], LEFT_OVER),
    ):
        sentence = run(*command, "--ep", "cann").sentence(3)
        assert reason in sentence
        assert sentence.endswith("; convert the original with --target cann")


def test_kernels_that_are_not_there(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(tmp_path / "none.so"))
    path = decoder(tmp_path / "model.onnx")
    sentence = run("info", path, "--check", "--ep", "cann").sentence(5)
    assert "the kernel library for CANN cannot be opened" in sentence
    assert str(tmp_path / "none.so") in sentence
    assert sentence.endswith("name it in TQ_ONNX_CANN_KERNELS")


@pytest.fixture
def without_cann() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process whose loader does not find CANN's libraries."""
    given = {name: text for name, text in os.environ.items() if name != "LD_LIBRARY_PATH"}

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tq_onnx.cli.main", *map(str, arguments)],
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )

    return command


def test_libraries_of_cann_that_are_not_there(
    without_cann: Callable[..., subprocess.CompletedProcess[str]],
    for_the_cpu: tuple[Path, Path],
) -> None:
    """No session of the CPU instead, nothing on stdout but the document, one line on stderr."""
    missing = (
        "onnxruntime 1.24.4 cannot load its CANNExecutionProvider (libascendcl.so: cannot open "
        "shared object file: No such file or directory); install the libraries and the device "
        "that onnxruntime-cann needs, and have the loader find them"
    )
    ran = without_cann("verify", *for_the_cpu, "--ep", "cann")
    assert (ran.returncode, ran.stdout, ran.stderr) == (4, "", f"error: {missing}\n")
    ran = without_cann("info", "--check", "--ep", "cann", "--json")
    assert ran.returncode == 5
    assert json.loads(ran.stdout)["provider"]["problem"] == missing
    assert ran.stderr == f"error: {missing}\n"
    ran = without_cann("info", "--check", "--json")
    assert ran.returncode == 0, ran.stderr
