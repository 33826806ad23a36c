"""Write a model: all of it or nothing, and never over its input.

``save`` stages the model and the data it needs beside their targets under temporary names, syncs
them to the disk and renames them, the model last. Whatever goes wrong before that, an interruption
included, every file and folder it made is removed and what was there before stays.

External data is never read into memory:

- output in the folder of the input: both models share the data files (``keep``);
- output elsewhere: the files are copied under the same relative names (``copy``), or hard-linked
  (``link``: costs no space, but onnx and onnx-ir refuse to read data with several names; ONNX
  Runtime reads it). A file that is there already with the same content is taken as it is, so that
  conversions with several presets share one copy.

Weights inside the model file stay inside, as long as they fit (see ``tq_onnx.files.oversize``).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final, Literal

import onnx_ir

from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.files.load import LoadedModel
from tq_onnx.files.oversize import stage_model
from tq_onnx.files.transaction import Transaction, same_content
from tq_onnx.progress import OnProgress

ExternalData = Literal["keep", "copy", "link"]

_OTHER_DATA: Final = "give another folder, or `overwrite=True` if no other model needs the file"


@dataclass(frozen=True)
class SavedFiles:
    """The files that were written, and the data that the model needs.

    Attributes:
        model: the model file.
        data: the external data files that it reads, below its folder.
        external_data: how they got there: ``keep``, ``copy`` or ``link``; None without such files.
        bytes_written: size of what was written: the model, and data that was copied or moved out.
        moved: another data file, with weights that did not fit into the model file; None as a rule.
    """

    model: Path
    data: tuple[Path, ...]
    external_data: ExternalData | None
    bytes_written: int
    moved: Path | None = None


def check_output(
    loaded: LoadedModel,
    output: Path,
    *,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
) -> tuple[Path, ExternalData | None]:
    """Refuse an output that ``save`` would refuse, before any work is done.

    Returns:
        The output with its folder resolved, and how external data gets there.
    """
    target = Path(os.path.realpath(output.parent)) / output.name
    where = str(output)
    sources = (loaded.path, *loaded.external_files)
    if target in sources or any(_same_file(target, source) for source in sources):
        raise ModelFileError(
            "the output would overwrite the input model or its data",
            where=where,
            fix="give another file as `output`",
        )
    _check_target(target, where, overwrite, "give `overwrite=True` or another output")
    mode = _data_mode(loaded, target, where, external_data)
    if mode in ("copy", "link"):
        for source, copy in _copies(loaded, target):
            if copy == target:
                raise ModelFileError(
                    "the output has the name of one of the model's data files", where=where
                )
            if not _may_be(copy, source):
                _check_data(copy, target, overwrite)
    return target, mode


def save(
    loaded: LoadedModel,
    model: onnx_ir.Model,
    output: Path,
    *,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
    on_progress: OnProgress | None = None,
) -> SavedFiles:
    """Write a model that was made from ``loaded``.

    Args:
        external_data: ``keep``, ``copy`` or ``link``; by default keep in the same folder, copy
            elsewhere.
    """
    target, mode = check_output(loaded, output, overwrite=overwrite, external_data=external_data)
    copies = _copies(loaded, target) if mode in ("copy", "link") else ()
    with all_or_nothing(output, overwrite=overwrite) as transaction:
        missing = _missing(copies, target, overwrite, on_progress)
        total = sum(source.stat().st_size for source, _ in missing) if mode == "copy" else 0
        transaction.make_folder(target.parent)
        transaction.clear([target, *(copy for _, copy in missing)])
        # What the conversion adds to the model itself is little beside what it had.
        check_space(target.parent, total + loaded.path.stat().st_size)
        copied = 0
        for source, copy in missing:
            if mode == "link":
                transaction.link(source, copy)
            else:
                copied = transaction.copy(source, copy, copied, total, on_progress)
        occupied = {loaded.path, *loaded.external_files, *(copy for _, copy in copies)}
        staged = stage_model(transaction, model, target, occupied=occupied)
    folder = loaded.path.parent
    data = tuple(target.parent / file.relative_to(folder) for file in loaded.external_files)
    written = total + staged.size + staged.data_size
    return SavedFiles(target, data, mode, written, staged.data)


def _missing(
    copies: tuple[tuple[Path, Path], ...],
    target: Path,
    overwrite: bool,
    on_progress: OnProgress | None,
) -> list[tuple[Path, Path]]:
    """Return the copies that are not there yet with the same content."""
    candidates = [(source, copy) for source, copy in copies if _may_be(copy, source)]
    candidates = [pair for pair in candidates if not _same_file(*pair)]
    total, compared = sum(source.stat().st_size for source, _ in candidates), 0
    missing = [(source, copy) for source, copy in copies if not _may_be(copy, source)]
    for source, copy in candidates:
        if not same_content(copy, source, compared, total, on_progress):
            _check_data(copy, target, overwrite)
            missing.append((source, copy))
        compared += source.stat().st_size
    return missing


def _may_be(path: Path, source: Path) -> bool:
    """Return True if a file may have another's content: the same file, or one of its size."""
    if _same_file(path, source):
        return True
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == source.stat().st_size


