"""``verify-on-npu`` where there is no NPU: what it says, and what it leaves out of reports."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import sys
from pathlib import Path

import pytest

from tests.cli.run import run
from tq_onnx.ascend import verification as npu
from tq_onnx.ascend.verification import environment
from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.codec_operators import attention_cases, encode_cases
from tq_onnx.ascend.verification.findings import PARTS, Findings, Request, Timing
from tq_onnx.ascend.verification.part import run_part
from tq_onnx.errors import LibraryError, UsageError
from tq_onnx.runtime.library import library_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/work/lib.so: cannot open", "lib.so: cannot open"),
        ("error in '/tmp/a/model.onnx'", "error in 'model.onnx'"),
        (r"C:\Users\me\model.onnx is no model", "model.onnx is no model"),
        ("~/models/m.onnx", "m.onnx"),
        ("../secret/m.onnx", "m.onnx"),
        ("failure 507 ; hostname=box17 ; expr=f(x)", "failure 507 ; hostname=... ; expr=f(x)"),
        ("a rate of 3/4, D=64 T=1", "a rate of 3/4, D=64 T=1"),
        ("layers.0/attention", "layers.0/attention"),
    ],
)
def test_texts_have_no_folders_and_no_host(text: str, expected: str) -> None:
    assert anonymise(text) == expected


def test_texts_have_neither_host_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "ascend-box")
    monkeypatch.setattr(getpass, "getuser", lambda: "somebody")
    assert anonymise("somebody on ascend-box said so") == "... on ... said so"


def test_long_texts_are_cut() -> None:
    assert len(anonymise("word " * 1000)) < 700


@pytest.mark.parametrize("place", [".", "missing/report.json"])
def test_a_report_that_could_not_be_kept_is_not_begun(tmp_path: Path, place: str) -> None:
    outcome = run("verify-on-npu", "-o", tmp_path / place)
    assert "the report cannot be written there; give another file with -o" in outcome.sentence(4)


def test_without_cann_there_is_one_sentence(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    sentence = run("verify-on-npu", "-o", output).sentence(4)
    assert "has no CANNExecutionProvider" in sentence
    assert "install onnxruntime-cann" in sentence
    assert not output.exists()


def test_a_request_is_what_it_was_in_the_other_process() -> None:
    request = Request((Path("/b/n.onnx"),), brief=True)
    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request().to_json()) == Request()


def test_what_a_check_raises_is_its_result() -> None:
    findings = Findings()

    def fail() -> tuple[bool, dict[str, int]]:
        raise UsageError("it is wrong", where="/home/me/here", fix="mend it")

    findings.check("one", fail, "that it works")
    findings.check("two", lambda: (True, {"error": 0}), "nothing")
    findings.time("three", lambda: [1 / 0])
    assert [check.holds for check in findings.checks] == [False, True, False]
    assert findings.checks[0].problem == "here: it is wrong; mend it"
    assert findings.checks[2].problem == "ZeroDivisionError: division by zero"


def test_times_are_medians() -> None:
    assert Timing.of("it", [0.004, 0.001, 0.002]) == Timing("it", 3, 2.0, 1.0)


def test_the_first_error_of_a_part_is_written(tmp_path: Path) -> None:
    """In this environment the provider is absent, which every part finds out for itself."""
    output = tmp_path / "found.json"
    run_part("device", Request(), output)
    found = json.loads(output.read_text())
    assert "has no CANNExecutionProvider" in found["absent"][0]
    assert found["checks"][0]["holds"] is False


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the provider were there."""
    monkeypatch.setattr(npu, "absent", lambda _ep: None)


@pytest.mark.usefixtures("present")
def test_a_provider_that_does_not_load_ends_the_command() -> None:
    with pytest.raises(LibraryError, match="has no CANNExecutionProvider"):
        npu.verify_on_npu()


def answer(part: str, simulated: bool | None) -> dict[str, object]:
    checks = [dataclasses.asdict(npu.DeviceCheck(part, True))]
    first = part == PARTS[0]
    device = dataclasses.asdict(environment.describe()) if first else None
    found = {"simulated": simulated if first else None, "environment": device, "absent": None}
    timings = [dataclasses.asdict(Timing.of(part, [0.001]))]
    return {"checks": checks, "timings": timings, **found}


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize(
    ("simulated", "note"), [(True, "nothing about an NPU"), (False, "on this device")]
)
def test_the_report_says_whether_the_device_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: bool, note: str
) -> None:
    asked: list[tuple[str, bool]] = []

    def in_a_process(part: str, request: Request, seconds: float) -> dict[str, object]:
        asked.append((part, request.brief))
        return answer(part, simulated)

    monkeypatch.setattr(npu, "_in_a_process", in_a_process)
    output = tmp_path / "report.json"
    outcome = run("verify-on-npu", "--json", "-o", output)
    assert outcome.code == 0, outcome.err
    report = outcome.document
    assert json.loads(output.read_text()) == report
    assert report["simulated"] is simulated
    assert note in report["note"]
    assert report["environment"]["libraries"][0]["sha256"]
    # Sizes are small only where times mean nothing.
    assert asked[1:] == [(part, simulated) for part in PARTS[1:-1]]


