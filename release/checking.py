"""Check wheels: what is in them, and what their library exports and needs.

``problems`` looks into a wheel without unpacking or loading anything of it, so that wheels of every
platform are checked on any. The rules:

- tags of the name and of the metadata are those of the platform, and the file of records is right;
- there is one library, that of the platform by its name, and no other compiled file;
- it was built for the row layout and the version of this checkout;
- it exports the names in ``custom_ops/ort/exports.txt`` and no other;
- it needs libraries of the operating system only, which every installation of it has;
- on Linux it needs symbols of no release later than those that its tag allows;
- on macOS it runs from the release of its tag on, and is signed, as this processor demands.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import lief

from release.building import ROOT
from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import LibraryError
from tq_onnx.runtime.platforms import LIBRARY_FOLDER, PLATFORMS, Platform, platform_of
from tq_onnx.version import __version__

_COMPILED: Final = re.compile(r".*\.(so(\.\d+)*|dll|dylib|pyd|a|lib|o|obj|pdb|exe)")
_ADDED_BY_LINKER: Final = {"__mh_dylib_header", "___dso_handle"}
"""Names that zig's linker for macOS adds to every library; nothing is bound to them."""

_NEEDED: Final = {
    "linux": r"lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s)\.so\.\d|ld-linux-[\w-]+\.so\.\d",
    "windows": r"kernel32\.dll|ntdll\.dll|api-ms-win-crt-[\w-]+\.dll",
    "macos": r"/usr/lib/libSystem\.B\.dylib|/usr/lib/libc\+\+\.1\.dylib",
}
"""Libraries of an operating system that a library may need; of Linux, those of the manylinux
policies."""
_NEWEST: Final = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Releases of symbols that the policy of manylinux_2_28 allows, besides those of glibc."""


def problems(wheel: Path, platform: Platform) -> list[str]:
    """Return what is wrong with a wheel, one sentence each; nothing if it is as it should be.

    Args:
        wheel: the file.
        platform: the platform that it should be for.
    """
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    problems_found = [*_of_metadata(wheel, platform, contents), *_of_records(contents)]
    compiled = [name for name in contents if _COMPILED.fullmatch(name.lower())]
    expected = f"{LIBRARY_FOLDER}/{platform.library}"
    if compiled != [expected]:
        return [*problems_found, f"has the compiled files {compiled}, not {expected} alone"]
    content = contents[expected]
    try:
        made_for = platform_of(content)
    except LibraryError:
        made_for = "no platform"
    if made_for != platform.name:
        return [*problems_found, f"the library is for {made_for}"]
    if layout_digest().encode() not in content:
        problems_found.append("the library has another row layout")
    if __version__.encode() not in content:
        problems_found.append(f"the library is not of version {__version__}")
    return [*problems_found, *library_problems(content, platform)]


def library_problems(content: bytes, platform: Platform) -> list[str]:
    """Return what is wrong with a library, likewise.

    Args:
        content: the file.
        platform: the platform that its headers name.
    """
    library = lief.parse(content)
    if isinstance(library, lief.ELF.Binary):
        names = {str(symbol.name) for symbol in library.exported_symbols}
        needed = [str(dependency) for dependency in library.libraries]
        further = _of_versions(library, platform)
    elif isinstance(library, lief.PE.Binary):
        table = library.get_export()
        names = {str(entry.name) for entry in table.entries} if table is not None else set()
        needed = [str(dependency.name) for dependency in library.imports]
        further = iter(())
    elif isinstance(library, lief.MachO.Binary):
        linked = {str(symbol.name) for symbol in library.exported_symbols} - _ADDED_BY_LINKER
        names = {name.removeprefix("_") for name in linked}
        own_name = f"@rpath/{platform.library}"
        needed = [
            str(dependency.name) for dependency in library.libraries if dependency.name != own_name
        ]
        further = _of_macos(library, platform)
    else:
        return ["the library cannot be read"]
    problems_found = []
    if names != exported_names():
        problems_found.append(
            f"the library exports {sorted(names)}, not {sorted(exported_names())}"
        )
    allowed = re.compile(_NEEDED[platform.system], re.IGNORECASE)
    unexpected = [name for name in needed if not allowed.fullmatch(name)]
    if unexpected or not needed:
        problems_found.append(f"the library needs {unexpected or 'no library at all'}")
    return [*problems_found, *further]


def exported_names() -> set[str]:
    """Return the names that the library exports, as the linker of macOS is told them."""
    lines = (ROOT / "custom_ops" / "ort" / "exports.txt").read_text().split()
    return {line.removeprefix("_") for line in lines}


def _of_versions(library: lief.ELF.Binary, platform: Platform) -> Iterator[str]:
    tag = re.match(r"manylinux_(\d+)_(\d+)_", platform.tag)
    newest = {**_NEWEST, "GLIBC": tuple(int(number) for number in tag.groups()) if tag else ()}
    for needed in library.symbols_version_requirement:
        for symbol in needed.get_auxiliary_symbols():
            kind, _, release = str(symbol.name).partition("_")
            if not re.fullmatch(r"\d+(\.\d+)*", release) or kind not in newest:
                yield f"the library needs symbols of {symbol.name}, which no policy knows"
            elif tuple(int(number) for number in release.split(".")) > newest[kind]:
                yield f"the library needs symbols of {symbol.name}, newer than {platform.tag}"


def _of_macos(library: lief.MachO.Binary, platform: Platform) -> Iterator[str]:
    tag = re.match(r"macosx_(\d+)_(\d+)_", platform.tag)
    promised = [int(number) for number in tag.groups()] if tag else []
    build = library.build_version
    if build is None or list(build.minos)[:2] != promised:
        yield f"the library is for macOS {build and list(build.minos)}, not {promised}"
    if not library.has_code_signature:
        yield "the library is not signed"


def _of_metadata(wheel: Path, platform: Platform, contents: dict[str, bytes]) -> Iterator[str]:
    name = f"tq_onnx-{__version__}-py3-none-{platform.tag}.whl"
    if wheel.name != name:
        yield f"is called {wheel.name}, not {name}"
    facts = contents.get(f"tq_onnx-{__version__}.dist-info/WHEEL", b"").decode()
    tags = re.findall(r"^Tag: (.*)$", facts, re.MULTILINE)
    if tags != [f"py3-none-{platform.tag}"]:
        yield f"has the tags {tags}"
    if "Root-Is-Purelib: false" not in facts:
        yield "would be installed as a package of Python alone"
    for needed in ("tq_onnx/py.typed", "tq_onnx/bundled/model.safetensors"):
        if needed not in contents:
            yield f"lacks {needed}"


def _of_records(contents: dict[str, bytes]) -> Iterator[str]:
    (path,) = [name for name in contents if name.endswith(".dist-info/RECORD")] or [""]
    rows = list(csv.reader(io.StringIO(contents.get(path, b"").decode())))
    recorded = {row[0]: row[1] for row in rows if row}
    files = {name for name in contents if not name.endswith("/")}
    if set(recorded) != files:
        yield f"its records differ from its files in {sorted(set(recorded) ^ files)[:4]}"
    for name in sorted(files & set(recorded) - {path}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest())
        if recorded[name] != f"sha256={digest.decode().rstrip('=')}":
            yield f"its records have another digest of {PurePosixPath(name).name}"


def platform_of_wheel(wheel: Path) -> Platform | None:
    """Return the platform in the name of a wheel."""
    return next(
        (platform for platform in PLATFORMS.values() if wheel.stem.endswith(platform.tag)), None
    )
