"""Temporary files with a lock, and the removal of those that a killed run has left.

A run holds a lock on every temporary file that it writes, for as long as it lives; the system drops
the lock with the process. ``open_locked`` makes such a file. ``remove_abandoned`` removes the files
beside a target that have the names of temporary files and no lock, so that two runs at once leave
each other's files alone.

Where a lock says nothing (a hard link shares the lock of the other names, and not every system has
locks), a file goes only when nobody has changed it for a day.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Literal

_AGE: Final = 24 * 3600.0
"""Seconds after which a file without a meaningful lock is nobody's."""
_TRIES: Final = 8
_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)

Kind = Literal["tmp", "old"]


def temporary_name(target: Path, kind: Kind = "tmp") -> Path:
    """Return a new name for a temporary file beside a target."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{kind}")


def open_locked(path: Path) -> BinaryIO:
    """Make a file and lock it until it is closed.

    Raises:
        OSError: it exists, or cannot be made.
    """
    for _ in range(_TRIES):
        file = path.open("xb")
        # Between the two lines another run may have taken the file for an abandoned one.
        if not _lock(file.fileno(), wait=True) or _is(path, file.fileno()):
            return file
        file.close()
    raise OSError(f"{path} disappears again and again")


def remove_abandoned(target: Path) -> None:
    """Remove the temporary files of a target that no living run has; what cannot be stays."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}\.(tmp|old)")
    try:
        paths = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return
    for path in paths:
        # The backup of a target that is not there is the only copy of what was replaced.
        if path.suffix == ".old" and not os.path.lexists(target):
            continue
        with suppress(OSError):
            _remove(path)


def remove_all_abandoned(folder: Path) -> None:
    """Remove the temporary files of a folder that no living run has.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            with suppress(OSError):
                _remove(path)


def is_empty(folder: Path) -> bool:
    """Return True if a folder has no files, once those of a killed run are removed.

    Nothing is removed from a folder that has other files, too.
    """
    files = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    if not all(_TEMPORARY.fullmatch(file.name) for file in files):
        return False
    for file in files:
        with suppress(OSError):
            _remove(file)
    return not any(os.path.lexists(file) for file in files)


def _remove(path: Path) -> None:
    """Remove one file, unless a living run may have it."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return
    newest = max(status.st_mtime, status.st_ctime)
    if path.suffix == ".old" or status.st_nlink > 1:
        if time.time() - newest > _AGE:
            path.unlink()
        return
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        locked = _lock(descriptor, wait=False)
        if locked is False or not _is(path, descriptor):
            return
        if locked or time.time() - newest > _AGE:
            path.unlink()
    finally:
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Return True if a name is still that of an open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _lock(descriptor: int, *, wait: bool) -> bool | None:
    """Lock an open file; return False if another run has it, None if there are no locks here."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
