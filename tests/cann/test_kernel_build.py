"""The build of the kernel library with a stand-in for CANN's compiler, and the script of an NPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import check_headers
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


# The kernels on CANN's own headers, which a developer fetches: see ``check_headers.py``.


URL = "https://github.com/mirror-cann/asc-devkit"
HEADERS = os.environ.get("TQ_CANN_HEADERS")


def test_a_folder_without_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        check_headers.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path} has no include/basic_api: it is to be a checkout of {URL}" in last


@pytest.mark.cann
@pytest.mark.skipif(HEADERS is None, reason="needs TQ_CANN_HEADERS, a checkout of CANN's headers")
def test_the_kernels_on_canns_headers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", str(HEADERS)])
    assert check_headers.main() == 0, capsys.readouterr().out
