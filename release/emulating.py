"""Build the C++ tests for a platform with zig, and run them here, where need be by an emulator.

They compare every SIMD level with the scalar one and with float64, and the digest of rows with
that of all other platforms. Every case runs in a process of its own, one for each core: an emulator
takes minutes for some, and an end before its time says which. macOS has no emulator: its tests are
only built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from release.building import TARGETS, WORK, ReleaseError, compiler, run
from tq_onnx.runtime.platforms import platform_here

_SYSROOT: Final = Path("/usr/aarch64-linux-gnu")
"""Where Debian's libc6-arm64-cross has the C library that qemu loads."""


def _with_qemu(program: Path) -> list[str | Path] | None:
    qemu = shutil.which("qemu-aarch64")
    if qemu is None or not _SYSROOT.is_dir():
        return None
    return [qemu, "-L", _SYSROOT, program]


def _with_wine(program: Path) -> list[str | Path] | None:
    wine = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine")
    return None if wine is None else [wine, program]


EMULATORS: Final[dict[str, Callable[[Path], list[str | Path] | None]]] = {
    "linux-arm64": _with_qemu,
    "windows-x86_64": _with_wine,
}
"""Commands that run a program of another platform, or None where they are not installed."""


def command_for(platform: str, program: Path) -> list[str | Path] | None:
    """Return the command that runs a program of a platform here; None if nothing here does."""
    if platform == platform_here():
        return [program]
    emulator = EMULATORS.get(platform)
    return None if emulator is None else emulator(program)


def build_tests(source: Path, platform: str) -> Path:
    """Build the C++ tests on the objects of the wheel.

    Args:
        source: the unpacked source distribution that the wheel was built from.
        platform: a name in ``TARGETS``.

    Returns:
        The executable.
    """
    folder = WORK / platform
    defines = {"CMAKE_BUILD_TYPE": "Release", "TQ_TESTS": "ON", **TARGETS[platform].defines()}
    options = [f"-D{name}={value}" for name, value in defines.items()]
    configure: list[str | Path] = [
        "cmake",
        "-S",
        source / "custom_ops",
        "-B",
        folder,
        "-G",
        "Ninja",
        *options,
    ]
    run([sys.executable, "-m", *configure], env=compiler(platform))
    run([sys.executable, "-m", "cmake", "--build", folder, "--target", "tq_onnx_tests"])
    return folder / f"tq_onnx_tests{'.exe' if platform.startswith('windows') else ''}"


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        name: of the case.
        wrong: what did not hold, or how its process ended; empty if all is well.
        checks: how many there were.
        levels: of kernels that there are, as the program names them.
        digests: of rows, if the case tells of any.
    """

    name: str
    wrong: str
    checks: int
    levels: str
    digests: frozenset[str]


def run_tests(program: Path, platform: str) -> str | None:
    """Run the C++ tests of a platform.

    Returns:
        How many cases and checks there were, and the digest of rows; None if nothing here runs
        them.

    Raises:
        ReleaseError: a check does not hold, or a case ends before its time.
    """
    command = command_for(platform, program)
    if command is None:
        return None
    names = _say([*command, "--list"]).stdout.split()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda name: _run_case(command, name), names))
    wrong = [f"{outcome.name}: {outcome.wrong}" for outcome in outcomes if outcome.wrong]
    digests = {digest for outcome in outcomes for digest in outcome.digests}
    levels = {outcome.levels for outcome in outcomes}
    if wrong or len(digests) != 1 or len(levels) != 1:
        summary = f"{len(names)} cases, digests {sorted(digests)}, levels {sorted(levels)}"
        raise ReleaseError("\n".join([f"the tests of {platform}: {summary}", *wrong]))
    checks = sum(outcome.checks for outcome in outcomes)
    counts = f"{len(names)} cases, {checks} checks, 0 failures"
    return f"{counts}; levels {levels.pop()}; rows {digests.pop()}"


def _run_case(command: Sequence[str | Path], name: str) -> Outcome:
    process = _say([*command, name])
    ended = re.search(r"^1 cases, (\d+) checks, 0 failures$", process.stdout, re.MULTILINE)
    levels = re.search(r"^levels: (.*)$", process.stdout, re.MULTILINE)
    wrong = ""
    if process.returncode != 0 or ended is None:
        lines = [line for line in process.stdout.splitlines() if "does not hold" in line][:20]
        wrong = "\n".join([f"exit status {process.returncode}", *lines, process.stderr[-1000:]])
    return Outcome(
        name=name,
        wrong=wrong,
        checks=int(ended[1]) if ended else 0,
        levels=levels[1] if levels else "",
        digests=frozenset(re.findall(r"^rows: (\w{16}) at ", process.stdout, re.MULTILINE)),
    )


def _say(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
