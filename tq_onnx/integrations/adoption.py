"""Give a folder of onnxruntime-genai the operator library of some platform.

Such a folder carries the library of the machine that converted it, because onnxruntime-genai loads
it from there. ``library_for`` finds that of a platform: this installation's own, or that in a wheel
of tq-onnx for another one. ``adopt_folder`` puts it into a converted folder, in place of the one
that is there; the models are the same for all platforms.

A library of another platform is never loaded. Its headers say what it is for, and the digest of its
row layout is searched for in its bytes.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final

from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import LibraryError, ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.files.save import all_or_nothing
from tq_onnx.integrations.folder import no_model
from tq_onnx.integrations.genai import CONFIG_FILE, read_config, with_library
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.platforms import (
    LIBRARIES,
    LIBRARY_FOLDER,
    PLATFORMS,
    platform_here,
    platform_of,
)
from tq_onnx.version import __version__

_LARGEST: Final = 64 << 20
"""Bytes of a library; ours have some 2 MB."""
_UNREADABLE: Final = (
    *(OSError, EOFError, ValueError, RuntimeError),  # of an encrypted or a shortened file
    *(zipfile.BadZipFile, zlib.error),
)
"""What a file that is no sound archive raises."""


@dataclass(frozen=True)
class AdoptionReport:
    """The report of an adoption.

    Attributes:
        folder: the converted folder.
        platform: the one that it is for now.
        library: file name of its library.
        source: the file that the library came from: a wheel, or the library of this installation.
        replaced: file names of the libraries that it had before.
        bytes_written: size of what was written.
    """

    folder: Path
    platform: str
    library: str
    source: Path
    replaced: tuple[str, ...]
    bytes_written: int


@dataclass(frozen=True)
class PlatformLibrary:
    """A library that is ready to be copied."""

    path: Path  #: the file; its name is that of its platform
    platform: str  #: the platform that it is for
    source: Path  #: the file that it came from, as ``AdoptionReport`` has it


@contextmanager
def library_for(platform: str | None, wheel: Path | None) -> Iterator[PlatformLibrary]:
    """Find the library of a platform; a file out of a wheel exists until the context ends.

    Args:
        wheel: a wheel of tq-onnx, or a folder with wheels of several platforms. Without it the
            library of this installation is taken.

    Yields:
        The library.
    """
    if platform is not None and platform not in PLATFORMS:
        raise UsageError(
            f"there is no platform {platform!r}", fix=f"choose one of {', '.join(PLATFORMS)}"
        )
    if wheel is None:
        yield _own(platform)
        return
    name, content, source = _unpacked(_find(wheel, platform or platform_here()))
    try:
        content_platform = platform_of(content)
    except LibraryError as error:
        error.locate(source)
        raise
    if platform not in (None, content_platform):
        raise LibraryError(
            f"the wheel has the library of {content_platform}, not of {platform}",
            where=str(source),
            fix=_download(str(platform)),
        )
    expected = PLATFORMS.get(content_platform)
    if expected is None or name != expected.library:
        raise LibraryError(
            f"the wheel has a library for {content_platform} by the name of another platform's, "
            f"{name}",
            where=str(source),
            fix="get the wheel again",
        )
    if layout_digest().encode() not in content:
        raise LibraryError(
            f"the library was built for another row layout than {layout_digest()}, which this "
            "package converts to",
            where=str(source),
            fix=f"get the wheel of tq-onnx {__version__}",
        )
    with TemporaryDirectory(prefix="tq-onnx-") as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield PlatformLibrary(path, content_platform, source)


def adopt_folder(
    folder: Path, *, platform: str | None = None, wheel: Path | None = None
) -> AdoptionReport:
    """Replace the library of a converted folder of onnxruntime-genai; its models stay."""
    config = read_config(folder)
    if config is None:
        if not folder.is_dir():
            raise ModelFileError("is no folder", where=str(folder), fix="check the path")
        if not any(folder.rglob("*.onnx")):
            raise no_model(folder)
        raise UnsupportedModelError(
            f"the folder has no {CONFIG_FILE}, and only folders of onnxruntime-genai carry a "
            "library",
            where=str(folder),
            fix="use the model as it is: it is the same for every platform",
        )
    with library_for(platform, wheel) as library:
        name = library.path.name
        content, before = with_library(config, name)
        with all_or_nothing(folder) as transaction:
            size = library.path.stat().st_size
            transaction.copy(library.path, folder / name, 0, size, None)
            size += transaction.write(config.path, [content])
            transaction.commit(last=[config.path])
            for old in before:
                if old != name:
                    (folder / old).unlink(missing_ok=True)
        return AdoptionReport(folder, library.platform, name, library.source, before, size)


def _own(platform: str | None) -> PlatformLibrary:
    path = get_library_path()
    this_platform = platform_here()
    if platform not in (None, this_platform):
        raise LibraryError(
            f"the library of {platform} is not part of this installation, which is for "
            f"{this_platform}",
            fix=_download(str(platform)),
        )
    return PlatformLibrary(path, this_platform, path)


def _download(platform: str) -> str:
    """Say how a user gets the library of a platform."""
    tag = PLATFORMS[platform].tag
    return (
        f"get its wheel with `pip download tq-onnx=={__version__} --no-deps --only-binary :all: "
        f'--platform {tag} -d wheels` and give `wheel="wheels"`'
    )


def _find(wheel: Path, platform: str) -> Path:
    """Return the wheel itself, or the one in a folder that is for a platform."""
    if not wheel.is_dir():
        return wheel
    entry = PLATFORMS.get(platform)
    wheels = sorted(wheel.glob(f"tq_onnx-*{entry.tag}*.whl")) if entry else []
    if len(wheels) == 1:
        return wheels[0]
    if wheels or entry is None:
        what, fix = f"{len(wheels) or 'no'} wheels", "name the file with `wheel`"
    else:
        what, fix = "no wheel", _download(platform)
    raise LibraryError(
        f"the folder has {what} of tq-onnx for {platform}", where=str(wheel), fix=fix
    )


def _unpacked(wheel: Path) -> tuple[str, bytes, Path]:
    """Return name and content of the one library in a wheel, and the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [
                entry
                for entry in archive.infolist()
                if PurePosixPath(entry.filename).parent.as_posix() == LIBRARY_FOLDER
                and PurePosixPath(entry.filename).name in LIBRARIES.values()
            ]
            if len(entries) != 1 or entries[0].file_size > _LARGEST:
                raise LibraryError(
                    "the file is no wheel of tq-onnx with the library of one platform",
                    where=str(wheel),
                    fix="give a file tq_onnx-*.whl",
                )
            content = archive.read(entries[0])
    except _UNREADABLE as error:
        raise LibraryError(
            f"the wheel cannot be read ({error})", where=str(wheel), fix="check the path"
        ) from error
    return PurePosixPath(entries[0].filename).name, content, wheel
