"""Build the C++ tests for a platform with zig, and run them here, where need be by an emulator.

They compare every SIMD level with the scalar one and with float64, and the digest of rows with
that of all other platforms. macOS has no emulator: its tests are only built.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def run_tests(program: Path, platform: str) -> str | None:
    """Run the C++ tests of a platform.

    Returns:
        The last line of what they said, and the digest of rows; None if nothing here runs them.

    Raises:
        ReleaseError: a check does not hold, or they end before their time.
    """
    command = command_for(platform, program)
    if command is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = re.search(r"^\d+ cases, \d+ checks, 0 failures$", done.stdout, re.MULTILINE)
    digests = set(re.findall(r"^rows: (\w{16}) at ", done.stdout, re.MULTILINE))
    levels = re.search(r"^levels: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or ended is None or len(digests) != 1 or levels is None:
        wrong = [line for line in done.stdout.splitlines() if "does not hold" in line]
        shown = "\n".join([*wrong[:20], done.stdout[-1000:], done.stderr[-1000:]])
        raise ReleaseError(f"the tests of {platform}: exit status {done.returncode}\n{shown}")
    return f"{ended[0]}; levels {levels[1]}; rows {digests.pop()}"
