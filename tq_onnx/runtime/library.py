"""Find the custom-operator library, and refuse one that does not fit this package.

The library exports ``RegisterCustomOps`` for ONNX Runtime and two strings for us: the digest of the
row layout that it was built for and a JSON description of itself. They are read with ctypes, so
none of this needs onnxruntime.

Refused with ``LibraryError``: a library that is missing, cannot be loaded, lacks these symbols, or
was built for another row layout.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tq_onnx.codec.rounding import Rounding
from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import LibraryError
from tq_onnx.runtime.platforms import LIBRARIES, system_here
from tq_onnx.runtime.variables import LIBRARY

_REBUILD: Final = "reinstall tq-onnx to build it again"


@dataclass(frozen=True)
class LibraryInfo:
    """The description that a library gives of itself."""

    path: Path  #: the file
    version: str  #: version of tq-onnx that it was built from
    layout_digest: str  #: the row layout that it was built for, equal to the package's own
    isa_compiled: tuple[str, ...]  #: SIMD levels in the file, best first
    isa_supported: tuple[str, ...]  #: those that this processor runs
    isa_of_processor: str  #: the best level that this processor has, in the file or not
    #: the level that kernels use; ``None`` when ``TQ_ONNX_ISA`` names an unsupported one
    isa: str | None
    products: str | None  #: what that level takes unless ``TQ_ONNX_PRODUCTS`` says something else
    #: how that level rounds: in decode steps with products ``8``, and prompts whose products are of
    #: ``pairs``, where it has such
    roundings: Mapping[str, Rounding]
    decode_rows: int  #: query rows of a KV head up to which a call is a decode step

    @property
    def problem(self) -> str | None:
        """What is wrong with a library that was built for another machine, and what to do."""
        if self.isa_supported != ("scalar",) or self.isa_of_processor == "scalar":
            return None
        return (
            f"{self.path} has no kernels for this processor ({self.isa_of_processor}) and runs "
            "portable ones, which are many times slower: install tq-onnx from source on this "
            "machine, or with TQ_LEVELS=all"
        )


def library_name() -> str:
    """Return file name of the library on this platform."""
    return LIBRARIES[system_here()]


def get_library_path() -> Path:
    """Return the path of the library, for ``SessionOptions.register_custom_ops_library``.

    The environment variable ``TQ_ONNX_LIBRARY`` overrides the library that came with the package.
    """
    override = os.environ.get(LIBRARY.name)
    if override:
        path = Path(override)
        if not path.is_file():
            raise LibraryError(
                f"{LIBRARY.name} names no file",
                where=override,
                fix="unset it to use the library of the package",
            )
        return path.resolve()
    for folder in _folders():
        path = folder / "lib" / library_name()
        if path.is_file():
            return path.resolve()
    raise LibraryError(
        f"the custom-operator library {library_name()} is not part of this installation",
        fix=_REBUILD,
    )


def library_info() -> LibraryInfo:
    """Load the library and read its description."""
    path = get_library_path()
    try:
        library = ctypes.CDLL(str(path))
        digest = _string(library, "tq_layout_digest")
        info = _described(path, digest, json.loads(_string(library, "tq_library_info")))
    except OSError as error:
        raise LibraryError(
            f"the library cannot be loaded ({error})", where=str(path), fix=_REBUILD
        ) from error
    except (AttributeError, ValueError, KeyError) as error:
        raise LibraryError(
            "the file is not a tq-onnx library", where=str(path), fix=_REBUILD
        ) from error
    if digest != layout_digest():
        raise LibraryError(
            f"the library was built for row layout {digest}, "
            f"but this package uses {layout_digest()}",
            where=str(path),
            fix=_REBUILD,
        )
    return info


def _described(path: Path, digest: str, described: dict[str, Any]) -> LibraryInfo:
    return LibraryInfo(
        path=path,
        version=described["version"],
        layout_digest=digest,
        isa_compiled=tuple(described["isa_compiled"]),
        isa_supported=tuple(described["isa_supported"]),
        isa_of_processor=described["isa_of_processor"],
        isa=described["isa"],
        products=described["products"],
        roundings={name: Rounding(*how) for name, how in described["roundings"].items()},
        decode_rows=described["decode_rows"],
    )


def _folders() -> Iterator[Path]:
    """Yield the package's folders: an editable install has two, for sources and built files."""
    package = importlib.util.find_spec("tq_onnx")
    for folder in (package and package.submodule_search_locations) or ():
        yield Path(folder)
    for folder in sys.path:
        yield Path(folder) / "tq_onnx"


def _string(library: ctypes.CDLL, symbol: str) -> str:
    function = getattr(library, symbol)
    function.argtypes = []
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()
