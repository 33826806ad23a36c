"""The cache buffers of a decoder: what a call reads, what it writes, and what becomes of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.runtime.cache import CacheSpec
from tq_onnx.runtime.signature import Signature


class CacheBuffers:
    """One buffer for each cache of a graph; two where a call may not write what it reads.

    Args:
        specs: the caches.
        rows: sequences of a call.
        tokens: that the buffers have room for at first.
        device: where they are.
        swapping: whether past and present are two buffers of one size that change places.

    Attributes:
        past: the buffers that the next call reads.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], rows: int, tokens: int, device: str, *, swapping: bool
    ) -> None:
        """Allocate buffers; see the class for arguments."""
        self._specs = specs
        self._tokens = tokens
        self._device = device
        self.past = [spec.allocate(rows, tokens, device) for spec in specs]
        self._spare = [spec.allocate(rows, tokens, device) for spec in specs] if swapping else []

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
        pairs = zip(self._specs, self.past, strict=True)
        self.past = [spec.repeated(value, held, tokens) for spec, value in pairs]

    def bind(self, binding: Any, signature: Signature, *, in_place: bool) -> None:
        """Bind the caches of a call.

        Args:
            binding: an ``onnxruntime.IOBinding``; caches are its last outputs.
            signature: of the graph that is called, which has the same caches.
            in_place: whether the call writes into buffers of ours.
        """
        targets = self._spare or self.past
        for index, spec in enumerate(signature.caches):
            if spec.pair.past is not None:
                binding.bind_ortvalue_input(spec.pair.past, self.past[index])
            if in_place:
                binding.bind_ortvalue_output(spec.pair.present, targets[index])
            else:
                binding.bind_output(spec.pair.present, "cpu")

    def advance(self, made: Sequence[onnxruntime.OrtValue], *, in_place: bool) -> None:
        """Take what a call has made for what the next one reads."""
        if not in_place:
            self.past = list(made)
        elif self._spare:
            self.past, self._spare = self._spare, self.past
