"""Files that appear together or not at all.

A ``Transaction`` writes files under temporary names beside their targets and syncs them to the
disk; ``commit`` renames them in the order of staging; ``undo`` removes whatever was made, files and
folders, and puts back what had been replaced. Between the two, nobody sees half a file.

``same_content`` tells whether a file need not be written at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from tq_onnx.files.abandoned import open_locked, remove_abandoned, temporary_name
from tq_onnx.progress import OnProgress, Progress

_CHUNK: Final = 16 << 20


def same_content(
    path: Path, second: Path, position: int, total: int, on_progress: OnProgress | None
) -> bool:
    """Return True if two regular files hold the same bytes; read in chunks, up to a difference.

    Links are not followed at ``path``: what a link shows today may be something else tomorrow.

    Args:
        position: bytes to report before the first chunk.
        total: bytes to report as the whole.
        on_progress: called as bytes are compared.

    Raises:
        OSError: a file cannot be read.
    """
    status, second_status = path.lstat(), second.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size != second_status.st_size:
        return False
    with path.open("rb", buffering=0) as left, second.open("rb", buffering=0) as right:
        while True:
            chunk = left.read(_CHUNK)
            if chunk != right.read(_CHUNK):
                return False
            if not chunk:
                return True
            position += len(chunk)
            if on_progress is not None:
                on_progress(Progress("Comparing files", position, total))


class Transaction:
    """Files under temporary names beside their targets.

    Args:
        overwrite: whether targets that exist are replaced; if not, one that appears before its turn
            raises ``FileExistsError``.

    Every method raises ``OSError`` as it comes; the caller then calls ``undo``.
    """

    def __init__(self, overwrite: bool) -> None:
        """Start an empty transaction."""
        self.overwrite = overwrite
        self._folders: list[Path] = []
        self._staged: list[tuple[Path, Path]] = []
        self._placed: list[Path] = []
        self._backups: list[tuple[Path, Path]] = []
        self._locked: list[int] = []

    def clear(self, targets: Iterable[Path]) -> None:
        """Remove the temporary files that killed runs left beside targets."""
        for target in targets:
            remove_abandoned(target)

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, where they do not exist."""
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir()
            self._folders.append(path)

    def link(self, source: Path, target: Path) -> None:
        """Stage another name of a file."""
        self.make_folder(target.parent)
        os.link(source.resolve(), self._temporary(target))

    def copy(
        self, source: Path, target: Path, position: int, total: int, on_progress: OnProgress | None
    ) -> int:
        """Copy a file and return ``position`` plus its size; inside the kernel where it can."""
        self.make_folder(target.parent)
        with source.open("rb") as reader, self._open(target) as writer:
            in_kernel = hasattr(os, "copy_file_range")
            while True:
                count = 0
                if in_kernel:
                    try:
                        count = os.copy_file_range(reader.fileno(), writer.fileno(), _CHUNK)
                    except OSError:
                        # Not between these file systems: both offsets are still where they were.
                        in_kernel = False
                if not in_kernel:
                    chunk = os.read(reader.fileno(), _CHUNK)
                    count = len(chunk)
                    _write_all(writer.fileno(), chunk)
                if not count:
                    break
                position += count
                if on_progress is not None:
                    on_progress(Progress("Copying files", position, total))
            os.fsync(writer.fileno())
        return position

    def write(self, target: Path, parts: Iterable[bytes | memoryview]) -> int:
        """Stage a file whose content is taken part by part, and return its size."""
        self.make_folder(target.parent)
        size = 0
        with self._open(target) as writer:
            for part in parts:
                _write_all(writer.fileno(), part)
                size += len(part)
            os.fsync(writer.fileno())
        return size

    def commit(self, last: Collection[Path] = ()) -> None:
        """Rename everything in the order of staging, and the files of ``last`` at the end.

        What reads other files belongs there: a model after its data, a configuration after models.
        """
        self._staged.sort(key=lambda item: item[1] in last)
        for temporary, target in self._staged:
            if self.overwrite:
                self._back_up(target)
                temporary.replace(target)
            else:
                # A link refuses to replace what appeared in the meantime; a rename would not.
                self._rename_new(temporary, target)
            self._placed.append(target)
        self._staged.clear()
        for folder in {target.parent for target in self._placed}:
            _sync_folder(folder)
        self._placed.clear()
        self._folders.clear()
        for backup, _ in self._backups:
            backup.unlink(missing_ok=True)
        self._backups.clear()
        self._unlock()

    def undo(self) -> None:
        """Remove what was made, and put back what was replaced."""
        for temporary, _ in self._staged:
            with suppress(OSError):  # where nothing can be removed, nothing could be made either
                temporary.unlink()
        restored = {target: backup for backup, target in self._backups}
        for target in self._placed:
            if target in restored:
                restored[target].replace(target)
            else:
                target.unlink(missing_ok=True)
        for backup, _ in self._backups:
            backup.unlink(missing_ok=True)
        for folder in reversed(self._folders):
            if not any(folder.iterdir()):
                folder.rmdir()
        self._unlock()

    def _back_up(self, target: Path) -> None:
        if not os.path.lexists(target):
            return
        backup = temporary_name(target, "old")
        try:
            os.link(target, backup, follow_symlinks=False)
        except OSError:  # a file system without hard links
            target.rename(backup)
        self._backups.append((backup, target))

    @staticmethod
    def _rename_new(temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise
            temporary.rename(target)
        else:
            temporary.unlink()

    def _temporary(self, target: Path) -> Path:
        temporary = temporary_name(target)
        self._staged.append((temporary, target))
        return temporary

    def _open(self, target: Path) -> BinaryIO:
        """Stage a file to write; its lock outlives the writing, until ``commit`` or ``undo``."""
        remove_abandoned(target)
        writer = open_locked(self._temporary(target))
        if os.name == "posix":  # where there are locks, and open files can be renamed
            self._locked.append(os.dup(writer.fileno()))
        return writer

    def _unlock(self) -> None:
        while self._locked:
            os.close(self._locked.pop())


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
