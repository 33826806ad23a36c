"""``tq-onnx verify-on-npu`` on the simulated device: all checks run, and none can end the rest."""

from __future__ import annotations

import ctypes
import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from simulated_kernels import ARCHITECTURES, ByArchitecture
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import model_of
from tests.cli.run import run
from tq_onnx.ascend import verification as npu
from tq_onnx.ascend.targets import CANN as CANN_TARGET
from tq_onnx.ascend.verification.cann_attention import check_cann_attention
from tq_onnx.ascend.verification.codec_operators import CODINGS
from tq_onnx.ascend.verification.findings import BRIEF, PARTS, Findings
from tq_onnx.ascend.verification.part import REFUSAL
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled

pytestmark = pytest.mark.cann

SOC = {2201: "Ascend910B3", 2002: "Ascend310P3"}


@pytest.fixture(params=ARCHITECTURES)
def kernels(
    request: pytest.FixtureRequest,
    kernel_files: ByArchitecture[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """The kernels of one architecture, and its device, for the processes of the parts."""
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernel_files[request.param]))
    monkeypatch.setenv("TQ_FAKE_ACL_SOC", SOC[request.param])
    return int(request.param)


def report_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_everything_holds_on_the_simulated_device(kernels: int, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    result = run("verify-on-npu", "--json", "-o", output)
    assert result.code == 0, result.err
    assert "nothing about an NPU" in result.err
    report = report_of(output)
    assert result.document == report
    assert report["holds"]
    assert report["simulated"] is True
    assert report["note"].startswith("The device was simulated")
    assert report["environment"]["soc"] == SOC[kernels]
    checks = {check["name"]: check for check in report["checks"]}
    left_out = {name for name, check in checks.items() if check["holds"] is None}
    assert all(check["holds"] for name, check in checks.items() if name not in left_out)
    left_out -= {"CANN's attention over INT4"}
    assert REFUSAL not in checks
    # Encode and attention, both types; four codecs with a head size of 64, one with 128.
    assert len(left_out) == (20 if kernels == 2002 else 0)
    encode = [check for name, check in checks.items() if name.startswith("encode")]
    assert len(encode) == 24 + 4 * len(CODINGS)  # two sizes of heads, two types
    # Vectors are drawn so that no byte depends on the order of a sum, but for a search and offsets.
    plain = [check for check in encode if "searched" not in check["name"]]
    assert len(plain) == 24
    assert all(check["figures"]["bytes_differing"] == 0 for check in plain)
    decode = checks["bundled Qwen3: decode"]["figures"]
    assert decode["same_tokens"] == decode["new_tokens"]
    names = {timing["name"].split()[0] for timing in report["timings"]}
    assert {"encode", "attention", "RMSNormalization", "bundled"} <= names


def part(name: str, *models: Path) -> dict[str, Any]:
    """The checks of one part by their names."""
    found = npu._in_a_process(name, npu.Request(models=models, brief=True), 100)
    return {check["name"]: check for check in found["checks"]}


def test_what_cann_answers_to_its_attention_over_int4(fake: FakeAcl) -> None:
    """Right numbers, and a refusal that is no failure."""
    findings = Findings(BRIEF)
    check_cann_attention(findings)
    if (findings.checks[0].problem or "").startswith("not done"):
        pytest.skip("the fake runtime has no operators of CANN")
    assert [check.holds for check in findings.checks] == 4 * [True]
    assert len(findings.timings) == 4
    operators = ctypes.CDLL("libopapi.so")
    operators.fake_acl_refuse_operator(b"aclnnFusedInferAttentionScoreV2")
    try:
        check_cann_attention(findings)
    finally:
        operators.fake_acl_refuse_operator(None)
    assert [check.holds for check in findings.checks[4:]] == 4 * [None]
    assert "CANN refuses it with error" in str(findings.checks[4].problem)
    assert len(findings.timings) == 4


def test_a_refusal_in_a_session_is_in_the_report(kernels: int, tmp_path: Path) -> None:
    """In a process of its own: what is refused is remembered."""
    script = """
import ctypes, sys
from pathlib import Path
from tq_onnx.ascend.verification.part import Request, run_part
ctypes.CDLL("libopapi.so").fake_acl_refuse_operator(b"aclnnFusedInferAttentionScoreV2 of INT4")
run_part("attention", Request(brief=True), Path(sys.argv[1]))
"""
    output = tmp_path / "part.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(output)]
    subprocess.run(command, env=environment, check=True)
    checks = {check["name"]: check for check in report_of(output)["checks"]}
    if kernels == 2002:  # which CANN has no such kernel for
        assert REFUSAL not in checks
        return
    refusal = checks[REFUSAL]
    assert refusal["holds"] is None
    assert refusal["problem"].startswith(
        "aclnnFusedInferAttentionScoreV2 refuses with error 161002"
    )
    assert refusal["problem"].endswith("of INT4 is refused")


def test_further_models(
    kernel_files: ByArchitecture[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is for CANN already, behind one that is no decoder."""
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernel_files[2201]))
    converted, other = tmp_path / "mine.onnx", tmp_path / "other.onnx"
    convert(build_bundled("genai", tmp_path / "exported"), converted, target=CANN_TARGET)
    onnx.save(onnx.load_from_string(model_of("(float[2] x) => (float[2] y) { y = Neg(x) }")), other)
    checks = part("models", other, converted)
    assert "the model has no attention" in checks["other.onnx: conversion"]["problem"]
    assert checks["mine.onnx: placement"]["holds"]
    decode = checks["mine.onnx: decode"]
    assert decode["holds"]
    assert decode["figures"]["codes_wrong"] == 0


def test_what_cannot_be_opened_fails_its_checks_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing private is in the report: errors of the loader and of ONNX Runtime name folders."""
    folder = tmp_path / "home" / "somebody"
    folder.mkdir(parents=True)
    (folder / "libkernels.so").write_text("no library")
    (folder / "model.onnx").write_text("no model")
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(folder / "libkernels.so"))
    output = tmp_path / "report.json"
    result = run("verify-on-npu", folder / "model.onnx", "-o", output, "--seconds", "100")
    assert result.code == 5
    assert "checks do not hold: kernel library; encode float32" in result.err
    report = report_of(output)
    checks = {check["name"]: check for check in report["checks"]}
    assert not checks["bundled Qwen3: decode"]["holds"]
    assert report["environment"]["soc"]
    # Every part was tried.
    assert result.err.count(" ...") == len(PARTS)
    text = output.read_text()
    assert "libkernels.so" in text
    assert "model.onnx" in text
    for private in (str(tmp_path), "somebody", f'"{platform.node()}"', getpass.getuser() + "/"):
        assert private not in text


def test_a_missing_kernel_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(tmp_path / "absent.so"))
    assert "absent.so" in part("device")["kernel library"]["problem"]


def test_a_device_without_kernels(
    kernel_files: ByArchitecture[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernel_files[2201]))
    monkeypatch.setenv("TQ_FAKE_ACL_SOC", "Ascend610")
    assert "the device is 'Ascend610'" in part("device")["kernel library"]["problem"]


def test_without_the_runtime_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries of CANN are not found by the processes of the parts."""
    monkeypatch.delenv("LD_LIBRARY_PATH")
    output = tmp_path / "report.json"
    result = run("verify-on-npu", "-o", output)
    assert result.code == 4
    assert "cannot load its CANNExecutionProvider" in result.err
    assert not output.exists()
