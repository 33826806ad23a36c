"""Build the source distribution and the wheels of all platforms, on one machine, with zig.

Zig is a C++ compiler with the headers and libraries of every platform here, and has a package
(``ziglang``). Each wheel is built from the source distribution by scikit-build-core, as an install
does; only the compiler is another. Then ``wheel tags`` gives it the tag of its platform.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_onnx.runtime.platforms import PLATFORMS, Platform

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / "build" / "release"
"""Where sources and objects lie. Zig keeps objects by the paths of their sources, so that a second
run from here compiles what has changed only."""


class ReleaseError(Exception):
    """A step of the release failed."""


@dataclass(frozen=True)
class Target:
    """A platform as zig and CMake have it.

    Attributes:
        zig: name of the platform, with the oldest release of its C library or system.
        system: ``CMAKE_SYSTEM_NAME``; None where CMake's own guess is right.
        processor: ``CMAKE_SYSTEM_PROCESSOR``, likewise.
        options: what else CMake is told.
    """

    zig: str
    system: str | None
    processor: str | None
    options: tuple[tuple[str, str], ...] = ()

    def defines(self) -> dict[str, str]:
        """Return the CMake variables of the target."""
        # Zig has no separate tools that an install could strip with.
        out = {"TQ_LEVELS": "all", "CMAKE_SHARED_LINKER_FLAGS": "-s", **dict(self.options)}
        if self.system is not None and self.processor is not None:
            out |= {"CMAKE_SYSTEM_NAME": self.system, "CMAKE_SYSTEM_PROCESSOR": self.processor}
        return out


TARGETS: Final = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.28", "Linux", "x86_64"),
    "linux-arm64": Target("aarch64-linux-gnu.2.28", "Linux", "aarch64"),
    "windows-x86_64": Target("x86_64-windows-gnu", "Windows", "AMD64"),
    "windows-arm64": Target("aarch64-windows-gnu", "Windows", "ARM64"),
    "macos-arm64": Target(
        "aarch64-macos.14.0",
        "Darwin",
        "arm64",
        # Zig's linker for macOS takes no list of names to export.
        (("TQ_OWN_ALLOCATION", "ON"),),
    ),
}
"""By the names of ``PLATFORMS``."""


def run(command: Sequence[str | Path], **settings: object) -> None:
    """Run a command; its output is kept for the error that a failure ends in.

    Raises:
        ReleaseError: it fails, with the end of what it said.
    """
    process = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **settings,
    )
    if process.returncode != 0:
        shown = " ".join(str(word) for word in command[:6])
        raise ReleaseError(
            f"{shown} ...: exit status {process.returncode}\n{process.stdout[-4000:]}"
        )


def compiler(platform: str) -> dict[str, str]:
    """Return the environment in which CMake finds zig as the compiler for a platform."""
    return {**os.environ, "CXX": f"{sys.executable} -m ziglang c++ -target {TARGETS[platform].zig}"}


def build_sdist(out: Path) -> Path:
    """Build the source distribution.

    Args:
        out: the folder that gets it.

    Returns:
        The file.
    """
    folder = WORK / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT])
    (archive,) = folder.glob("*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(archive, out))


def unpack(sdist: Path) -> Path:
    """Unpack a source distribution, always at the same place.

    Returns:
        Its folder.
    """
    place = WORK / "source"
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (source,) = place.iterdir()
    return source.rename(place / "tq_onnx")


def build_wheel(source: Path, platform: Platform, out: Path) -> Path:
    """Build the wheel of a platform.

    Args:
        source: the unpacked source distribution.
        platform: one of ``PLATFORMS``.
        out: the folder that gets it; a wheel of this platform that is there is replaced.

    Returns:
        The wheel.
    """
    objects, wheels = WORK / platform.name, WORK / "wheels" / platform.name
    # Times of unpacked files tell nothing, so objects are made anew, by zig's own records.
    for folder in (objects, wheels):
        shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "build-dir": str(objects),
        "install.strip": "false",
        **{f"cmake.define.{k}": v for k, v in TARGETS[platform.name].defines().items()},
    }
    options = [f"-C{name}={value}" for name, value in settings.items()]
    build: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        wheels,
    ]
    run([*build, *options, source], env=compiler(platform.name))
    (wheel,) = wheels.glob("*.whl")
    tag = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", platform.tag]
    run([sys.executable, "-m", "wheel", "tags", "--remove", *tag, wheel])
    (wheel,) = wheels.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, out))


def platforms(names: Sequence[str]) -> list[Platform]:
    """Return the platforms of some names, or all of them."""
    return [PLATFORMS[name] for name in names or PLATFORMS]
