"""Builds the C++ tests with cmake and runs them, plain and under the sanitizers.

The plain ones are linked with the objects of the installed library, where it was built from this
folder, and with those of the other levels. Under the thread sanitizer only those of threads run.

They compare every SIMD level of this machine with the scalar one and float64, on arrays between
inaccessible pages. The builds are kept, in build/ and pytest's cache, so that only the first run
compiles.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINITIONS = ("-DTQ_TESTS=ON", "-DTQ_LEVELS=all")


def tool(name: str) -> str | None:
    """Return a program of this environment, as an install uses, or of the system.

    Another cmake writes other commands, so that every object of the install would be made again.
    """
    own = str(Path(sys.executable).parent)
    return shutil.which(name, path=f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def build(folder: Path, *options: str) -> Path:
    cmake = tool("cmake") or "cmake"
    for command in (
        [cmake, "-S", str(ROOT / "custom_ops"), "-B", str(folder), *DEFINITIONS, *options],
        [cmake, "--build", str(folder), "--target", "tq_onnx_tests", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stdout + done.stderr
    return folder / "tq_onnx_tests"


def build_in_cache(cache: pytest.Cache, name: str, *options: str) -> Path:
    ninja = tool("ninja")
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()
    return build(cache.mkdir(f"native_{name}"), *generator, *options)


def wheel_build() -> Path | None:
    """Return where an install from this folder built the library, if it did.

    What changed since is compiled again; all else are the objects that users run.
    """
    caches = (ROOT / "build").glob("*/CMakeCache.txt")
    made = [cache for cache in caches if "CMAKE_GENERATOR:INTERNAL=Ninja\n" in cache.read_text()]
    if not made or not tool("ninja"):
        return None
    return max(made, key=lambda cache: cache.stat().st_mtime).parent


def check(executable: Path) -> None:
    done = subprocess.run([executable], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{2,} cases, \d{5,} checks, 0 failures", done.stdout)
    if platform.machine() in ("x86_64", "AMD64"):
        assert "scalar" in done.stdout.splitlines()[0]


@pytest.mark.cpp
def test_kernels(pytestconfig: pytest.Config) -> None:
    kept = wheel_build()
    if kept is None:
        check(build_in_cache(pytestconfig.cache, "release", "-DCMAKE_BUILD_TYPE=Release"))
    else:
        # pip's own ninja is gone.
        check(build(kept, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"))


@pytest.mark.sanitizers
def test_kernels_under_the_sanitizers(pytestconfig: pytest.Config) -> None:
    options = ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DTQ_SANITIZE=ON")
    check(build_in_cache(pytestconfig.cache, "sanitized", *options))


@pytest.mark.sanitizers
def test_threads_under_the_sanitizer(pytestconfig: pytest.Config) -> None:
    """Threads that share tables and caches, as calls of one session do."""
    options = ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DTQ_SANITIZE_THREADS=ON")
    executable = build_in_cache(pytestconfig.cache, "threads", *options)
    done = subprocess.run([executable], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ cases, \d{3,} checks, 0 failures", done.stdout)
