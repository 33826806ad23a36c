"""Tensors whose bytes come in pieces, so that a weight is never in memory as a whole.

``tq_onnx.files.oversize`` writes the pieces one after the other. Whatever else reads such a tensor
gets all of it, as of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]

PIECE_BYTES: Final = 16 << 20


class StreamedTensor(ir.LazyTensor):
    """A tensor that is made piece by piece, each time that it is read.

    Args:
        pieces: yields arrays that are its elements in order, when they are flattened.
        dtype: element type.
        shape: its sizes.
        name: of the initializer.
        sources: files that are read for it.
    """

    def __init__(
        self,
        pieces: Callable[[], Iterator[Array]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
        *,
        name: str,
        sources: tuple[Path, ...] = (),
    ) -> None:
        super().__init__(self._whole, dtype, ir.Shape(shape), name=name)
        self._pieces = pieces
        self.sources = sources

    def arrays(self) -> Iterator[Array]:
        """Yield the elements in order, in arrays of a few megabytes."""
        return self._pieces()

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the elements in order."""
        for array in self.arrays():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            yield np.ascontiguousarray(little).tobytes()

    def _whole(self) -> ir.TensorProtocol:
        shape = self.shape.numpy()
        elements = np.empty(int(np.prod(shape)), self.dtype.numpy())
        end = 0
        for array in self.arrays():
            start, end = end, end + array.size
            elements[start:end] = array.reshape(-1)
        return ir.tensor(elements.reshape(shape), name=self.name)


def read_whole(tensor: ir.TensorProtocol) -> Array:
    """Return the elements of a tensor; those of a file in memory that can be given back.

    A mapped file would stay in memory as long as the tensor does.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    shape = tensor.shape.numpy()
    dtype = tensor.dtype.numpy()
    count = int(np.prod(shape))
    read = np.fromfile(tensor.path, dtype.newbyteorder("<"), count, offset=tensor.offset or 0)
    return read.reshape(shape)


def sources_of(*tensors: ir.TensorProtocol | None) -> tuple[Path, ...]:
    """Return the files that tensors are read from."""
    paths = [Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    return tuple(dict.fromkeys(paths))


def streamed(tensor: ir.ExternalTensor, name: str) -> StreamedTensor:
    """Return a tensor of a file as one that is read piece by piece."""
    dtype = tensor.dtype.numpy().newbyteorder("<")
    most = max(1, PIECE_BYTES // dtype.itemsize)

    def pieces() -> Iterator[Array]:
        remaining, offset = tensor.size, tensor.offset or 0
        while remaining:
            count = min(remaining, most)
            yield np.fromfile(tensor.path, dtype, count, offset=offset)
            remaining, offset = remaining - count, offset + count * dtype.itemsize

    shape = tuple(tensor.shape.numpy())
    return StreamedTensor(pieces, tensor.dtype, shape, name=name, sources=sources_of(tensor))
