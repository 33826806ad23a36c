"""Arrays and facts in a safetensors file that appears whole or not at all."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tq_onnx.errors import ModelFileError
from tq_onnx.files.transaction import Transaction

Arrays = dict[str, npt.NDArray[Any]]

DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""Exceptions of ``read_arrays``, and of looking at what it returns."""


def write_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, str], *, overwrite: bool
) -> int:
    """Write a file and return its size; what is half-written is removed.

    Args:
        path: the file.
        arrays: by name.
        facts: the metadata.
        overwrite: whether a file that exists is replaced.

    Raises:
        ModelFileError: it cannot be written.
    """
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    content = memoryview(save(whole, dict(facts)))
    # The header in order, which safetensors takes from a random hash map.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(bytes(content[8:end])), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    transaction = Transaction(overwrite=overwrite)
    try:
        transaction.clear([path])
        parts = (len(header).to_bytes(8, "little"), header, content[end:])
        size = transaction.write(path, parts)
        transaction.commit()
    except OSError as error:
        transaction.undo()
        raise unwritable(path, error) from error
    except BaseException:
        transaction.undo()
        raise
    return size


def read_arrays(path: Path, *, largest: int) -> tuple[Arrays, dict[str, str]]:
    """Read a file.

    Args:
        path: the file.
        largest: bytes beyond which it is not opened.

    Returns:
        The arrays by name, and the metadata.

    Raises:
        OSError, ValueError, SafetensorError and others of ``DAMAGES``: it cannot be read.
    """
    status = path.stat()
    # Before it is opened: a pipe would never end.
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the path is not a regular file")
    if status.st_size > largest:
        raise ValueError(f"the file has {status.st_size} bytes")
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, file.metadata() or {}


def facts_of(path: Path) -> dict[str, str]:
    """Return the metadata of a file; nothing if it is no safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def reason_of(error: BaseException) -> str:
    """Return one line that says what is wrong with a file."""
    reason = error.strerror if isinstance(error, OSError) else None
    return " ".join(str(reason or error).split())[:200]


def unwritable(path: Path, error: OSError) -> ModelFileError:
    """Return the refusal of a file that cannot be written."""
    return ModelFileError(
        f"the file cannot be written ({error.strerror or error})",
        where=str(path),
        fix="give another output",
    )
