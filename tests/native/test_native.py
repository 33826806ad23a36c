"""Builds the C++ tests with cmake and runs them, plain and under the sanitizers.

Under the thread sanitizer only those of threads run.

They compare every SIMD level with the scalar one and with float64, on arrays between inaccessible
pages. The builds are kept in pytest's cache folder, so that only the first run compiles.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "custom_ops"


def build(cache: pytest.Cache, name: str, *options: str) -> Path:
    folder = cache.mkdir(f"native_{name}")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(SOURCES), "-B", str(folder), *generator, "-DTQ_TESTS=ON"]
    for command in (
        [*configure, *options],
        ["cmake", "--build", str(folder), "--target", "tq_onnx_tests", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stdout + done.stderr
    return folder / "tq_onnx_tests"


def check(executable: Path) -> None:
    done = subprocess.run([executable], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{2,} cases, \d{5,} checks, 0 failures", done.stdout)
    if platform.machine() in ("x86_64", "AMD64"):
        assert "scalar" in done.stdout.splitlines()[0]


def test_kernels(pytestconfig: pytest.Config) -> None:
    check(build(pytestconfig.cache, "release", "-DCMAKE_BUILD_TYPE=Release"))


@pytest.mark.slow
def test_kernels_under_the_sanitizers(pytestconfig: pytest.Config) -> None:
    check(
        build(
            pytestconfig.cache, "sanitized", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DTQ_SANITIZE=ON"
        )
    )


@pytest.mark.slow
def test_threads_under_the_sanitizer(pytestconfig: pytest.Config) -> None:
    """Threads that share tables and caches, as calls of one session do."""
    options = ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DTQ_SANITIZE_THREADS=ON")
    executable = build(pytestconfig.cache, "threads", *options)
    done = subprocess.run([executable], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ cases, \d{3,} checks, 0 failures", done.stdout)
