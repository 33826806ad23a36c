"""Install a wheel in fresh environments without a compiler, and run the demo in each.

Every Python at hand gets an environment with the newest dependencies, and one with numpy 1.26 and
ONNX Runtime 1.24 where these have wheels for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from release.building import ReleaseError, run

_NAMES: Final = ("python3.10", "python3.11", "python3.12", "python3.13")
_OLDEST: Final = {
    (3, 10): ("numpy==1.26.*", "onnxruntime==1.23.*"),
    (3, 11): ("numpy==1.26.*", "onnxruntime==1.24.*"),
    (3, 12): ("numpy==1.26.*", "onnxruntime==1.24.*"),
}
"""The oldest dependencies by Python: 1.26 is the last numpy 1, and has no wheels for 3.13."""


@dataclass(frozen=True)
class Case:
    """An environment to try a wheel in.

    Attributes:
        python: the interpreter.
        version: its version.
        constraints: requirements besides the wheel.
    """

    python: Path
    version: tuple[int, int]
    constraints: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called in reports."""
        which = "newest" if not self.constraints else ", ".join(self.constraints)
        return f"Python {self.version[0]}.{self.version[1]}, {which}"


def find_pythons(named: Sequence[Path]) -> dict[tuple[int, int], Path]:
    """Return interpreters by version: those named, or else this one and those in ``PATH``."""
    candidates = list(named) or [
        Path(sys.executable),
        *(Path(path) for name in _NAMES if (path := shutil.which(name))),
    ]
    out: dict[tuple[int, int], Path] = {}
    for python in candidates:
        command = [str(python), "-c", "import sys; print(*sys.version_info[:2])"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        version = re.fullmatch(r"(\d+) (\d+)\n", process.stdout)
        if version is not None:  # the shim of a version that is not there fails
            out.setdefault((int(version[1]), int(version[2])), python)
        elif named:
            raise ReleaseError(f"{python} is no Python")
    return out


def cases(pythons: dict[tuple[int, int], Path]) -> list[Case]:
    """Return the environments for some interpreters."""
    out = []
    for version, python in sorted(pythons.items()):
        out.append(Case(python, version, ()))
        if version in _OLDEST:
            out.append(Case(python, version, _OLDEST[version]))
    return out


def attempt(wheel: Path, case: Case, folder: Path) -> str:
    """Install a wheel in a new environment and run the demo there.

    Args:
        wheel: the wheel.
        case: the environment.
        folder: where to make it; replaced if it is there.

    Returns:
        Versions, and figures of the demo.

    Raises:
        ReleaseError: the installation or a command failed, or said something else.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run([case.python, "-m", "venv", folder])
    programs = folder / "bin"
    # No compiler, no library and no module from elsewhere.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    variables.pop("PYTHONPATH", None)
    alone = {**variables, "PATH": str(programs)}
    pip: list[str | Path] = [
        programs / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--only-binary",
        ":all:",
    ]
    run([*pip, wheel.resolve(), *case.constraints], env=alone, cwd=folder)
    said = {}
    for command in ("info", "demo"):
        process = subprocess.run(
            [programs / "tq-onnx", command, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=alone,
            cwd=folder,
        )
        if process.returncode != 0:
            raise ReleaseError(f"{case.name}: tq-onnx {command}: {process.stderr[-2000:]}")
        said[command] = json.loads(process.stdout)
    library = said["info"]["library"]
    if not Path(library["path"]).is_relative_to(folder.resolve()):
        raise ReleaseError(f"{case.name}: the library is {library['path']}")
    demo = said["demo"]
    if not demo["cache_ratio"] > 1 or demo["top1_agreement"] < 0.9:
        raise ReleaseError(f"{case.name}: the demo says {demo}")
    versions = said["info"]["packages"]
    return (
        f"numpy {versions['numpy']}, onnxruntime {versions['onnxruntime']}: "
        f"cache {demo['cache_ratio']:.2f} times smaller, "
        f"{demo['top1_agreement']:.1%} of the tokens as before"
    )
