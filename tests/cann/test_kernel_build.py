"""The build of the kernel library with a stand-in for CANN's compiler, and the script of an NPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from simulated_kernels import COMPILER, SHIM, SIMULATOR, Kernels

CANN = Path(__file__).parents[2] / "custom_ops" / "cann"
STAND_IN = f"""#!/usr/bin/env bash
exec g++ -x c++ -I{SHIM} {" ".join(str(SHIM / name) for name in SIMULATOR)} -ldl \\
  $(printf '%s\\n' "$@" |
    sed -E '/^(-x|asc|-lascendcl)$/d; s/^-O2$/-O0/; s/^--npu-arch=dav-/-D__NPU_ARCH__=/')
"""
"""A compiler that takes what ``build.sh`` says to CANN's, and compiles for the simulated device."""
NAMES = re.findall(
    r'^    \{"(Ascend\w+)", "(\w+)"',
    (CANN / "host" / "kernel_library.cpp").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("begins", "name"), NAMES)
def test_the_library_has_the_name_that_a_host_opens(begins: str, name: str, tmp_path: Path) -> None:
    compiler = tmp_path / "bisheng"
    compiler.write_text(STAND_IN, encoding="utf-8")
    compiler.chmod(0o755)
    command = ["bash", str(CANN / "kernels" / "build.sh"), f"{begins}3", str(tmp_path)]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    library = Kernels(tmp_path / f"libtq_kernels_{name}.so")  # of this row layout
    assert library.arch == (2002 if begins == "Ascend310P" else 2201)


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = str(CANN / "on_npu.sh")
    done = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "source set_env.sh of CANN first" in done.stderr
    assert not list(tmp_path.iterdir())
