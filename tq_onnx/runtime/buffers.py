"""The cache buffers of a decoder: what a call reads, what it writes, and what becomes of both.

Caches that grow have two buffers that take turns, larger than needed, so that memory is two copies
of the caches. ONNX Runtime's own allocations, a little larger in each step, leave gaps of several
times that between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.runtime.cache import CacheSpec
from tq_onnx.runtime.signature import Signature

_SPARE_TOKENS: Final = 256
_SPARE_SHARE: Final = 8
"""A buffer of a growing cache has room for 256 tokens and an eighth more than are needed."""


class CacheBuffers:
    """One buffer for each cache of a graph; two where a call may not write what it reads.

    Args:
        specs: the caches.
        rows: sequences of a call.
        tokens: that the buffers have room for at first.
        device: where they are.
        swapping: whether past and present are two buffers of one size that change places.
        growing: whether a call gives out as many rows as it was given and as it adds.

    Attributes:
        past: the buffers that the next call reads.
        grows: as the argument; where it is False, ONNX Runtime allocates what it gives out.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        rows: int,
        tokens: int,
        device: str,
        *,
        swapping: bool,
        growing: bool,
    ) -> None:
        """Allocate buffers; see the class for arguments."""
        self._specs = specs
        self._tokens = tokens
        self._device = device
        self.past = [spec.allocate(rows, tokens, device) for spec in specs]
        self._spare = [spec.allocate(rows, tokens, device) for spec in specs] if swapping else []
        self._rows = rows
        self.grows = growing
        self._held, self._free = ([Pool() for _ in specs] for _ in range(2))
        self._targets = self.past

    @property
    def slots(self) -> int:
        """Tokens that the buffers have room for."""
        specs = zip(self._specs, self.past, strict=True)
        return max((spec.room(value) for spec, value in specs), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that the next call reads."""
        return sum(int(value.tensor_size_in_bytes()) for value in self.past)

    def plane(self, index: int, tokens: int) -> npt.NDArray[Any]:
        """Copy the rows of the first tokens of one cache, with those of its window in front."""
        spec = self._specs[index]
        used = spec.window.overlay_rows + tokens
        return np.array(spec.view(self.past[index])[:, :, :used], order="C")

    def shorten(self, tokens: int) -> None:
        """Keep the first tokens only."""
        pairs = zip(self._specs, self.past, strict=True)
        self.past = [spec.shortened(value, tokens) for spec, value in pairs]

    def make_room(self, tokens: int) -> None:
        """Enlarge buffers that a graph does not grow."""
        pairs = zip(self._specs, self.past, strict=True)
        self.past = [spec.resized(value, tokens) for spec, value in pairs]

    def restore(self, planes: Sequence[npt.NDArray[Any]]) -> None:
        """Take copies of rows, as ``plane`` gives them."""
        self.past = [
            spec.restored(plane, self._tokens, self._device)
            for spec, plane in zip(self._specs, planes, strict=True)
        ]

    def repeat(self, held: int, tokens: int) -> None:
        """Repeat the rows of the first ``held`` tokens until there are ``tokens``."""
        # One after the other: there are never two of all.
        for index, spec in enumerate(self._specs):
            self.past[index] = spec.repeated(self.past[index], held, tokens)

    def bind(self, binding: Any, signature: Signature, *, in_place: bool, tokens: int) -> None:
        """Bind the caches of a call.

        Args:
            binding: an ``onnxruntime.IOBinding``; caches are its last outputs.
            signature: of the graph that is called, which has the same caches.
            in_place: whether the call writes into buffers of one size.
            tokens: in the caches after the call.
        """
        targets = self._spare or self.past
        if not in_place and self.grows:
            pairs = zip(self._specs, self._free, strict=True)
            targets = [pool.buffer(spec, self._rows, tokens) for spec, pool in pairs]
            in_place = True
        self._targets = targets
        for index, spec in enumerate(signature.caches):
            if spec.pair.past is not None:
                binding.bind_ortvalue_input(spec.pair.past, self.past[index])
            if in_place:
                binding.bind_ortvalue_output(spec.pair.present, targets[index])
            else:
                binding.bind_output(spec.pair.present, "cpu")

    def advance(self, made: Sequence[onnxruntime.OrtValue], *, in_place: bool) -> None:
        """Take what a call has made for what the next one reads.

        Args:
            made: the outputs of the call.
            in_place: as in ``bind``.
        """
        if in_place:
            if self._spare:
                self.past, self._spare = self._spare, self.past
        elif self.grows:
            # Not before: a call that failed has to leave the past where nothing writes.
            self.past = self._targets
            self._held, self._free = self._free, self._held
        else:
            self.past = list(made)


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
            room = tokens + tokens // _SPARE_SHARE + _SPARE_TOKENS
            self._memory = np.zeros(prod(spec.shape(rows, room)), spec.type_name)
        array = self._memory[: prod(shape)].reshape(shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu", 0)
