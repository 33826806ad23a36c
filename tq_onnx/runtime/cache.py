"""Key/value caches: their types from the session, their buffers, their bytes.

A ``CacheSpec`` says what one cache holds per token and head: ``row`` elements of one type, which is
``W`` uint8 bytes in a converted model and ``D`` floats in an original. Buffers are ``OrtValue``
``[B, N, S, row]`` on the CPU or on a device, so that one buffer can be bound as past and as
present. Some originals have them flat, ``[B, S, N * row]``.

Caches in bfloat16 are refused: ONNX Runtime's CPU provider has no kernels for such a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.codec.window import NO_WINDOW, Window, retag
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import CachePair

UINT8: Final = "uint8"

# numpy types by the type strings of ONNX Runtime.
_TYPES: Final[dict[str, str]] = {
    "tensor(uint8)": UINT8,
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
}
_RANK: Final = 4
_FLAT_RANK: Final = 3


@dataclass(frozen=True)
class CacheSpec:
    """One cache of a decoder.

    Attributes:
        pair: names of the graph input and output.
        type_name: ``uint8``, ``float32`` or ``float16``.
        kv_num_heads: N.
        row: elements per token and head.
        flat: whether heads lie side by side, ``[B, S, N * row]``.
        slots: tokens that the graph gives it room for; None if callers choose.
        window: its exact window, whose rows lie in front of those of the tokens.
        head_size: D; looked at with a window only.
    """

    pair: CachePair
    type_name: str
    kv_num_heads: int
    row: int
    flat: bool = False
    slots: int | None = None
    window: Window = NO_WINDOW
    head_size: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, all heads, metadata included."""
        return self.kv_num_heads * self.row * np.dtype(self.type_name).itemsize

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of a buffer for so many tokens, those of its window in addition."""
        if self.flat:
            return batch, tokens, self.kv_num_heads * self.row
        return batch, self.kv_num_heads, self.window.overlay_rows + tokens, self.row

    def allocate(self, batch: int, tokens: int, device: str = "cpu") -> onnxruntime.OrtValue:
        """Return a zeroed buffer for so many tokens in the memory of a device.

        Its shape is ``[batch, N, tokens, row]``, with the rows of the window in addition.
        """
        return self._buffer(np.zeros(self.shape(batch, tokens), self.type_name), device)

    def resized(self, value: onnxruntime.OrtValue, tokens: int) -> onnxruntime.OrtValue:
        """Copy a buffer to one of ``tokens`` tokens, no fewer than before; new rows are zero."""
        old = as_array(value)
        axis = 1 if self.flat else 2
        room = np.zeros(self.shape(old.shape[0], tokens), self.type_name)
        if self.flat:
            room[:, : old.shape[axis]] = old
        else:
            room[:, :, : old.shape[axis]] = old
        return self._buffer(room, value.device_name())

    def shortened(self, value: onnxruntime.OrtValue, tokens: int) -> onnxruntime.OrtValue:
        """Copy the rows of the first tokens, and those of the window, to a buffer of their own."""
        old = as_array(value)
        rows = old[:, :tokens] if self.flat else old[:, :, : self.window.overlay_rows + tokens]
        return self._buffer(np.ascontiguousarray(rows), value.device_name())

    def restored(
        self, plane: npt.NDArray[Any], tokens: int, device: str = "cpu"
    ) -> onnxruntime.OrtValue:
        """Return a buffer that begins with rows ``[B, N, used, row]``, those of the window first.

        It has room for ``tokens``, or as many as the rows are of.
        """
        used = plane.shape[2]
        tokens = max(tokens, used - self.window.overlay_rows)
        room = np.zeros(self.shape(plane.shape[0], tokens), self.type_name)
        if self.flat:
            room[:, :used] = plane.transpose(0, 2, 1, 3).reshape(plane.shape[0], used, -1)
        else:
            room[:, :, :used] = plane
        return self._buffer(room, device)

    def repeated(self, value: onnxruntime.OrtValue, held: int, tokens: int) -> onnxruntime.OrtValue:
        """Copy a buffer, with its first ``held`` rows repeated until there are ``tokens``."""
        old = as_array(value)
        axis = 1 if self.flat else 2
        first = self.window.overlay_rows
        room = np.zeros(self.shape(old.shape[0], max(tokens, self.room(value))), self.type_name)
        rows = np.take(old, first + np.arange(tokens) % held, axis=axis)
        if self.flat:
            room[:, :tokens] = rows
        else:
            room[:, :, :first] = old[:, :, :first]
            room[:, :, first : first + tokens] = rows
            retag(room, self.head_size, self.window, tokens)
        return self._buffer(room, value.device_name())

    def room(self, value: onnxruntime.OrtValue) -> int:
        """Return the tokens that a buffer has room for."""
        return int(value.shape()[1 if self.flat else 2]) - self.window.overlay_rows

    def view(self, value: onnxruntime.OrtValue) -> npt.NDArray[Any]:
        """Return a buffer as ``[B, N, S, row]``; without a copy if it is on the CPU."""
        array = as_array(value)
        if not self.flat:
            return array
        heads = array.reshape(*array.shape[:2], self.kv_num_heads, self.row)
        return np.transpose(heads, (0, 2, 1, 3))

    @staticmethod
    def _buffer(array: npt.NDArray[Any], device: str) -> onnxruntime.OrtValue:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)


def cache_spec(
    session: onnxruntime.InferenceSession,
    pair: CachePair,
    *,
    kv_num_heads: int,
    head_size: int,
    window: Window = NO_WINDOW,
) -> CacheSpec:
    """Read a cache's type from the session.

    Args:
        session: the model.
        pair: names of the cache's input and output.
        kv_num_heads: N, used where the graph does not state it.
        head_size: D, used where the graph does not state its last dimension (the
            onnxruntime-genai model builder leaves it symbolic).
        window: the cache's exact window.

    Raises:
        UnsupportedModelError: the cache is missing, or not a tensor of a type caches have.
    """
    inputs = {entry.name: entry for entry in session.get_inputs()}
    outputs = {entry.name: entry for entry in session.get_outputs()}
    where = pair.past or pair.present
    if pair.present not in outputs or (pair.past is not None and pair.past not in inputs):
        missing = pair.present if pair.present not in outputs else where
        raise UnsupportedModelError("the model has no such cache", where=missing)
    entry = outputs[pair.present] if pair.past is None else inputs[pair.past]
    shape = entry.shape
    flat = len(shape) == _FLAT_RANK
    if entry.type not in _TYPES or len(shape) not in (_RANK, _FLAT_RANK):
        raise UnsupportedModelError(
            f"a cache of type {entry.type} and shape {list(shape)} is not supported", where=where
        )
    type_name = _TYPES[entry.type]
    row = head_size if flat else shape[3]
    if not isinstance(row, int):
        if type_name == UINT8:
            raise UnsupportedModelError(
                "the last dimension of a uint8 cache is not a number", where=where
            )
        row = head_size
    heads = kv_num_heads if flat or not isinstance(shape[1], int) else shape[1]
    tokens = shape[1 if flat else 2]
    slots = tokens - window.overlay_rows if isinstance(tokens, int) else None
    return CacheSpec(pair, type_name, heads, row, flat, slots, window, head_size)


def bytes_per_token(specs: Iterable[CacheSpec]) -> int:
    """Return the bytes that one more token of one sequence costs in all caches together."""
    return sum(spec.bytes_per_token for spec in specs)


def as_array(value: onnxruntime.OrtValue) -> npt.NDArray[Any]:
    """Return a view of a buffer, valid as long as the buffer; a copy if it is on a device."""
    return np.asarray(value.numpy())
