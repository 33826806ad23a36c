"""The Ascend C kernels in the shim of ``custom_ops/cann/testing/shim``: built and called.

Device memory is host memory: every array of a call is copied into a block of exactly its size that
the shim knows, so that an access outside of it is a hazard. Nothing here needs CANN.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, Codec, layout_digest, row_layout

Made = TypeVar("Made")

INT4 = Codec(LLOYD_MAX, 4)
ARCHITECTURES = (2201, 2002)
CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"
SHIM = CUSTOM_OPS / "cann" / "testing" / "shim"
SIMULATOR = ("simulator.cpp", "core.cpp", "device.cpp")
COMPILER = shutil.which("g++")

Site = tuple[str, int, str]
"""A synchronisation statement of the kernels: file, line, kind."""


class ByArchitecture(Mapping[int, Made]):
    """Something for each architecture, made when it is first asked for."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        self._make = make
        self.made: dict[int, Made] = {}

    def __getitem__(self, arch: int) -> Made:
        if arch not in self.made:
            self.made[arch] = self._make(arch)
        return self.made[arch]

    def __iter__(self) -> Iterator[int]:
        return iter(ARCHITECTURES)

    def __len__(self) -> int:
        return len(ARCHITECTURES)


def flags(arch: int) -> list[str]:
    """What the compiler is told, but for its inputs and outputs."""
    warnings = ["-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{CUSTOM_OPS / 'include'}", f"-I{SHIM}"]
    return ["-std=c++17", *warnings, f"-D__NPU_ARCH__={arch}", *folders]


def compile_library(arch: int, source: str, folder: Path, *, optimize: str = "-O1") -> Path:
    """Compiles a source of the shim with the simulator to a library for one architecture."""
    library = folder / f"lib{Path(source).stem}_{arch}.so"
    sources = [str(SHIM / name) for name in (source, *SIMULATOR)]
    command = [str(COMPILER), *flags(arch), optimize, "-fPIC", "-shared", *sources, "-ldl"]
    made = subprocess.run(
        [*command, "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return library


def build(arch: int, folder: Path) -> Path:
    """Compiles the kernels of one architecture."""
    return compile_library(arch, "launch.cpp", folder)


@cache
def rotation_of(head_size: int, layer: int = 0) -> np.ndarray:
    """The rotation of a layer, made once."""
    return make_rotation("qr", head_size, layer)


def row_bytes(head_size: int) -> int:
    """W of the caches that these kernels know."""
    return row_layout(INT4, head_size).row_bytes


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


class Kernels(Simulator):
    """The kernels of one architecture. Calls do not assert that there are no hazards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._library.tq_kernels_layout_digest.restype = ctypes.c_char_p
        assert self._library.tq_kernels_layout_digest().decode() == layout_digest()

    def encode(
        self,
        vectors: np.ndarray,
        cache: np.ndarray,
        past: int | np.ndarray,
        rotation: np.ndarray,
        *,
        cores: int = 3,
        claims: dict[str, int] | None = None,
    ) -> np.ndarray:
        """Encodes ``[B, N, T, D]`` into a copy of a cache ``[B, N, S, W]``, which it returns.

        Args:
            vectors: float32 or float16.
            cache: uint8.
            past: length of all sequences, or int64 ``[B]``, which are then read by the device.
            rotation: float32 ``[D, D]``.
            cores: how many cores share the work.
            claims: sizes to pass in place of the true ones.
        """
        batch, heads, tokens, size = vectors.shape
        book = codebook_of(INT4, size)
        arrays = [vectors, rotation, book.centroids, book.boundaries, _lengths(past), cache]
        sizes = {
            **{"past_length": _scalar(past), "batch": batch, "heads": heads, "new_tokens": tokens},
            **{"capacity": cache.shape[2], "head_size": size, **(claims or {})},
        }
        name = f"tq_encode_{vectors.dtype.name}"
        present: np.ndarray = self._launch(name, arrays, sizes, cores)[-1]
        return present

    def attention(
        self,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        past: int | np.ndarray,
        rotations: tuple[np.ndarray, np.ndarray],
        *,
        scale: float,
        cores: int = 3,
        claims: dict[str, int] | None = None,
    ) -> np.ndarray:
        """Causal attention of ``[B, H, T, D]`` over caches ``[B, N, S, W]``; see ``encode``."""
        batch, query_heads, tokens, size = query.shape
        centroids = codebook_of(INT4, size).centroids
        arrays = [query, keys, values, rotations[0], centroids, rotations[1], centroids]
        sizes = {
            **{"past_length": _scalar(past), "batch": batch, "query_heads": query_heads},
            **{"heads": keys.shape[1], "new_tokens": tokens, "capacity": keys.shape[2]},
            **{"head_size": size, **(claims or {})},
        }
        output: np.ndarray = self._launch(
            f"tq_attention_{query.dtype.name}",
            [*arrays, _lengths(past), np.full_like(query, np.nan)],
            sizes,
            cores,
            ctypes.c_float(scale),
        )[-1]
        return output

    def _launch(
        self,
        name: str,
        arrays: list[np.ndarray | None],
        sizes: dict[str, int],
        cores: int,
        *more: ctypes.c_float,
    ) -> list[Any]:
        """Launches on copies of the arrays, which it returns; null for None."""
        blocks = [None if array is None else array.copy(order="C") for array in arrays]
        with self.device_memory([block for block in blocks if block is not None]) as addresses:
            given = iter(addresses)
            status = self.call(
                f"aclrtlaunch_{name}",
                ctypes.c_uint32(cores),
                None,
                *(None if block is None else next(given) for block in blocks),
                *(ctypes.c_uint32(size) for size in sizes.values()),
                *more,
            )
        assert (status != 0) == (self.hazards > 0)
        return blocks


def _lengths(past: int | np.ndarray) -> np.ndarray | None:
    return past.astype(np.int64) if isinstance(past, np.ndarray) else None


def _scalar(past: int | np.ndarray) -> int:
    return past if isinstance(past, int) else 0


def _texts(function: Callable[..., int]) -> Iterator[str]:
    text = ctypes.create_string_buffer(500)
    index = 0
    while function(ctypes.c_size_t(index), text, ctypes.c_size_t(len(text))):
        yield text.value.decode()
        index += 1