def _data_mode(
    loaded: LoadedModel, target: Path, where: str, mode: ExternalData | None
) -> ExternalData | None:
    if not loaded.external_files:
        return None
    if target.parent == loaded.path.parent:
        if mode in ("copy", "link"):
            raise UsageError(
                f"there is nothing to {mode}: the output lies beside the model's external data",
                where=where,
                fix="keep it there, or give an output in another folder",
            )
        return "keep"
    if mode == "keep":
        if all(_same_file(copy, source) for source, copy in _copies(loaded, target)):
            return "keep"
        raise UsageError(
            "external data can only be kept by an output in the folder of the input",
            where=where,
            fix="choose copy or link",
        )
    return mode or "copy"


def _copies(loaded: LoadedModel, target: Path) -> tuple[tuple[Path, Path], ...]:
    folder = loaded.path.parent
    return tuple((file, target.parent / file.relative_to(folder)) for file in loaded.external_files)


def _same_file(path: Path, second: Path) -> bool:
    try:
        return path.samefile(second)
    except OSError:
        return False


def _check_target(path: Path, where: str, overwrite: bool, fix: str) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal(error, path) from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError("the output is a folder", where=where, fix="give a file name in it")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        raise ModelFileError("the output exists and is not a regular file", where=where)
    if not overwrite:
        raise OutputExistsError("the output exists", where=where, fix=fix)


def _check_data(copy: Path, target: Path, overwrite: bool) -> None:
    """Refuse a data file that would take the place of one that other models read."""
    _check_target(copy, str(copy), overwrite, _OTHER_DATA)
    for model in sorted(target.parent.glob("*.onnx")) if copy.exists() else ():
        if model != target and model.is_file() and model.stat().st_size:
            with model.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                if content.find(copy.name.encode()) >= 0:
                    raise OutputExistsError(
                        f"{model.name} reads this file, and the new one has other content",
                        where=str(copy),
                        fix=f"give another folder, or remove {model.name} first",
                    )


@contextmanager
def all_or_nothing(output: Path, *, overwrite: bool = True) -> Iterator[Transaction]:
    """Yield a transaction and commit it afterwards; if anything fails, undo it."""
    transaction = Transaction(overwrite)
    try:
        yield transaction
        transaction.commit()
    except BaseException as error:
        transaction.undo()
        if isinstance(error, OSError):
            raise refusal(error, output) from error
        raise


def check_space(folder: Path, needed: int) -> None:
    """Refuse an output that the file system has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelFileError(
            f"the output needs {needed} bytes and {free} are free", where=str(folder)
        )


def refusal(error: OSError, output: Path) -> ModelFileError:
    """Return the error for the user when writing an output failed."""
    if error.errno == errno.EXDEV:
        return ModelFileError(
            "a hard link cannot cross file systems",
            where=str(output),
            fix="copy the external data instead",
        )
    if isinstance(error, FileExistsError):
        return OutputExistsError(
            "the output appeared while it was being written",
            where=str(error.filename2 or error.filename or output),
        )
    detail = error.strerror or type(error).__name__
    return ModelFileError(f"the output cannot be written ({detail})", where=str(output))
