"""The simulated kernels, built once for all workers, and the CANN bench, run only where asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated_kernels import ARCHITECTURES, COMPILER, ByArchitecture, Kernels, build
from tests.cann.bench import Measured, fake, fake_library, measured

EACH = [
    ARCHITECTURES[0],
    *(pytest.param(arch, marks=pytest.mark.cann) for arch in ARCHITECTURES[1:]),
]
"""Every architecture in the bench; one elsewhere, as building the kernels takes long."""

__all__ = ["fake", "fake_library", "measured"]


@pytest.fixture(scope="session")
def kernel_files(tmp_path_factory: pytest.TempPathFactory) -> ByArchitecture[Path]:
    if COMPILER is None:
        pytest.skip("needs g++")
    import fcntl

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers

    def made(arch: int) -> Path:
        library = folder / f"liblibrary_{arch}.so"
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return library if library.exists() else build(arch, folder)

    return ByArchitecture(made)


@pytest.fixture(scope="session")
def libraries(kernel_files: ByArchitecture[Path]) -> ByArchitecture[Kernels]:
    return ByArchitecture(lambda arch: Kernels(kernel_files[arch]))


@pytest.fixture(params=EACH)
def kernels(request: pytest.FixtureRequest, libraries: ByArchitecture[Kernels]) -> Kernels:
    found = libraries[request.param]
    found.reset()
    return found


@pytest.fixture(params=[False, True], ids=["rows", "planes"])
def coded(request: pytest.FixtureRequest, kernels: Kernels) -> Iterator[Kernels]:
    """The kernels with caches of both forms that they have."""
    kernels.in_planes = request.param
    yield kernels
    kernels.in_planes = False


@pytest.fixture(params=EACH)
def simulated(
    request: pytest.FixtureRequest,
    kernel_files: ByArchitecture[Path],
    libraries: ByArchitecture[Kernels],
    monkeypatch: pytest.MonkeyPatch,
) -> Kernels:
    """The kernels of one architecture, as the library that the operators open."""
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernel_files[request.param]))
    kernels = libraries[request.param]
    kernels.reset()
    return kernels


@pytest.fixture
def kernels_named(kernel_files: ByArchitecture[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of one architecture as the library that the operators open."""
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernel_files[2201]))


@pytest.fixture(scope="session")
def hazards_so_far() -> list[int]:
    return []


@pytest.fixture(autouse=True)
def count_hazards(
    request: pytest.FixtureRequest, hazards_so_far: list[int], measured: Measured
) -> Iterator[None]:
    """Sums what the kernels' tests leave; those that provoke hazards reset them."""
    yield
    if "libraries" in request.fixturenames:
        found: ByArchitecture[Kernels] = request.getfixturevalue("libraries")
        hazards_so_far.append(sum(kernels.hazards for kernels in found.made.values()))
        measured("hazards", sum(hazards_so_far))
