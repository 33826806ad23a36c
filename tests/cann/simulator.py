"""A library with the simulator of the shim in it, called by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Site = tuple[str, int, str]
"""A synchronisation statement of the kernels: file, line, kind."""


class Simulator:
    """A library with the simulator in it: what it saw, and which memory is the device's."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.tq_sim_hazards.restype = ctypes.c_uint64
        self._library.tq_sim_vector_instructions.restype = ctypes.c_uint64
        self._library.tq_sim_message.restype = ctypes.c_size_t
        self._library.tq_sim_site.restype = ctypes.c_size_t
        self.arch = int(self._library.tq_sim_arch())

    def call(self, name: str, *arguments: Any) -> int:
        """A function that returns an int."""
        return int(self._library[name](*arguments))

    def has(self, name: str) -> bool:
        """Whether there is a function of this name."""
        return hasattr(self._library, name)

    @property
    def hazards(self) -> int:
        """How many hazards there were since the last reset."""
        return int(self._library.tq_sim_hazards())

    @property
    def ub_bytes(self) -> int:
        """The most bytes of the unified buffer that a kernel allocated so far."""
        return int(self._library.tq_sim_ub_bytes())

    @property
    def vector_instructions(self) -> int:
        """How many there were since the last reset, by all cores."""
        return int(self._library.tq_sim_vector_instructions())

    @property
    def cores_used(self) -> int:
        """The most cores that wrote global memory in one launch since the last reset."""
        return int(self._library.tq_sim_cores_used())

    def messages(self) -> list[str]:
        """The first hazards since the last reset, in words."""
        return list(_texts(self._library.tq_sim_message))

    def reset(self) -> None:
        """Forgets the hazards."""
        self._library.tq_sim_reset()

    def sites(self) -> dict[Site, int]:
        """How often synchronisation statements ran so far."""
        found = {}
        for text in _texts(self._library.tq_sim_site):
            place, count = text.rsplit(" ", 1)
            file, line, kind = place.split(":")
            found[file, int(line), kind] = int(count)
        return found

    @contextlib.contextmanager
    def without(self, sites: Sequence[Site]) -> Iterator[None]:
        """As if these statements had been deleted from the kernels."""
        for file, line, kind in sites:
            self._library.tq_sim_skip(file.encode(), line, kind.encode(), 1)
        try:
            yield
        finally:
            for file, line, kind in sites:
                self._library.tq_sim_skip(file.encode(), line, kind.encode(), 0)

    @contextlib.contextmanager
    def device_memory(self, blocks: Sequence[np.ndarray]) -> Iterator[list[ctypes.c_void_p]]:
        """The addresses of arrays that are device memory meanwhile."""
        addresses = [ctypes.c_void_p(block.ctypes.data) for block in blocks]
        for block, address in zip(blocks, addresses, strict=True):
            self._library.tq_sim_register(address, ctypes.c_size_t(block.nbytes))
        try:
            yield addresses
        finally:
            for address in addresses:
                self._library.tq_sim_unregister(address)


def _texts(function: Callable[..., int]) -> Iterator[str]:
    text = ctypes.create_string_buffer(500)
    index = 0
    while function(ctypes.c_size_t(index), text, ctypes.c_size_t(len(text))):
        yield text.value.decode()
        index += 1
