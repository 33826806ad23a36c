"""ggml_flash_attn_ext, llama.cpp's attention, called in the ggml that a Python package brings.

That is llama-cpp-python, or ggml-python, which is the same code without the models and builds in
minutes. The cache lies as in llama.cpp: token by token, all heads of a token side by side.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from ctypes import byref, c_bool, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import numpy as np
from contender import Array, Step, normal, plain_pages, repeated

PACKAGES = {"llama_cpp": "llama-cpp-python", "ggml": "ggml-python"}
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
BLOCK_BYTES = {"f16": 64, "q8_0": 34, "q4_0": 18}
"""Of 32 numbers."""

GRAPH_NODES = 16
COPY_OVERHEAD = 1 << 17
"""Bytes that the descriptions of one copy's tensors and graph need, generously."""


class _InitParams(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(ctypes.Structure):
    """``ggml_cplan``: its begin, and room for what newer versions have behind it."""

    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("threads", c_int),
        ("threadpool", c_void_p),
        ("rest", c_uint8 * 64),
    )


class _PoolParams(ctypes.Structure):
    """``ggml_threadpool_params``, which is passed on as it is made."""

    _fields_ = (("all", c_uint8 * 1024),)


class Ggml:
    """The functions that are needed."""

    def __init__(self) -> None:
        """Loads the libraries.

        Raises:
            ModuleNotFoundError: no package has them.
        """
        suffix = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
        for package, project in PACKAGES.items():
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                libraries = {
                    p.stem.removeprefix("lib"): p for p in Path(folder).rglob(f"*.{suffix}")
                }
                if "ggml-base" in libraries and "ggml-cpu" in libraries:
                    self.version = f"{project} {importlib.metadata.version(project)}"
                    self._base = ctypes.CDLL(str(libraries["ggml-base"]), ctypes.RTLD_GLOBAL)
                    self._cpu = ctypes.CDLL(str(libraries["ggml-cpu"]), ctypes.RTLD_GLOBAL)
                    self._declare()
                    return
        raise ModuleNotFoundError(f"neither {' nor '.join(PACKAGES.values())} is installed")

    def _declare(self) -> None:
        p, n = c_void_p, c_int64
        base, cpu = self._base, self._cpu
        self.init = self._of(base, "ggml_init", p, _InitParams)
        self.free = self._of(base, "ggml_free", None, p)
        self.tensor = self._of(base, "ggml_new_tensor_4d", p, p, c_int, n, n, n, n)
        sizes = (n, n, n, n, c_size_t, c_size_t, c_size_t, c_size_t)
        self.view = self._of(base, "ggml_view_4d", p, p, p, *sizes)
        self.permute = self._of(base, "ggml_permute", p, p, p, c_int, c_int, c_int, c_int)
        self.copy = self._of(base, "ggml_cpy", p, p, p, p)
        floats = (c_float, c_float, c_float)
        self.attend = self._of(base, "ggml_flash_attn_ext", p, p, p, p, p, p, *floats)
        self.data = self._of(base, "ggml_get_data", p, p)
        self.row_size = self._of(base, "ggml_row_size", c_size_t, c_int, n)
        chunk = (c_int, p, p, n, n, n, p)
        self.quantise = self._of(base, "ggml_quantize_chunk", c_size_t, *chunk)
        self.graph = self._of(base, "ggml_new_graph_custom", p, p, c_size_t, c_bool)
        self.expand = self._of(base, "ggml_build_forward_expand", None, p, p)
        self.plan = self._of(cpu, "ggml_graph_plan", _Plan, p, c_int, p)
        self.compute = self._of(cpu, "ggml_graph_compute", c_int, p, ctypes.POINTER(_Plan))
        self.pool_params = self._of(base, "ggml_threadpool_params_default", _PoolParams, c_int)
        self.pool = self._of(cpu, "ggml_threadpool_new", p, ctypes.POINTER(_PoolParams))
        self.free_pool = self._of(cpu, "ggml_threadpool_free", None, p)
        self._of(cpu, "ggml_cpu_init", None)()

    @staticmethod
    def _of(library: ctypes.CDLL, name: str, result, *arguments):  # type: ignore[no-untyped-def]
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function


