"""A library with the simulator of the shim in it, called by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Site = tuple[str, int, str]
"""A synchronisation statement of the kernels: file, line, kind."""


@dataclass(frozen=True)
class VectorCount:
    """The vector instructions of one kind on a core.

    Attributes:
        name: of the instruction.
        from_bytes: of an element that is read.
        to_bytes: of an element that is written.
        instructions: how many there were.
        repeats: of up to 256 bytes of the widest operand, of all of them.
    """

    name: str
    from_bytes: int
    to_bytes: int
    instructions: int
    repeats: int


@dataclass(frozen=True)
class MovedCount:
    """What a queue moved: transfers, pieces that lie together in global memory, and bytes."""

    transfers: int
    pieces: int
    bytes: int


@dataclass(frozen=True)
class CoreCounts:
    """What a core was asked to do in one launch (``shim/counts.h``)."""

    vector: tuple[VectorCount, ...]
    moved_in: MovedCount
    moved_out: MovedCount
    barriers: int
    flags_waited: int
    scalar_reads: int
    scalar_writes: int
    scalar_loads: int

    @staticmethod
    def of(told: dict[str, Any]) -> CoreCounts:
        """From the JSON of the shim."""
        queues = {name: MovedCount(**told[name]) for name in ("moved_in", "moved_out")}
        vector = tuple(VectorCount(**one) for one in told["vector"])
        return CoreCounts(**{**told, **queues, "vector": vector})


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, and what each of its cores was asked to do."""

    kernel: str
    cores: tuple[CoreCounts, ...]


def text_of(call: Callable[[Any, ctypes.c_size_t], int]) -> str:
    """What a function writes that returns how long it is: it may grow from one call to the next."""
    size = 0
    while True:
        text = ctypes.create_string_buffer(size + 1)
        size, room = call(text, ctypes.c_size_t(len(text))), size
        if size <= room:
            return text.value.decode()


class Simulator:
    """A library with the simulator in it: what it saw, and which memory is the device's."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.tq_sim_hazards.restype = ctypes.c_uint64
        self._library.tq_sim_report.restype = ctypes.c_size_t
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
        return int(self._report()["ub_bytes"])

    @property
    def vector_instructions(self) -> int:
        """How many there were since the last reset, by all cores."""
        return int(self._report()["vector_instructions"])

    @property
    def cores_used(self) -> int:
        """The most cores that wrote global memory in one launch since the last reset."""
        return int(self._report()["cores_used"])

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[Launch]]:
        """Counts launches; the list has them behind the block, one after the other."""
        launches: list[Launch] = []
        self._library.tq_sim_count(1)
        try:
            yield launches
            for told in self._report()["launches"]:
                cores = tuple(CoreCounts.of(core) for core in told["cores"])
                launches.append(Launch(told["kernel"], cores))
        finally:
            self._library.tq_sim_count(0)

    def messages(self) -> list[str]:
        """The first hazards since the last reset, in words."""
        return list(self._report()["messages"])

    def reset(self) -> None:
        """Forgets the hazards."""
        self._library.tq_sim_reset()

    def sites(self) -> dict[Site, int]:
        """How often synchronisation statements ran so far."""
        sites = self._report()["sites"]
        return {(file, line, kind): count for file, line, kind, count in sites}

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
    def device_memory(self, blocks: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """The addresses of arrays that are device memory meanwhile."""
        addresses = [block.ctypes.data for block in blocks]
        for block, address in zip(blocks, addresses, strict=True):
            self._library.tq_sim_register(ctypes.c_void_p(address), ctypes.c_size_t(block.nbytes))
        try:
            yield addresses
        finally:
            for address in addresses:
                self._library.tq_sim_unregister(ctypes.c_void_p(address))

    def _report(self) -> dict[str, Any]:
        return dict(json.loads(text_of(self._library.tq_sim_report)))
