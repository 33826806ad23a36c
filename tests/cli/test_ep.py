"""``--ep`` and ``info --check`` with the CPU's ONNX Runtime; with the other: ``tests/cann``."""

from __future__ import annotations

import onnxruntime
import pytest

from tests.cli.run import run
from tests.runtime.models import DYNAMO, converted, original
from tq_onnx.runtime import session as sessions

pytestmark = pytest.mark.skipif(
    "CANNExecutionProvider" in onnxruntime.get_available_providers(),
    reason="the wheel has the provider",
)

ABSENT = f"this onnxruntime {onnxruntime.__version__} has no CANNExecutionProvider, only "
INSTALL = "; install onnxruntime-cann in an environment of its own"


def is_absent(sentence: str) -> bool:
    return ABSENT in sentence and sentence.endswith(INSTALL)


def test_verify() -> None:
    assert is_absent(run("verify", original(DYNAMO), converted(DYNAMO), "--ep", "cann").sentence(4))


def test_generate() -> None:
    assert is_absent(run("generate", converted(DYNAMO), "--prompt=x", "--ep=cann").sentence(4))


def test_bodies_on_a_device() -> None:
    outcome = run("generate", converted(DYNAMO), "--prompt=x", "--ep=cann", "--no-library")
    assert "function bodies are not what CANNExecutionProvider runs" in outcome.sentence(2)


def test_a_provider_that_nobody_knows() -> None:
    assert "'gpu' is not one of 'cpu', 'cann'" in run("info", "--ep", "gpu").sentence(2)


def test_info_of_an_installation() -> None:
    outcome = run("info", "--check")
    assert (outcome.code, outcome.err) == (0, "")
    if sessions._HAS_RECORD:
        assert "1 of 1 nodes on CPUExecutionProvider" in outcome.out
    assert run("info", "--json").document["provider"] is None
    assert run("info", "--check", "--json").document["provider"]["problem"] is None


def test_info_of_a_provider_that_is_not_there() -> None:
    assert is_absent(run("info", "--check", "--ep", "cann").sentence(5))
    told = run("info", "--ep", "cann", "--json")
    assert told.code == 0  # a finding
    found = told.document["provider"]
    assert is_absent(found["problem"])
    assert (found["provider"], found["placement"]) == ("CANNExecutionProvider", None)


def test_info_of_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    assert run("info").code == 0
    assert "nowhere.so" in run("info", "--check").sentence(5)


@pytest.mark.parametrize("model", [original, converted])
def test_info_of_a_model(model: object) -> None:
    path = model(DYNAMO)  # type: ignore[operator]
    outcome = run("info", path, "--check", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.document["provider"]
    assert (found["model"], found["problem"]) == (str(path), None)
    placement = found["placement"]
    assert placement["on_provider"] == placement["nodes"]
    assert (placement["encode"], placement["attention"]) == (
        (4, 2) if model is converted else (0, 0)
    )


def test_info_of_a_file_that_is_not_there() -> None:
    assert "nothing.onnx" in run("info", "nothing.onnx").sentence(4)
