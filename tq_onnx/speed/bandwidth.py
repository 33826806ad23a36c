"""How fast this machine reads memory: no decode step is faster than reading its caches once."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_BYTES: Final = 256 << 20
"""More than caches of processors hold."""

_PIECE: Final = 4 << 20
_PASSES: Final = 3


def read_rate(threads: int | None = None) -> float:
    """Measure how fast memory is read, by numpy, in pieces that are in no cache of the processor.

    Returns:
        Bytes per second: the median of the pieces, of all threads together.
    """
    cores = os.cpu_count() or 1
    count = min(threads or cores, cores)
    memory = np.ones(_BYTES, np.uint8)
    shares = np.array_split(memory.reshape(-1, _PIECE), count)
    with ThreadPoolExecutor(count) as pool:
        rates = list(pool.map(_rate_of, shares))
    return sum(rates)


def _rate_of(pieces: np.ndarray) -> float:
    """Return the median of the bytes per second of pieces that are read one after the other."""
    seconds = []
    for _ in range(_PASSES):
        for piece in pieces:
            begin = time.perf_counter()
            piece.max()
            seconds.append(time.perf_counter() - begin)
    return _PIECE / statistics.median(seconds)
