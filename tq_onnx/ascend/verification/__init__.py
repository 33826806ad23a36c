"""``verify-on-npu``: every check on an Ascend NPU, as one report to send back.

``verify_on_npu`` runs part after part (``tq_onnx.ascend.verification.part``), each in a process of
its own with a time limit, so that a failing kernel is an entry of the report and not its end.
Nothing in the report names a folder, the host or its user.

On the simulated device of the test bench (``custom_ops/cann/testing``) everything runs too, and
the report says ``simulated``: none of its figures is then one of an NPU.

A verification that was interrupted goes on behind its last finished part
(``tq_onnx.ascend.verification.kept``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.environment import Environment
from tq_onnx.ascend.verification.findings import PARTS, DeviceCheck, Request, Timing
from tq_onnx.ascend.verification.kept import KeptParts
from tq_onnx.errors import LibraryError
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.errors import absent
from tq_onnx.runtime.providers import CANN
from tq_onnx.verification.checks import failed

__all__ = ["DeviceCheck", "NpuReport", "Request", "Timing", "verify_on_npu"]

PART_SECONDS: Final = 1200
"""Longest duration of a part, by default."""

_NOTES: Final = {
    True: "The device was simulated: these figures, times above all, say nothing about an NPU.",
    False: "Measured on this device; times are wall clock of runs that were waited for.",
    None: "The device did not answer: it is unknown where this ran.",
}
_LAST_WORDS: Final = 6
"""Lines of the last output of a part that died."""


@dataclass(frozen=True)
class NpuReport:
    """The result of ``verify-on-npu``.

    Attributes:
        holds: the verdict: True if no check failed; checks that were not done do not count.
        simulated: True if the device was the simulated one of the test bench; None if no device
            answered.
        note: the meaning of that for the figures.
        environment: device, versions and libraries; None if no device answered.
        checks: the checks of all parts.
        timings: the times of all parts.
        seconds: duration of the whole run.
    """

    holds: bool
    simulated: bool | None
    note: str
    environment: Environment | None
    checks: tuple[DeviceCheck, ...]
    timings: tuple[Timing, ...]
    seconds: float


def verify_on_npu(
    request: Request = Request(),  # noqa: B008 - it is frozen
    *,
    on_progress: OnProgress | None = None,
    part_seconds: float = PART_SECONDS,
    parts_file: Path | None = None,
) -> NpuReport:
    """Run all checks.

    Args:
        request: the models to check besides the operators. On a simulated device sizes are small.
        on_progress: called as each part begins; units are parts.
        part_seconds: how long a part may take.
        parts_file: a file for the parts that are finished, from which an interrupted run goes on;
            it stays there. None for no file.

    Raises:
        LibraryError: there is no CANN in this environment.
    """
    missing = absent(CANN)
    if missing is not None:
        raise missing
    begin = time.monotonic()
    tell = on_progress or silent
    parts = [part for part in PARTS if request.models or part != "models"]
    simulated: bool | None = None
    environment: Environment | None = None
    checks: list[DeviceCheck] = []
    timings: list[Timing] = []
    finished: KeptParts | None = None
    for index, part in enumerate(parts):
        earlier = None if finished is None else finished.get(part)
        tell(Progress(part if earlier is None else f"{part}, from before", index, len(parts)))
        result = earlier or _in_a_process(part, request, part_seconds)
        if finished is not None and earlier is None:
            finished.add(part, result)
        if finished is None:
            if result["absent"] is not None:
                what, where, fix = result["absent"]
                raise LibraryError(what, where=where, fix=fix)
            simulated = result["simulated"]
            if result["environment"] is not None:
                environment = Environment.of(result["environment"])
            request = replace(request, brief=request.brief or bool(simulated))
            finished = KeptParts(parts_file, request, result)
        checks += (DeviceCheck(**check) for check in result["checks"])
        timings += (Timing(**timing) for timing in result["timings"])
    return NpuReport(
        holds=not failed(checks),
        simulated=simulated,
        note=_NOTES[simulated],
        environment=environment,
        checks=tuple(checks),
        timings=tuple(timings),
        seconds=round(time.monotonic() - begin, 1),
    )


def _in_a_process(part: str, request: Request, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; if the process dies, return that as a failed check."""
    with tempfile.TemporaryDirectory(prefix="tq-onnx-npu-") as folder:
        request_file, output = Path(folder) / "request.json", Path(folder) / "found.json"
        request_file.write_text(request.to_json(), encoding="utf-8")
        try:
            ended = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tq_onnx.ascend.verification.part",
                    part,
                    str(request_file),
                    str(output),
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
                cwd=folder,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            return _died(part, f"the process did not end within {seconds:g} seconds")
        if output.is_file():
            result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
            return result
        said = (ended.stderr + ended.stdout).decode(errors="replace").splitlines()
        words = anonymise(" / ".join(said[-_LAST_WORDS:]))
        return _died(part, f"the process ended with {ended.returncode}: {words}")


def _environment() -> dict[str, str]:
    """Return this process's environment, in which the same package is found from any folder."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).resolve().parents[3]), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def _died(part: str, problem: str) -> dict[str, Any]:
    check = {"name": part, "holds": False, "problem": problem}
    fields = {"simulated": None, "environment": None, "absent": None}
    return {"checks": [check], "timings": [], **fields}
