"""Read a safetensors file by numpy alone, believing nothing that its header says.

A safetensors file is an unsigned 64-bit little-endian header length, a JSON header
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` and the data, to which the offsets are
relative (format: the README of the safetensors project). Every length is checked against the file
before a tensor is made; whatever does not add up is refused with one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import ModelFileError

FloatArray = npt.NDArray[np.float16] | npt.NDArray[np.float32]

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
)
_PREFIX_BYTES: Final = 8
# The limit of the safetensors library itself.
_MAX_HEADER_BYTES: Final = 100_000_000


def read_safetensors(path: Path) -> Mapping[str, FloatArray]:
    """Read all tensors of a safetensors file.

    Args:
        path: the file; only float16 and float32 tensors are understood.

    Returns:
        Read-only arrays by name, in the file's order, each of the dtype it is stored in.

    Raises:
        ModelFileError: the file is missing, truncated, or its header does not describe it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _refusal(path, f"the weights cannot be read ({error.strerror})") from error
    if len(content) < _PREFIX_BYTES:
        raise _refusal(path, "the file is too short to be a safetensors file")
    header_bytes = int.from_bytes(content[:_PREFIX_BYTES], "little")
    start = _PREFIX_BYTES + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > len(content):
        raise _refusal(path, f"a header of {header_bytes} bytes does not fit into the file")
    data = memoryview(content)[start:]
    tensors: dict[str, FloatArray] = {}
    covered = 0
    for name, entry in _header(path, content[_PREFIX_BYTES:start]).items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, entry)
        length = math.prod(shape) * dtype.itemsize
        if end > len(data) or end - begin != length:
            raise _refusal(
                path,
                f"tensor {name!r} needs {length} bytes, and the file gives it bytes {begin} to "
                f"{end} of {len(data)}",
            )
        tensors[name] = np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)
        covered += length
    if covered != len(data):
        raise _refusal(path, f"the tensors take {covered} bytes, and the file holds {len(data)}")
    return MappingProxyType(tensors)


def _header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content)
    # RecursionError: a header of nested brackets.
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "the header is not JSON") from error
    if not isinstance(header, dict):
        raise _refusal(path, "the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of a header entry, checked for form."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise _refusal(path, f"tensor {name!r} is neither float16 nor float32")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _refusal(path, f"tensor {name!r} has no valid shape and data_offsets")
    return dtype, shape, offsets[0], offsets[1]


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return a list of numbers that are not negative as a tuple; None for anything else."""
    # type() and not isinstance(): JSON's true is no size.
    if isinstance(values, list) and all(type(v) is int and v >= 0 for v in values):
        return tuple(values)
    return None


def _refusal(path: Path, what: str) -> ModelFileError:
    return ModelFileError(what, where=str(path), fix="get the file again from where it came")
