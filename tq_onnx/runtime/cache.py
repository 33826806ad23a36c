"""Key/value caches: their types from the session, their buffers, their bytes.

A ``CacheSpec`` says what one cache holds per token and head: ``row`` elements of one type, which is
``W`` uint8 bytes in a converted model and ``D`` floats in an original. Buffers are ``OrtValue``
``[B, N, S, row]`` on the CPU, so that one buffer can be bound as past and as present.

Caches in bfloat16 are refused: ONNX Runtime's CPU provider has no kernels for such a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.plan import CachePair

UINT8: Final = "uint8"

# numpy types by the type strings of ONNX Runtime.
_TYPES: Final[dict[str, str]] = {
    "tensor(uint8)": UINT8,
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
}
_RANK: Final = 4


@dataclass(frozen=True)
class CacheSpec:
    """One cache of a decoder.

    Attributes:
        pair: names of the graph input and output.
        type_name: ``uint8``, ``float32`` or ``float16``.
        kv_num_heads: N.
        row: elements per token and head.
    """

    pair: CachePair
    type_name: str
    kv_num_heads: int
    row: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, all heads, metadata included."""
        return self.kv_num_heads * self.row * np.dtype(self.type_name).itemsize

    def allocate(self, batch: int, tokens: int) -> onnxruntime.OrtValue:
        """A zeroed buffer ``[batch, N, tokens, row]``."""
        shape = [batch, self.kv_num_heads, tokens, self.row]
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, self.type_name))


def cache_spec(
    session: onnxruntime.InferenceSession, pair: CachePair, *, kv_num_heads: int, head_size: int
) -> CacheSpec:
    """Reads a cache's type from the session.

    Args:
        session: the model.
        pair: names of the cache's input and output.
        kv_num_heads: N, used where the graph's input does not state it.
        head_size: D, used where the graph's input does not state its last dimension (the
            onnxruntime-genai model builder leaves it symbolic).

    Raises:
        UnsupportedModelError: the input is missing, or not a rank-4 tensor of a type caches have.
    """
    inputs = {entry.name: entry for entry in session.get_inputs()}
    outputs = {entry.name for entry in session.get_outputs()}
    if pair.past not in inputs or pair.present not in outputs:
        missing = pair.past if pair.past not in inputs else pair.present
        raise UnsupportedModelError("the model has no such cache", where=missing)
    entry = inputs[pair.past]
    if entry.type not in _TYPES or len(entry.shape) != _RANK:
        raise UnsupportedModelError(
            f"a cache of type {entry.type} and shape {list(entry.shape)} is not supported",
            where=pair.past,
        )
    type_name = _TYPES[entry.type]
    row = entry.shape[3]
    if not isinstance(row, int):
        if type_name == UINT8:
            raise UnsupportedModelError(
                "the last dimension of a uint8 cache is not a number", where=pair.past
            )
        row = head_size
    heads = entry.shape[1] if isinstance(entry.shape[1], int) else kv_num_heads
    return CacheSpec(pair, type_name, heads, row)


def bytes_per_token(specs: Iterable[CacheSpec]) -> int:
    """Bytes that one more token of one sequence costs in all caches together."""
    return sum(spec.bytes_per_token for spec in specs)


def as_array(value: onnxruntime.OrtValue) -> npt.NDArray[Any]:
    """A numpy view of a cache buffer, without a copy; valid as long as the buffer is kept."""
    return np.asarray(value.numpy())
