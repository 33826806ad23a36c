"""The cache buffers of a decoder: inputs and outputs of a call, and their exchange after it.

Caches that grow have two buffers that take turns, larger than needed, so that memory is two copies
of the caches. ONNX Runtime's own allocations, a little larger in each step, leave gaps of several
times that between them.

What a call, a rewind or a restoration changes is in new ``CacheBuffers``: an interrupt leaves the
old ones as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.errors import UsageError
from tq_onnx.runtime.cache import CacheSpec
from tq_onnx.runtime.signature import Signature

_SPARE_TOKENS: Final = 256
_SPARE_SHARE: Final = 8
"""A buffer of a growing cache has room for 256 tokens and an eighth more than are needed."""


def _with_room(tokens: int) -> int:
    return tokens + tokens // _SPARE_SHARE + _SPARE_TOKENS


class CacheBuffers:
    """One buffer for each cache of a graph; two where a call may not write what it reads.

    Args:
        rows: sequences of a call.
        tokens: that the buffers have room for at first.
        swapping: whether past and present are two buffers of one size that change places.

    Attributes:
        past: the buffers that the next call reads.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        rows: int,
        tokens: int,
        device: str,
        *,
        swapping: bool,
    ) -> None:
        """Allocate buffers; see the class for arguments and errors."""
        self._specs = specs
        self._tokens = tokens
        self._device = device
        count = 2 if swapping else 1
        try:
            buffers = [[s.allocate(rows, tokens, device) for s in specs] for _ in range(count)]
        except MemoryError as error:
            size = count * sum(prod(s.shape(rows, tokens)) for s in specs)
            raise UsageError(
                f"caches of {tokens} tokens have {size} numbers, and there is no memory for them",
                fix="give a smaller context",
            ) from error
        self.past, self._spare = buffers[0], buffers[1] if swapping else []
        self._rows = rows
        self._held, self._free = ([Pool() for _ in specs] for _ in range(2))
        self._targets = self.past

    @property
    def slots(self) -> int:
        """Tokens that the buffers have room for."""
        specs = zip(self._specs, self.past, strict=True)
        return max((spec.room(value, self._rows) for spec, value in specs), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that the next call reads."""
        return sum(int(value.tensor_size_in_bytes()) for value in self.past)

    def plane(self, index: int, tokens: int, start: int = 0) -> npt.NDArray[Any]:
        """Copy the rows of the first tokens of one cache, with those of exact tokens.

        Those of tokens before ``start`` are left out.
        """
        spec, value = self._specs[index], self.past[index]
        return np.array(spec.used(value, self._rows, tokens, start), order="C")

    def shortened(self, tokens: int) -> CacheBuffers:
        """Return buffers of the first tokens only."""
        pairs = zip(self._specs, self.past, strict=True)
        return self._with([spec.shortened(value, self._rows, tokens) for spec, value in pairs])

    def make_room(self, tokens: int) -> None:
        """Enlarge buffers that a graph does not grow, unless they have that room."""
        if tokens <= self.slots:
            return
        if any(spec.spare_rows for spec in self._specs):
            tokens = _with_room(tokens)
        pairs = zip(self._specs, self.past, strict=True)
        self.past = [spec.resized(value, self._rows, tokens) for spec, value in pairs]

    def restored(self, planes: Sequence[npt.NDArray[Any]]) -> CacheBuffers:
        """Return buffers with copies of rows, as ``plane`` gives them."""
        pairs = zip(self._specs, planes, strict=True)
        return self._with(
            [spec.restored(plane, self._tokens, self._device) for spec, plane in pairs]
        )

    def repeat(self, held: int, tokens: int) -> None:
        """Repeat the rows of the first ``held`` tokens until there are ``tokens``."""
        # One after the other: there are never two of all.
        for index, spec in enumerate(self._specs):
            self.past[index] = spec.repeated(self.past[index], self._rows, held, tokens)

    def bind(
        self, binding: Any, signature: Signature, *, in_place: bool, grows: bool, tokens: int
    ) -> None:
        """Bind the caches of a call.

        Args:
            grows: whether it gives out as many rows as it was given and as it adds; if neither,
                ONNX Runtime allocates what it gives out.
        """
        if self._spare and self._spare[0].shape() != self.past[0].shape():  # of more tokens by now
            self._spare = [s.allocate(self._rows, self.slots, self._device) for s in self._specs]
        targets = self._spare or self.past
        if grows:
            pairs = zip(self._specs, self._free, strict=True)
            targets = [pool.buffer(spec, self._rows, tokens) for spec, pool in pairs]
        self._targets = targets
        for index, spec in enumerate(signature.caches):
            if spec.pair.past is not None:
                binding.bind_ortvalue_input(spec.pair.past, self.past[index])
            if in_place or grows:
                binding.bind_ortvalue_output(spec.pair.present, targets[index])
            else:
                binding.bind_output(spec.pair.present, "cpu")

    def advanced(
        self, outputs: Sequence[onnxruntime.OrtValue], *, in_place: bool, grows: bool
    ) -> CacheBuffers:
        """Return the buffers that the next call reads."""
        if not in_place and not grows:
            return self._with(list(outputs))
        after = self._with(self._targets)
        if grows:
            after._held, after._free = self._free, self._held
        elif self._spare:
            after._spare = self.past
        return after

    def _with(self, past: list[onnxruntime.OrtValue]) -> CacheBuffers:
        after = copy.copy(self)
        after.past = past
        return after


class Pool:
    """Memory for the buffers of one cache, one after the other."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._memory: npt.NDArray[Any] | None = None

    def buffer(self, spec: CacheSpec, rows: int, tokens: int) -> onnxruntime.OrtValue:
        """Return a buffer for so many tokens; the one before is used no more."""
        shape = spec.shape(rows, tokens)
        if self._memory is None or self._memory.size < prod(shape):
            self._memory = None  # before there is more
            size = prod(spec.shape(rows, _with_room(tokens)))
            self._memory = np.zeros(size, spec.type_name)
        array = self._memory[: prod(shape)].reshape(shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu", 0)
