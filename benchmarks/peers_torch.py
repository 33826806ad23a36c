"""scaled_dot_product_attention of PyTorch over a cache of fixed capacity."""

from __future__ import annotations

import torch
from contender import Array, Step, normal, plain_pages, repeated


class Sdpa:
    """The query heads of a KV head as rows of one matrix, so that each key is read once."""

    most_copies = None

    def __init__(self, dtype: str) -> None:
        """Chooses the type of everything: float32, bfloat16 or float16."""
        self._dtype: torch.dtype = getattr(torch, dtype)

    def version(self) -> str:
        """Of torch."""
        return str(torch.__version__)

    def cache_bytes(self, step: Step) -> int:
        """Of the type."""
        return int(step.vectors * step.head_size * self._dtype.itemsize)

    def prepare(self, step: Step, threads: int, copies: int) -> _Prepared:
        """Tensors over plain pages; decode only."""
        if step.new != 1:
            raise RuntimeError("grouped by hand it does decode only")
        torch.set_num_threads(threads)
        return _Prepared(step, self._dtype, copies)


class _Prepared:
    def __init__(self, step: Step, dtype: torch.dtype, copies: int) -> None:
        self._slot, self._scale = step.past, step.scale
        group = step.query_heads // step.kv_heads
        self._query = torch.from_numpy(
            normal((step.batch, step.kv_heads, group, step.head_size))
        ).to(dtype)
        self._new = torch.from_numpy(normal((step.batch, step.kv_heads, 1, step.head_size))).to(
            dtype
        )
        rows = torch.from_numpy(normal((128, step.head_size))).to(dtype)
        if dtype is torch.float32:
            content: Array = rows.numpy()
        else:
            content = rows.view(torch.int16).numpy()  # numpy has no bfloat16
        shape = (step.batch, step.kv_heads, step.context, step.head_size)
        first = repeated(content, shape)
        self._pairs = []
        self.caches: list[list[Array]] = []
        for _ in range(copies):
            pair = []
            for _ in range(2):
                cache = plain_pages(shape, first.dtype)
                cache[...] = first
                pair.append(cache)
            self.caches.append(pair)
            self._pairs.append([torch.from_numpy(cache).view(dtype) for cache in pair])

    def run(self, at: int) -> None:
        """Appends and attends."""
        keys, values = self._pairs[at % len(self._pairs)]
        slot = slice(self._slot, self._slot + 1)
        with torch.inference_mode():
            keys[:, :, slot] = self._new
            values[:, :, slot] = self._new
            torch.nn.functional.scaled_dot_product_attention(
                self._query, keys, values, scale=self._scale
            )
