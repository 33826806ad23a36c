"""The Ascend C kernels in the shim of ``custom_ops/cann/testing/shim``: built and called.

Device memory is host memory: every array of a call is copied into a block of exactly its size that
the shim knows, so that an access outside of it is a hazard. Nothing here needs CANN.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from simulator import Simulator
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import NORM_KEPT
from tq_onnx.codec.planes import field_bytes, planes_of_rows, rows_of_planes
from tq_onnx.codec.rotated import LLOYD_MAX, UNIFORM_SIGNED
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec, layout_digest, row_layout
from tq_onnx.codec.window import NO_WINDOW, Window

Made = TypeVar("Made")

INT4 = Codec(LLOYD_MAX, 4)
SIGNED4 = Codec(UNIFORM_SIGNED, 4)
"""What these kernels know in planes, too."""
ARCHITECTURES = (2201, 2002)
CUSTOM_OPS = Path(__file__).parents[2]
SHIM = CUSTOM_OPS / "cann" / "testing" / "shim"
KERNELS = CUSTOM_OPS / "cann" / "kernels"
LAUNCHES = (KERNELS / "launch.h").read_text(encoding="utf-8")
INTERFACE = re.findall(r"^#define TQ_KERNELS_INTERFACE (\d+)", LAUNCHES, re.M)[0]
TILING_OF = dict(re.findall(r"^  KERNEL\((\w+), (\w+)\)", LAUNCHES, re.M))
"""The struct of the arguments of each kernel, by name."""
SIMULATOR = ("simulator.cpp", "core.cpp", "counts.cpp", "device.cpp")
COMPILER = shutil.which("g++")
OPTIMIZE = ("-O1", "-ftree-vectorize", "-ffp-contract=off")
"""Kernels run in half of the time of ``-O1`` alone; ``-O3`` compiles longer than it saves."""
OF_THIS_MACHINE = (
    ("-march=native", "-mno-avx512f") if platform.machine() in ("x86_64", "AMD64") else ()
)
"""Conversions of float16 are instructions, and sums of it, which AVX-512 has, are not."""
CODECS = (*(Codec(LLOYD_MAX, bits) for bits in range(1, 6)), Codec(UNIFORM_SIGNED, 3), SIGNED4)
LEAST_ROW = 32
"""Bytes of a row that 2002 can move at least."""
TILE_ROWS = 64
"""Slots of the caches that are read at once: kTileRows."""
TASK_ROWS = 8
"""Queries of a task of the attention: kTaskRows."""


def tilings() -> dict[str, type[ctypes.Structure]]:
    """The structs of ``tiling.h``, read from it."""
    types = {"uint64_t": ctypes.c_uint64, "uint32_t": ctypes.c_uint32, "float": ctypes.c_float}
    header = re.sub(r"//.*", "", (KERNELS / "tiling.h").read_text(encoding="utf-8"))
    structs = {}
    for struct, body in re.findall(r"struct (\w+) \{(.*?)\};", header, re.S):
        members = [
            (name, types[kind])
            for kind, names in re.findall(r"(\w+) ([\w,\s]+);", body)
            for name in re.split(r",\s*", names)
        ]
        structs[struct] = type(struct, (ctypes.Structure,), {"_fields_": members})
    return structs


TILINGS = tilings()


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


def compile_library(
    arch: int,
    source: Path,
    folder: Path,
    *,
    optimize: Sequence[str] = (*OPTIMIZE, *OF_THIS_MACHINE),
) -> Path:
    """Compiles a source with the simulator to a library for one architecture."""
    library = folder / f"lib{source.stem}_{arch}.so"
    sources = [str(source), *(str(SHIM / name) for name in SIMULATOR)]
    command = [str(COMPILER), *flags(arch), *optimize, "-fPIC", "-shared", *sources, "-ldl"]
    made = subprocess.run(
        [*command, "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return library


def build(arch: int, folder: Path) -> Path:
    """Compiles the kernels of one architecture."""
    return compile_library(arch, KERNELS / "library.cpp", folder)


@cache
def rotation_of(head_size: int, layer: int = 0) -> np.ndarray:
    """The rotation of a layer, made once."""
    return make_rotation("qr", head_size, layer)


def kernel_bits(codec: Codec, *, in_planes: bool = False) -> int:
    """How a tiling names a codec (kTqSignedBits and kTqPlanes of tiling.h)."""
    return codec.bits + 16 * codec.is_signed + 32 * in_planes


def row_bytes(head_size: int, codec: Codec = INT4) -> int:
    """W of a cache that these kernels know."""
    return row_layout(codec, head_size).row_bytes


def has_kernels(arch: int, codec: Codec, head_size: int) -> bool:
    """Whether an architecture can move rows of a codec."""
    return arch == 2201 or row_bytes(head_size, codec) >= LEAST_ROW


def scratch_floats(query_shape: tuple[int, ...], heads: int, parts: int) -> int:
    """How many floats of scratch ``tiling.h`` says that attention needs."""
    batch, query_heads, tokens, size = query_shape
    group = query_heads // heads
    step = TASK_ROWS // group * group if group < TASK_ROWS else TASK_ROWS
    tasks = batch * heads * -(-group * tokens // step)
    return tasks * parts * TASK_ROWS * (size + 2)


@dataclass(frozen=True)
class Middle:
    """What another attention gave over some slots, for one token of each sequence.

    Attributes:
        first: the first of the slots.
        end: that behind the last.
        averages: float16 ``[B, H, D]``, not rotated back.
        logs: of the sums of weights, float32 ``[B, H]``.
    """

    first: int
    end: int
    averages: np.ndarray
    logs: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """As the kernel gets them: neighbours are the coordinates i and i + D / 2."""
        halves = np.split(self.averages, 2, axis=-1)
        pairs = np.stack(halves, -1).reshape(self.averages.shape)
        spare = np.full(TASK_ROWS, np.nan, np.float32)
        return {"middle": pairs, "middle_logs": np.concatenate([self.logs.ravel(), spare])}


class Kernels(Simulator):
    """The kernels of one architecture. Calls do not assert that there are no hazards.

    Attributes:
        in_planes: whether caches of ``SIGNED4`` lie in planes on the device. Callers have rows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.in_planes = False
        self._library.tq_kernels_layout_digest.restype = ctypes.c_char_p
        assert self._library.tq_kernels_layout_digest().decode() == layout_digest()

    @property
    def codec(self) -> Codec:
        """That of calls which name none."""
        return SIGNED4 if self.in_planes else INT4

    def _fields(self, codec: Codec, head_size: int) -> int:
        """Bytes of a row that lie apart on the device."""
        return field_bytes(codec, head_size) if self.in_planes and codec == SIGNED4 else 0

    def encode(
        self,
        vectors: np.ndarray,
        cache: np.ndarray,
        past: int | np.ndarray,
        rotation: np.ndarray,
        *,
        codec: Codec | None = None,
        norm_correction: int = NORM_KEPT,
        gains: np.ndarray | None = None,
        offset: np.ndarray | None = None,
        window: Window = NO_WINDOW,
        cores: int = 3,
        claims: dict[str, int] | None = None,
    ) -> np.ndarray:
        """Encodes ``[B, N, T, D]`` into a copy of a cache ``[B, N, S, W]``, which it returns.

        Args:
            vectors: float32 or float16.
            cache: uint8.
            past: length of all sequences, or int64 ``[B]``, which are then read by the device.
            rotation: float32 ``[D, D]``.
            codec: one of ``CODECS``; that of the kernels by default.
            norm_correction: of the scales.
            gains: float32 ``[G]``, tried in this order; None for none.
            offset: float32 ``[P, N, D]``, likewise.
            window: of the cache.
            cores: how many cores share the work.
            claims: sizes to pass in place of the true ones.
        """
        batch, heads, tokens, size = vectors.shape
        codec = codec or self.codec
        fields = self._fields(codec, size)
        book = codebook_of(codec, size)
        arrays = {
            **{"vectors": vectors, "rotation": rotation, "centroids": book.centroids},
            **{"boundaries": book.boundaries, "offset": offset, "gains": gains},
            **{"lengths": _lengths(past)},
            **{"cache": planes_of_rows(cache, fields, window.overlay_rows)},
        }
        sizes = {
            **{"past_length": _scalar(past), "batch": batch, "heads": heads, "new_tokens": tokens},
            **{"capacity": cache.shape[2], "offset_rows": _rows(offset)},
            **{"gain_count": _rows(gains), "bits": kernel_bits(codec, in_planes=fields > 0)},
            **{"norm_correction": norm_correction, **_window(window)},
            **{"head_size": size, **(claims or {})},
        }
        written = self._launch(f"tq_encode_{vectors.dtype.name}", arrays, sizes, cores)["cache"]
        return rows_of_planes(written, fields, window.overlay_rows)

    def attention(
        self,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        past: int | np.ndarray,
        rotations: tuple[np.ndarray, np.ndarray],
        *,
        scale: float,
        codecs: tuple[Codec, Codec] | None = None,
        offsets: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
        sliding_window: int = 0,
        first_slot: int = 0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
        window: Window = NO_WINDOW,
        new: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
        cores: int = 3,
        part_tokens: int | None = None,
        middle: Middle | None = None,
        claims: dict[str, int] | None = None,
    ) -> np.ndarray:
        """Causal attention of ``[B, H, T, D]`` over caches ``[B, N, S, W]``; see ``encode``.

        Args:
            query: float32 or float16.
            keys: uint8.
            values: uint8.
            past: length of all sequences, or of each.
            rotations: of keys and values, float32 ``[D, D]``.
            scale: factor on the scores.
            codecs: of keys and values; those of the kernels by default.
            offsets: of both or neither, float32 ``[P, N, D]``.
            sliding_window: 0 for none.
            first_slot: the first that any query sees.
            softcap: 0 for none.
            sinks: in the query's type ``[H]``.
            window: of the caches.
            new: keys and values of the call, for a window with entries.
            cores: how many cores share the work.
            part_tokens: the keys are cut into parts of as many, which another launch merges.
            middle: what another attention gave over some slots.
            claims: sizes to pass in place of the true ones.
        """
        batch, query_heads, tokens, size = query.shape
        heads = keys.shape[1]
        codecs = codecs or (self.codec, self.codec)
        fields = [self._fields(codec, size) for codec in codecs]
        keys, values = (
            planes_of_rows(rows, apart, window.overlay_rows)
            for rows, apart in zip((keys, values), fields, strict=True)
        )
        books = [codebook_of(codec, size).centroids for codec in codecs]
        keys_of_task = int(np.max(past)) + tokens - first_slot // TILE_ROWS * TILE_ROWS
        keys_of_task = max(keys_of_task, TILE_ROWS)
        if sliding_window:
            most = sliding_window + min(tokens, TASK_ROWS) - 1 + TILE_ROWS - 1
            keys_of_task = min(keys_of_task, most)
        parts = 1 if part_tokens is None else max(1, -(-keys_of_task // part_tokens))
        scratch = np.full(scratch_floats(query.shape, heads, parts), np.nan, np.float32)
        arrays = {
            **{"query": query, "keys": keys, "values": values, "head_sink": sinks},
            **{"key_rotation": rotations[0], "value_rotation": rotations[1]},
            **{"key_centroids": books[0], "value_centroids": books[1]},
            **{"key_offset": offsets[0], "value_offset": offsets[1]},
            **{"new_keys": new[0], "new_values": new[1], "lengths": _lengths(past)},
            **{"output": np.full_like(query, np.nan), "scratch": None if parts == 1 else scratch},
            **({} if middle is None else middle.arrays()),
        }
        numbers = {
            **{"past_length": _scalar(past), "batch": batch, "query_heads": query_heads},
            **{"heads": heads, "new_tokens": tokens, "capacity": keys.shape[2]},
            **{"parts": parts, "part_tokens": part_tokens or 0, "offset_rows": _rows(offsets[0])},
            **{"sliding_window": sliding_window, "first_slot": first_slot},
            **{
                f"{side}_bits": kernel_bits(codec, in_planes=apart > 0)
                for side, codec, apart in zip(("key", "value"), codecs, fields, strict=True)
            },
            **_window(window),
            **{"head_size": size, "scale": scale, "softcap": softcap},
            **({"middle_first": middle.first, "middle_end": middle.end} if middle else {}),
        }
        dtype = query.dtype.name
        arrays = self._launch(f"tq_attention_{dtype}", arrays, numbers | (claims or {}), cores)
        if parts > 1:
            assert np.isnan(arrays["output"]).all()
            arrays = self._launch(f"tq_attention_merge_{dtype}", arrays, numbers, cores)
        return arrays["output"]

    def rotary_embedding(
        self,
        x: np.ndarray,
        tables: tuple[np.ndarray, np.ndarray],
        position: int,
        *,
        first: int = 0,
        count: int | None = None,
        cores: int = 3,
    ) -> np.ndarray:
        """Rotates tokens of ``[heads, new_tokens, D]``; what is not written is NaN.

        Args:
            x: float32 or float16.
            tables: cosines and sines, float32 ``[P, D / 2]``.
            position: that of token ``first``.
            first: the first token.
            count: how many tokens, by default all from ``first`` on.
            cores: how many cores share the work.
        """
        heads, tokens, size = x.shape
        sizes = {
            **{"heads": heads, "new_tokens": tokens, "first": first},
            **{"count": tokens - first if count is None else count},
            **{"position": position, "head_size": size},
        }
        arrays = {"x": x, "cosines": tables[0], "sines": tables[1], "y": np.full_like(x, np.nan)}
        return self._launch(f"tq_rotary_embedding_{x.dtype.name}", arrays, sizes, cores)["y"]

    def _launch(
        self,
        kernel: str,
        arrays: Mapping[str, np.ndarray | None],
        numbers: Mapping[str, float],
        cores: int,
    ) -> dict[str, Any]:
        """Launches on copies of the arrays, which it returns, without those that are None."""
        before = self.hazards
        blocks = {name: aligned_copy(array) for name, array in arrays.items() if array is not None}
        with self.device_memory(list(blocks.values())) as addresses:
            status = self._enqueue(
                kernel, dict(zip(blocks, addresses, strict=True)), numbers, cores
            )
        assert (status != 0) == (self.hazards > before)
        return blocks

    def _enqueue(
        self,
        kernel: str,
        addresses: Mapping[str, int],
        numbers: Mapping[str, float],
        cores: int,
        stream: int | None = None,
    ) -> int:
        """Calls the launch of a kernel with its struct; an address that is left out is 0."""
        tiling = TILINGS[TILING_OF[kernel]](**addresses, **numbers)
        launch = f"tq_launch_{kernel}"
        return self.call(
            launch, ctypes.c_uint32(cores), ctypes.c_void_p(stream), ctypes.byref(tiling)
        )


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A copy that begins where a block of a device's memory may: at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 63, np.uint8)
    place = memory[-memory.ctypes.data % 64 :][: array.nbytes]
    copy = place.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _lengths(past: int | np.ndarray) -> np.ndarray | None:
    return past.astype(np.int64) if isinstance(past, np.ndarray) else None


def _window(window: Window) -> dict[str, int]:
    sizes = {"recent": window.recent, "sinks": window.sinks}
    return {**sizes, "overlay_rows": window.overlay_rows}


def _rows(table: np.ndarray | None) -> int:
    return 0 if table is None else len(table)


def _scalar(past: int | np.ndarray) -> int:
    return past if isinstance(past, int) else 0