@pytest.mark.usefixtures("present")
def test_an_interrupted_verification_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    interrupted_in = [PARTS[3]]

    def in_a_process(part: str, request: Request, seconds: float) -> dict[str, object]:
        if part in interrupted_in:
            raise KeyboardInterrupt
        asked.append(part)
        return answer(part, False)

    monkeypatch.setattr(npu, "_in_a_process", in_a_process)
    output, kept = tmp_path / "report.json", tmp_path / "report.json.parts"
    outcome = run("verify-on-npu", "-o", output)
    assert (outcome.code, output.exists(), kept.exists()) == (130, False, True)
    interrupted_in.clear()
    asked.clear()
    outcome = run("verify-on-npu", "-o", output)
    # The device is asked again, since what was found is of that one.
    assert asked == [PARTS[0], *PARTS[3:-1]]
    assert "encode, from before" in outcome.err
    assert [check["name"] for check in json.loads(output.read_text())["checks"]] == [*PARTS[:-1]]
    assert sorted(tmp_path.iterdir()) == [output]


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("changed", ["device", "model", "file"])
def test_what_something_else_gave_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    asked: list[str] = []
    device = {"soc": "one"}

    def in_a_process(part: str, request: Request, seconds: float) -> dict[str, object]:
        asked.append(part)
        found = answer(part, False)
        known = {**dataclasses.asdict(environment.describe()), **device}
        return {**found, "environment": known if part == PARTS[0] else None}

    monkeypatch.setattr(npu, "_in_a_process", in_a_process)
    model, kept = tmp_path / "model.onnx", tmp_path / "kept"
    model.write_bytes(b"1")
    request = Request(models=(model,))
    npu.verify_on_npu(request, parts_file=kept)
    asked.clear()
    npu.verify_on_npu(request, parts_file=kept)
    assert asked == [PARTS[0]]
    if changed == "device":
        device["soc"] = "another"
    elif changed == "model":
        model.write_bytes(b"22")
    else:
        kept.write_text("[]")
    asked.clear()
    npu.verify_on_npu(request, parts_file=kept)
    assert asked == [*PARTS]


@pytest.mark.skipif(os.name != "posix", reason="the interpreter is a shell script")
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import os; os.abort()", "the process ended with -6"),
        ("import time; time.sleep(60)", "the process did not end within 1 seconds"),
        ("raise SystemExit('last words in /home/me/x.py')", "ended with 1: last words in x.py"),
    ],
)
def test_a_part_that_dies_is_a_check_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(npu.sys, "executable", str(interpreter))
    found = npu._in_a_process("encode", Request(), 1 if "sleep" in script else 60)
    assert found["checks"][0]["holds"] is False
    assert problem in found["checks"][0]["problem"]


def test_facts_without_a_runtime() -> None:
    facts = environment.describe()
    assert not environment.is_simulated()
    assert facts.soc is None
    assert {library.file for library in facts.libraries} >= {library_name()}


class Runtime:
    """A runtime of CANN as ctypes shows it."""

    class Function:
        def __init__(self, answer: object) -> None:
            self._answer = answer

        def __call__(self, *numbers: object) -> object:
            for number, value in zip(numbers, (1, 14, 0), strict=False):
                number._obj.value = value  # type: ignore[attr-defined]
            return self._answer

    def __init__(self) -> None:
        self.aclrtGetSocName = self.Function(b"Ascend910B4")
        self.aclrtGetVersion = self.Function(0)


def test_what_the_runtime_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_runtime", Runtime)
    facts = environment.describe()
    assert not environment.is_simulated()
    assert facts.soc == "Ascend910B4"
    assert facts.cann_runtime_api == "1.14.0"


def test_version_files_are_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.2.RC1]\ninstall=/opt/a\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    found = environment.describe().cann_version_files
    assert found == {"ASCEND_HOME_PATH/version.cfg": ["runtime_running_version=[8.2.RC1]"]}


def test_the_cases_are_those_that_matter() -> None:
    encode = list(encode_cases())
    assert {case.head_size for case in encode} == {64, 128}
    assert {case.batch for case in encode} == {1, 2}
    assert max(case.new for case in encode) >= 300
    assert {case.group for case in attention_cases(1 << 30)} == {1, 2, 4, 5, 8}
