"""Facts about the device and the software: versions, libraries by name and digest."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tq_onnx.codec.spec import layout_digest
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.providers import CANN
from tq_onnx.runtime.variables import ASCEND_HOME, ASCEND_TOOLKIT, CANN_KERNELS
from tq_onnx.version import __version__

RUNTIME: Final = "libascendcl.so"
MARKER: Final = "fake_acl_enqueue"
"""A function of the simulated runtime (custom_ops/cann/testing), which CANN's does not have."""

_PACKAGES: Final = (CANN.package, "onnxruntime", "onnx", "onnx-ir", "numpy")
_HOMES: Final = (ASCEND_HOME.name, ASCEND_TOOLKIT.name)
_VERSION_FILES: Final = (
    *("version.cfg", "version.info", "compiler/version.info", "runtime/version.info"),
    "opp/version.info",
)
_DRIVER: Final = Path("/usr/local/Ascend/driver/version.info")
_MAPS: Final = Path("/proc/self/maps")
_OWN_LIBRARIES: Final = ("libtq_kernels", "tq_onnx_ops", RUNTIME)


@dataclass(frozen=True)
class LibraryFile:
    """A library that was loaded.

    Attributes:
        file: its name, without a folder.
        bytes: its size.
        sha256: its digest.
    """

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Environment:
    """Device, versions and libraries; a fact that cannot be found out is None.

    Attributes:
        soc: the device, as CANN calls it.
        cann_runtime_api: version of the runtime.
        cann_version_files: lines of CANN's files that state a version, by file.
        driver: such lines of the driver.
        tq_onnx: version of this package.
        layout_digest: digest of the layout of cache rows.
        packages: versions of Python packages.
        python: version of Python.
        platform: operating system and processor.
        libraries: our libraries, CANN's runtime and the provider.
    """

    soc: str | None
    cann_runtime_api: str | None
    cann_version_files: dict[str, list[str]]
    driver: list[str] | None
    tq_onnx: str
    layout_digest: str
    packages: dict[str, str | None]
    python: str
    platform: str
    libraries: tuple[LibraryFile, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Environment:
        """Make it of what ``dataclasses.asdict`` made of one in another process."""
        return cls(
            **{
                **facts,
                "libraries": tuple(LibraryFile(**library) for library in facts["libraries"]),
            }
        )


def is_simulated() -> bool:
    """Return whether the loaded runtime is the simulated one."""
    return hasattr(_runtime(), MARKER)


def soc() -> str | None:
    """Return the name of the device; None while no session of the provider is open."""
    return _soc(_runtime())


def describe() -> Environment:
    """Return all facts.

    Call this while a session of the provider is open, so that its libraries are loaded.
    """
    runtime = _runtime()
    return Environment(
        soc=_soc(runtime),
        cann_runtime_api=_runtime_version(runtime),
        cann_version_files=dict(_version_files()),
        driver=_versions_in(_DRIVER),
        tq_onnx=__version__,
        layout_digest=layout_digest(),
        packages={name: _package(name) for name in _PACKAGES},
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        libraries=tuple(
            _described(path) for path in sorted(_libraries(), key=lambda path: path.name)
        ),
    )


def _runtime() -> ctypes.CDLL | None:
    """Return the runtime that the provider has loaded; not one that is only installed."""
    try:
        return ctypes.CDLL(RUNTIME, mode=os.RTLD_LAZY | getattr(os, "RTLD_NOLOAD", 0))
    except (OSError, AttributeError):  # not loaded, or another operating system
        return None


def _soc(runtime: ctypes.CDLL | None) -> str | None:
    function = getattr(runtime, "aclrtGetSocName", None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    name = function()
    return None if name is None else str(name.decode(errors="replace"))


def _runtime_version(runtime: ctypes.CDLL | None) -> str | None:
    function = getattr(runtime, "aclrtGetVersion", None)
    if function is None:
        return None
    numbers = [ctypes.c_int32() for _ in range(3)]
    if function(*(ctypes.byref(number) for number in numbers)) != 0:
        return None
    return ".".join(str(number.value) for number in numbers)


def _version_files() -> Iterator[tuple[str, list[str]]]:
    for variable in _HOMES:
        home = os.environ.get(variable)
        for name in _VERSION_FILES if home else ():
            lines = _versions_in(Path(str(home)) / name)
            if lines is not None:
                yield f"{variable}/{name}", lines


def _versions_in(path: Path) -> list[str] | None:
    """Return the lines of a file that state a version."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if "version" in line.lower()]
    return [line for line in lines if "/" not in line][:20]


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries() -> set[Path]:
    """Return our libraries, CANN's runtime and the provider, as loaded in this process."""
    files = {get_library_path()}
    kernels = os.environ.get(CANN_KERNELS.name)
    if kernels:
        files.add(Path(kernels))
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name = line.partition("/")[2]
        path = Path(f"/{name}")
        if name and any(part in path.name for part in (*_OWN_LIBRARIES, "providers_cann")):
            files.add(path)
    return {path.resolve() for path in files if path.is_file()}


def _described(path: Path) -> LibraryFile:
    content = path.read_bytes()
    return LibraryFile(path.name, len(content), hashlib.sha256(content).hexdigest())
