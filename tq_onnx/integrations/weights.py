"""Read the weights of the bundled model: a safetensors file of float16 and float32 tensors.

The safetensors package checks the header against the file; this module adds the dtypes that are
understood, and one sentence for whatever is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from tq_onnx.errors import ModelFileError

FloatArray = npt.NDArray[np.float16] | npt.NDArray[np.float32]

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
)
_LONGEST_REASON: Final = 200


def read_safetensors(path: Path) -> Mapping[str, FloatArray]:
    """Read all tensors of a safetensors file.

    Args:
        path: the file; only float16 and float32 tensors are understood.

    Returns:
        Read-only arrays by name, in alphabetical order, each of the dtype it is stored in.
    """
    try:
        entries: list[tuple[str, Any]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except OSError as error:
        raise _refusal(path, f"the weights cannot be read ({error.strerror})") from error
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise _refusal(path, f"the file is no sound safetensors file ({reason})") from error
    tensors: dict[str, FloatArray] = {}
    for name, entry in sorted(entries, key=lambda pair: pair[0]):
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise _refusal(path, f"tensor {name[:40]!r} is neither float16 nor float32")
        tensors[name] = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
    return MappingProxyType(tensors)


def _refusal(path: Path, what: str) -> ModelFileError:
    return ModelFileError(what, where=str(path), fix="get the file again from where it came")
