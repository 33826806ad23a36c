"""Arrays and facts in a safetensors file that appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tq_onnx.errors import ModelFileError
from tq_onnx.files.regular import open_regular
from tq_onnx.files.transaction import Transaction

Arrays = dict[str, npt.NDArray[Any]]

DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""Exceptions of ``read_arrays``, and of looking at what it returns."""

_SIZE_BYTES: Final = 8
_LARGEST_HEADER: Final = 100_000_000
"""Bytes of a header, by safetensors' own limit."""


def write_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, str], *, overwrite: bool
) -> int:
    """Write a file and return its size; what is half-written is removed."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    content = memoryview(save(whole, dict(facts)))
    # The header in order, which safetensors takes from a random hash map.
    end = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "little")
    header = json.dumps(json.loads(bytes(content[_SIZE_BYTES:end])), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _LARGEST_HEADER:
        raise ModelFileError("the metadata are too large for a file", where=str(path))
    transaction = Transaction(overwrite=overwrite)
    try:
        transaction.clear([path])
        parts = (len(header).to_bytes(_SIZE_BYTES, "little"), header, content[end:])
        size = transaction.write(path, parts)
        transaction.commit()
    except OSError as error:
        transaction.undo()
        raise unwritable(path, error) from error
    except BaseException:
        transaction.undo()
        raise
    return size


def read_arrays(
    path: Path, *, largest: int, check: Callable[[dict[str, str]], None] = lambda _: None
) -> tuple[Arrays, dict[str, str]]:
    """Read a file; return the arrays by name, and the metadata.

    Args:
        largest: bytes beyond which it is not read.

    Raises:
        OSError, ValueError, SafetensorError and others of ``DAMAGES``: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"the file has {size} bytes, and {largest} are the most")
        facts = _facts(file)
        check(facts)
        file.seek(0)
        return load(file.read()), facts


def facts_of(path: Path) -> dict[str, str]:
    """Return the metadata of a file; nothing if it is no safetensors file."""
    try:
        with open_regular(path) as file:
            return _facts(file)
    except DAMAGES:
        return {}


def _facts(file: BinaryIO) -> dict[str, str]:
    """Read the metadata in the header of a file."""
    size = int.from_bytes(file.read(_SIZE_BYTES), "little")
    if size > _LARGEST_HEADER:
        raise ValueError("there is no header")
    try:
        header = json.loads(file.read(size))
        facts = header.get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError("there is no header") from error
    if not isinstance(facts, dict) or not all(isinstance(fact, str) for fact in facts.values()):
        raise ValueError("the metadata are no texts")
    return facts


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
