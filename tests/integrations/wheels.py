"""Wheels as small as they can be: a library that is little more than its headers."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tq_onnx.codec.spec import layout_digest
from tq_onnx.runtime.platforms import LIBRARY_FOLDER, PLATFORMS
from tq_onnx.version import __version__

_HEADERS = {
    "linux-x86_64": b"\x7fELF\x02\x01" + bytes(12) + b"\x3e\x00",
    "linux-arm64": b"\x7fELF\x02\x01" + bytes(12) + b"\xb7\x00",
    "windows-x86_64": b"MZ" + bytes(58) + b"\x40\0\0\0" + b"PE\0\0\x64\x86",
    "windows-arm64": b"MZ" + bytes(58) + b"\x40\0\0\0" + b"PE\0\0\x64\xaa",
    "macos-arm64": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
}


def made_library(platform: str, digest: str = layout_digest()) -> bytes:
    """The bytes by which a library of a platform is known."""
    return _HEADERS[platform] + bytes(100) + digest.encode()


def made_wheel(folder: Path, platform: str, *libraries: tuple[str, bytes]) -> Path:
    """A wheel by the name of a platform, with its library or with the given names and contents."""
    one = PLATFORMS[platform]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tq_onnx-{__version__}-py3-none-{one.tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tq_onnx/__init__.py", "")
        for name, content in libraries or ((one.library, made_library(platform)),):
            archive.writestr(f"{LIBRARY_FOLDER}/{name}", content)
    return path
