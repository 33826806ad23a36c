"""Where a lane takes its choices from: a number, or the bytes of a fuzzer."""

from __future__ import annotations

import random


class Bytes(random.Random):
    """Choices that a string of bytes makes, in order; after its end, all of them are the first."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int) -> int:
        size = -(-k // 8)
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken.ljust(size, b"\0"), "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)
