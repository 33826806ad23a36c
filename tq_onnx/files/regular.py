"""Open regular files only: a pipe never ends, and a device may do anything when it is opened."""

from __future__ import annotations

import errno
import os
import stat
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, Final

_FLAGS: Final = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY")
)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it is missing, it cannot be read, or it is something else.
        ValueError: the path has a zero byte.
    """
    _refuse_special(path.stat())
    # What takes the file's place now is opened without waiting for anybody, and refused.
    descriptor = os.open(path, _FLAGS)
    try:
        _refuse_special(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text; see ``open_regular`` for errors.

    Raises:
        UnicodeDecodeError: it is no such text.
    """
    with TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def _refuse_special(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file")
