"""Key/value caches: their types from the session, their buffers, their bytes.

A ``CacheSpec`` says what one cache holds per token and head: ``row`` elements of one type, which is
``W`` uint8 bytes in a converted model and ``D`` floats in an original; in a model with ONNX
Runtime's own caches ``D`` int8 codes, or two of 4 bits in a byte. Buffers are ``OrtValue``
``[B, N, S, row]`` on the CPU or on a device, so that one buffer can be bound as past and as
present. Some originals have them flat, ``[B, S, N * row]``; others have pages, ``[P, S, N, row]``,
whose bytes are ``[P, N, S, row]``.

Caches in bfloat16 are refused: ONNX Runtime's CPU provider has no kernels for such a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.codec import pagewindow
from tq_onnx.codec.pagewindow import PageWindow
from tq_onnx.codec.planes import planes_of_rows, rows_of_planes
from tq_onnx.codec.window import NO_WINDOW, Window, has_damaged_entries, retag
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
    """One cache of a decoder."""

    pair: CachePair  #: names of the graph input and output
    type_name: str  #: ``uint8``, ``float32`` or ``float16``
    kv_num_heads: int  #: N
    row: int  #: elements per token and head
    flat: bool = False  #: whether heads lie side by side, ``[B, S, N * row]``
    slots: int | None = None  #: tokens that the graph gives it room for; None if callers choose
    window: Window = NO_WINDOW  #: its exact window, whose rows lie in front of those of the tokens
    head_size: int = 0  #: D; looked at with a window only
    block_size: int = 0  #: tokens of a page; 0 for a cache without pages
    #: rows behind those of the tokens that buffers have for exact tokens, or, in an original's
    #: ring, so that its window has room in any case
    spare_rows: int = 0
    pages: PageWindow | None = None  #: where exact tokens lie in pages; None without

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, all heads, metadata included."""
        return self.kv_num_heads * self.row * np.dtype(self.type_name).itemsize

    def rows(self, tokens: int) -> int:
        """Return the rows of a sequence of so many tokens, those of exact tokens included."""
        return self.window.overlay_rows + tokens + self.spare_rows

    def used_rows(self, tokens: int) -> int:
        """Return the rows that ``used`` gives of a sequence of so many tokens."""
        if self.pages is not None:  # whole pages: entries lie at their ends
            tokens = self._whole_pages(tokens)
        return self.rows(tokens)

    def has_damaged_entries(self, plane: npt.NDArray[Any], tokens: int) -> bool:
        """Return True if exact tokens in rows that ``used`` gives are not finite, or misplaced."""
        if self.pages is not None:
            return pagewindow.has_damaged_entries(plane, self.pages, tokens)
        return has_damaged_entries(plane, self.head_size, self.window, tokens)

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of a buffer for so many tokens and its exact tokens."""
        heads, row = self.kv_num_heads, self.row
        if self.block_size:
            return batch * pages_of(tokens, self.block_size), self.block_size, heads, row
        if self.flat:
            return batch, tokens, heads * row
        return batch, heads, self.rows(tokens), row

    def allocate(self, batch: int, tokens: int, device: str = "cpu") -> onnxruntime.OrtValue:
        """Return a zeroed buffer for so many tokens in the memory of a device.

        Its shape is ``[batch, N, tokens, row]``, with the rows of exact tokens in addition.
        """
        zeros = np.zeros(self.shape(batch, tokens), self.type_name)
        return onnxruntime.OrtValue.ortvalue_from_numpy(zeros, device, 0)

    def resized(self, value: onnxruntime.OrtValue, batch: int, tokens: int) -> onnxruntime.OrtValue:
        """Copy a buffer to one of ``tokens`` tokens, no fewer than before; new rows are zero."""
        return self.restored(self.view(value, batch), tokens, value.device_name())

    def shortened(
        self, value: onnxruntime.OrtValue, batch: int, tokens: int
    ) -> onnxruntime.OrtValue:
        """Copy the rows of the first tokens, and of exact ones, to a buffer of their own."""
        return self._buffer(self.used(value, batch, tokens), value.device_name())

    def restored(
        self, plane: npt.NDArray[Any], tokens: int, device: str = "cpu"
    ) -> onnxruntime.OrtValue:
        """Return a buffer with rows ``[B, N, used, row]`` of another one, as ``used`` gives them.

        It has room for ``tokens``, or as many as the rows are of.
        """
        end = plane.shape[2] - self.spare_rows
        room = self._rows(plane.shape[0], max(tokens, end - self.window.overlay_rows))
        room[:, :, :end] = plane[:, :, :end]
        room[:, :, room.shape[2] - self.spare_rows :] = plane[:, :, end:]
        return self._buffer(room, device)

    def repeated(
        self, value: onnxruntime.OrtValue, batch: int, held: int, tokens: int
    ) -> onnxruntime.OrtValue:
        """Copy a buffer, with its first ``held`` rows repeated until there are ``tokens``."""
        old, first = self.view(value, batch), self.window.overlay_rows
        if self.pages is not None:  # whole pages, with their entries
            held = self._whole_pages(held)
            tokens = self._whole_pages(tokens)
        room = self._rows(batch, max(tokens, self.room(value, batch)))
        room[:, :, :first] = old[:, :, :first]
        room[:, :, first : first + tokens] = old[:, :, first + np.arange(tokens) % held]
        room[:, :, room.shape[2] - self.spare_rows :] = old[:, :, old.shape[2] - self.spare_rows :]
        if self.pages is None:
            retag(room, self.head_size, self.window, tokens)
        return self._buffer(room, value.device_name())

    def room(self, value: onnxruntime.OrtValue, batch: int) -> int:
        """Return the tokens that a buffer of so many sequences has room for."""
        shape = value.shape()
        if self.block_size:
            return int(shape[0]) // batch * self.block_size
        return int(shape[1 if self.flat else 2]) - self.window.overlay_rows - self.spare_rows

    def view(self, value: onnxruntime.OrtValue, batch: int) -> npt.NDArray[Any]:
        """Return a buffer as ``[B, N, S, row]``; without a copy if it is on the CPU, and
        neither in pages nor in planes.

        Page ``c`` of sequence ``b`` is number ``c * B + b``, as ``block_table`` says.
        """
        array, heads, row = as_array(value), self.kv_num_heads, self.row
        if self.block_size:
            pages = array.reshape(-1, batch, heads, self.block_size, row)
            return np.transpose(pages, (1, 2, 0, 3, 4)).reshape(batch, heads, -1, row)
        if self.flat:
            return np.transpose(array.reshape(*array.shape[:2], heads, row), (0, 2, 1, 3))
        return rows_of_planes(array, self.window.field_bytes, self.window.overlay_rows)

    def used(
        self, value: onnxruntime.OrtValue, batch: int, tokens: int, start: int = 0
    ) -> npt.NDArray[Any]:
        """Return rows ``[B, N, used, row]`` of a buffer: the first tokens', and exact tokens'.

        Those of tokens before ``start`` are left out; in pages that is the first of a page.
        """
        rows, first = self.view(value, batch), self.window.overlay_rows
        end = self.used_rows(tokens) - self.spare_rows
        if not self.spare_rows and not start:
            return rows[:, :, :end]
        parts = (
            rows[:, :, :first],
            rows[:, :, first + start : end],
            rows[:, :, rows.shape[2] - self.spare_rows :],
        )
        return np.concatenate(parts, axis=2)

    def joined(self, planes: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Join rows ``[B, N, used, row]`` of tokens that follow each other, as ``used`` gives them.

        Exact tokens are those of the last part.
        """
        first, last = self.window.overlay_rows, planes[-1]
        tokens = [plane[:, :, first : plane.shape[2] - self.spare_rows] for plane in planes]
        spare = last[:, :, last.shape[2] - self.spare_rows :]
        return np.concatenate([last[:, :, :first], *tokens, spare], axis=2)

    def of_tokens(self, plane: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of tokens among those that ``used`` gives; of pages all their rows."""
        if self.pages is not None:
            slots, stride = self.block_size, self.pages.row_stride
            by_page = plane.reshape(*plane.shape[:2], -1, slots * self.row)
            rows = by_page[..., : slots * stride]
            return rows.reshape(*plane.shape[:3], stride)
        return plane[:, :, self.window.overlay_rows : plane.shape[2] - self.spare_rows]

    def _whole_pages(self, tokens: int) -> int:
        """Return the rows of the pages that so many tokens take."""
        return pages_of(tokens, self.block_size) * self.block_size

    def _rows(self, batch: int, tokens: int) -> npt.NDArray[Any]:
        """Return zeroed rows ``[B, N, S, row]`` for so many tokens, or for whole pages."""
        if self.block_size:
            tokens = self._whole_pages(tokens)
        return np.zeros((batch, self.kv_num_heads, self.rows(tokens), self.row), self.type_name)

    def _buffer(self, rows: npt.NDArray[Any], device: str) -> onnxruntime.OrtValue:
        """Return a buffer of rows ``[B, N, S, row]``."""
        batch, heads, slots, row = rows.shape
        if self.block_size:
            pages = rows.reshape(batch, heads, -1, self.block_size, row)
            rows = np.transpose(pages, (2, 0, 1, 3, 4)).reshape(-1, self.block_size, heads, row)
        elif self.flat:
            rows = np.transpose(rows, (0, 2, 1, 3)).reshape(batch, slots, heads * row)
        else:
            rows = planes_of_rows(rows, self.window.field_bytes, self.window.overlay_rows)
        array = np.ascontiguousarray(rows)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)


def pages_of(tokens: int, block_size: int) -> int:
    """Return the pages that so many tokens of a sequence take."""
    return -(-tokens // block_size)


def block_table(batch: int, pages: int) -> npt.NDArray[np.int32]:
    """Return the pages of each sequence, ``[B, C]``, in the order of its tokens.

    They are numbered so that those of longer sequences come behind those that there are.
    """
    numbers = np.arange(batch * pages, dtype=np.int32).reshape(pages, batch)
    return np.ascontiguousarray(numbers.T)


def cache_spec(
    session: onnxruntime.InferenceSession,
    pair: CachePair,
    *,
    kv_num_heads: int,
    head_size: int,
    window: Window = NO_WINDOW,
    block_size: int = 0,
    spare_rows: int = 0,
    pages: PageWindow | None = None,
) -> CacheSpec:
    """Read a cache's type from the session.

    Args:
        head_size: D, used where the graph does not state its last dimension (the
            onnxruntime-genai model builder leaves it symbolic).
        block_size: tokens of a page; 0 for a cache without pages.
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
    if block_size:
        return CacheSpec(
            pair,
            type_name,
            kv_num_heads,
            row,
            head_size=head_size,
            block_size=block_size,
            pages=pages,
        )
    heads = kv_num_heads if flat or not isinstance(shape[1], int) else shape[1]
    tokens = shape[1 if flat else 2]
    slots = tokens - window.overlay_rows if isinstance(tokens, int) else None
    return CacheSpec(
        pair, type_name, heads, row, flat, slots, window, head_size, spare_rows=spare_rows
    )


def bytes_per_token(specs: Iterable[CacheSpec]) -> int:
    """Return the bytes that one more token of one sequence costs in all caches together."""
    return sum(spec.bytes_per_token for spec in specs)


def as_array(value: onnxruntime.OrtValue) -> npt.NDArray[Any]:
    """Return a view of a buffer, valid as long as the buffer; a copy if it is on a device."""
    return np.asarray(value.numpy())
