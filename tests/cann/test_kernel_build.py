"""The build of the kernel library with a stand-in for CANN's compiler, and the script of an NPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tq_onnx.codec.spec import layout_digest

CANN = Path(__file__).parents[2] / "custom_ops" / "cann"
STAND_IN = """
function(ascendc_library name kind)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/device.cpp "int device;")
  add_library(${name} STATIC ${CMAKE_CURRENT_BINARY_DIR}/device.cpp)
endfunction()
function(ascendc_include_directories)
endfunction()
"""
NAMES = re.findall(
    r'^    \{"(Ascend\w+)", "(\w+)", \d+\}',
    (CANN / "host" / "kernel_library.cpp").read_text(encoding="utf-8"),
    re.M,
)

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs CMake and g++"
)


@pytest.mark.parametrize(("begins", "name"), NAMES)
def test_the_library_has_the_name_that_a_host_opens(begins: str, name: str, tmp_path: Path) -> None:
    home = tmp_path / "cann" / "tools" / "tikcpp" / "ascendc_kernel_cmake"
    home.mkdir(parents=True)
    (home / "ascendc.cmake").write_text(STAND_IN)
    build, beside = tmp_path / "build", tmp_path / "lib"
    defined = (f"-DSOC_VERSION={begins}3", f"-DASCEND_CANN_PACKAGE_PATH={tmp_path / 'cann'}")
    for command in (
        ("cmake", "-S", CANN / "kernels", "-B", build, "-DCMAKE_CXX_COMPILER=g++", *defined),
        ("cmake", "--build", build),
        ("cmake", "--install", build, "--prefix", beside),
    ):
        done = subprocess.run(map(str, command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(beside / f"libtq_kernels_{name}.so"))
    library.tq_kernels_layout_digest.restype = ctypes.c_char_p
    assert library.tq_kernels_layout_digest().decode() == layout_digest()


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = str(CANN / "on_npu.sh")

    def said(*arguments: str) -> str:
        done = subprocess.run(
            ["bash", script, *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        return done.stderr

    assert "usage: on_npu.sh REPORT.json" in said()
    assert "source set_env.sh of CANN first" in said("report.json")
    assert not list(tmp_path.iterdir())
