"""The platforms of wheels, and how to distinguish their libraries.

Knows files only: a library of another platform is read here and never loaded.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import Final

from tq_onnx.errors import LibraryError

LIBRARIES: Final = {
    "linux": "libtq_onnx_ops.so",
    "macos": "libtq_onnx_ops.dylib",
    "windows": "tq_onnx_ops.dll",
}
"""File name of the operator library by operating system."""

LIBRARY_FOLDER: Final = "tq_onnx/lib"
"""Where a wheel has the library."""

_SYSTEMS: Final = {"win32": "windows", "darwin": "macos"}
_MACHINES: Final = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}

_ELF: Final = {62: "x86_64", 183: "arm64"}
_PE: Final = {0x8664: "x86_64", 0xAA64: "arm64"}
_MACH_O: Final = {0x01000007: "x86_64", 0x0100000C: "arm64"}


@dataclass(frozen=True)
class Platform:
    """A platform."""

    name: str  #: as users write it
    tag: str  #: the platform tag of its wheel

    @property
    def system(self) -> str:
        """Its operating system, a key of ``LIBRARIES``."""
        return self.name.partition("-")[0]

    @property
    def library(self) -> str:
        """File name of the operator library."""
        return LIBRARIES[self.system]


PLATFORMS: Final = {
    platform.name: platform
    for platform in (
        Platform("linux-x86_64", "manylinux_2_28_x86_64"),
        Platform("linux-arm64", "manylinux_2_28_aarch64"),
        Platform("windows-x86_64", "win_amd64"),
        Platform("windows-arm64", "win_arm64"),
        Platform("macos-arm64", "macosx_14_0_arm64"),
    )
}
"""By name, in the order of the documentation."""


def system_here() -> str:
    """Return the operating system of this machine, a key of ``LIBRARIES``."""
    return _SYSTEMS.get(sys.platform, "linux")


def platform_here() -> str:
    """Return the name of this machine's platform; it need not be in ``PLATFORMS``."""
    machine = platform.machine().lower()
    return f"{system_here()}-{_MACHINES.get(machine, machine)}"


def platform_of(content: bytes) -> str:
    """Return the name of the platform that a library is for, from its first bytes."""
    machine = None
    if content[:6] == b"\x7fELF\x02\x01":
        system, machine = "linux", _ELF.get(_number(content, 18, 2))
    elif content[:4] == b"\xcf\xfa\xed\xfe":
        system, machine = "macos", _MACH_O.get(_number(content, 4, 4))
    elif content[:2] == b"MZ":
        header = _number(content, 60, 4)
        if content[header : header + 4] == b"PE\0\0":
            system, machine = "windows", _PE.get(_number(content, header + 4, 2))
    if machine is None:
        raise LibraryError("the file is no library of a platform that tq-onnx is made for")
    return f"{system}-{machine}"


def _number(content: bytes, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "little")
