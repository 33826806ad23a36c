"""The bandwidth probe: ``bandwidth.c``, compiled here, over the caches of a contender."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from contender import Array

SOURCE = Path(__file__).with_name("bandwidth.c")
COMPILERS = ("cc", "gcc", "clang", "g++")


class NoCompilerError(RuntimeError):
    """There is nothing to compile the probe with, or it does not compile."""


def compile_probe(folder: Path) -> Path:
    """Compiles the probe for this processor.

    Raises:
        NoCompilerError: no compiler is installed, or none can.
    """
    named = os.environ.get("CC", "")
    compilers = [name for name in (named, *COMPILERS) if name and shutil.which(name)]
    if not compilers:
        raise NoCompilerError(
            f"no C compiler ({', '.join(COMPILERS)}) is installed, so the memory bandwidth cannot "
            "be measured: install one or name it by the environment variable CC"
        )
    library = folder / "bandwidth.so"
    said = ""
    for compiler in compilers:
        language = ["-x", "c"]
        # Some compilers know their own processor by the other flag only, or not at all.
        for processor in (["-march=native"], ["-mcpu=native"], []):
            command = [compiler, "-O3", *processor, "-fPIC", "-shared", "-pthread"]
            command += [*language, str(SOURCE), "-o", str(library)]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode == 0:
                return library
            said = process.stderr.strip().splitlines()[0] if process.stderr.strip() else ""
    raise NoCompilerError(f"{compilers[0]} does not compile {SOURCE.name}: {said}")


FEWEST_BYTES = 4 << 20
"""Of one reading: in less, threads that begin at different times would show."""


class Reader:
    """Reads the caches of a contender, some copies at a time, as fast as it can.

    The very memory that the contender reads: how fast memory is depends on the pages that one got.
    """

    def __init__(self, library: str, copies: Sequence[Sequence[Array]], threads: int) -> None:
        """Loads the probe.

        Args:
            library: from ``compile_probe``.
            copies: the arrays of each copy, aligned to 64 bytes.
            threads: how many read.
        """
        self._read = ctypes.CDLL(library).bandwidth_read_seconds
        self._read.restype = ctypes.c_double
        self._copies, self._threads = copies, threads
        size = sum(self._used(array) for array in copies[0])
        self.at_a_time = min(len(copies), max(1, -(-FEWEST_BYTES // max(size, 1))))

    def bytes_per_second(self, at: int, *, prefetch: bool) -> float:
        """Reads ``at_a_time`` copies from copy ``at`` on.

        Raises:
            RuntimeError: a thread cannot be made, or there is nothing to read.
        """
        count = len(self._copies)
        chosen = [self._copies[(at + i) % count] for i in range(self.at_a_time)]
        arrays = [array for copy in chosen for array in copy]
        sizes = [self._used(array) for array in arrays]
        seconds: float = self._read(
            (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays)),
            (ctypes.c_size_t * len(arrays))(*sizes),
            len(arrays),
            self._threads,
            int(prefetch),
        )
        if seconds <= 0 or not sum(sizes):
            raise RuntimeError("the bandwidth probe cannot start its threads, or has too little")
        return sum(sizes) / seconds

    def _used(self, array: Array) -> int:
        """Bytes of an array that can be shared out evenly."""
        share = 256 * self._threads
        return array.nbytes // share * share