class FlashAttention:
    """The operator with a cache of one type; queries are float32."""

    most_copies = None

    def __init__(self, cache: str) -> None:
        """Chooses the cache: f16, q8_0 or q4_0."""
        self._cache = cache
        self._ggml = Ggml()

    def version(self) -> str:
        """Of the package."""
        return self._ggml.version

    def cache_bytes(self, step: Step) -> int:
        """Blocks of 32 numbers."""
        return step.vectors * step.head_size // 32 * BLOCK_BYTES[self._cache]

    def prepare(self, step: Step, threads: int, copies: int) -> _Prepared:
        """A graph per copy; decode only, as a prompt needs a mask."""
        if step.new != 1:
            raise RuntimeError("only its decode is measured here")
        return _Prepared(self._ggml, self._cache, step, threads, copies)


class _Prepared:
    caches = ()

    def __init__(self, ggml: Ggml, cache: str, step: Step, threads: int, copies: int) -> None:
        self._ggml = ggml
        content = self._content(cache, step)
        size = copies * (2 * content.nbytes + COPY_OVERHEAD)
        inputs = 4 * step.batch * step.head_size * (step.query_heads + 2 * step.kv_heads)
        self._memory = plain_pages((size + 2 * inputs + (1 << 20),), "u1")
        self._context = ggml.init(_InitParams(self._memory.nbytes, self._memory.ctypes.data, False))
        params = ggml.pool_params(threads)
        self._pool = ggml.pool(byref(params))
        query = self._floats(step.head_size, 1, step.query_heads, step.batch)
        new = [self._floats(step.head_size, step.kv_heads, 1, step.batch) for _ in range(2)]
        self._graphs = []
        for _ in range(copies):
            graph = ggml.graph(self._context, GRAPH_NODES, False)
            pair = []
            for rows in new:
                stored, appended = self._cache_of(cache, step, content, rows)
                ggml.expand(graph, appended)
                pair.append(ggml.permute(self._context, stored, 0, 2, 1, 3))
            answer = ggml.attend(self._context, query, *pair, None, step.scale, 0.0, 0.0)
            ggml.expand(graph, answer)
            self._graphs.append((graph, ggml.plan(graph, threads, self._pool)))
        self._work = np.zeros(max(plan.work_size for _, plan in self._graphs) + 64, np.uint8)
        for _, plan in self._graphs:
            plan.work_data = self._work.ctypes.data

    def _floats(self, *sizes: int) -> int:
        tensor: int = self._ggml.tensor(self._context, TYPES["f32"], *sizes)
        numbers = normal((int(np.prod(sizes)),))
        ctypes.memmove(self._ggml.data(tensor), numbers.ctypes.data, numbers.nbytes)
        return tensor

    def _content(self, cache: str, step: Step) -> Array:
        rows = normal((128, step.head_size))
        width = self._ggml.row_size(TYPES[cache], step.head_size)
        codes = np.zeros((len(rows), width), np.uint8)
        places = (rows.ctypes.data, codes.ctypes.data)
        self._ggml.quantise(TYPES[cache], *places, 0, len(rows), step.head_size, None)
        return repeated(codes, (step.vectors // 2, width))

    def _cache_of(self, cache: str, step: Step, content: Array, rows: int) -> tuple[int, int]:
        ggml, size, heads = self._ggml, step.head_size, step.kv_heads
        stored = ggml.tensor(self._context, TYPES[cache], size, heads, step.context, step.batch)
        ctypes.memmove(ggml.data(stored), content.ctypes.data, content.nbytes)
        width = content.shape[-1]
        token = width * heads
        strides = (width, token, token * step.context, token * step.past)
        slot = ggml.view(self._context, stored, size, heads, 1, step.batch, *strides)
        return stored, ggml.copy(self._context, rows, slot)

    def run(self, at: int) -> None:
        """Appends and attends."""
        graph, plan = self._graphs[at % len(self._graphs)]
        status = self._ggml.compute(graph, byref(plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute answers {status}")

    def __del__(self) -> None:
        """The threads end."""
        self._graphs = []
        self._ggml.free_pool(self._pool)
        self._ggml.free(self._context)
