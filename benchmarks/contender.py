"""What a contender is: one attention layer at one size, prepared by a peer and run step by step."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Step:
    """One call of an attention layer: ``new`` tokens are appended and attend to ``context``.

    Attributes:
        query_heads: H.
        kv_heads: N.
        head_size: D.
        batch: sequences, all of one length.
        context: tokens that exist after the step, the new ones included; the caches have as many
            slots.
        new: 1 in decode, all of ``context`` in prefill.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    batch: int
    context: int
    new: int

    @property
    def past(self) -> int:
        """Tokens before the step."""
        return self.context - self.new

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return float(self.head_size**-0.5)

    @property
    def multiply_adds(self) -> int:
        """Of both products of causal attention, of what its queries see."""
        seen = self.new * self.past + self.new * (self.new + 1) // 2
        return 2 * self.batch * self.query_heads * self.head_size * seen

    @property
    def vectors(self) -> int:
        """Vectors of both caches."""
        return 2 * self.batch * self.kv_heads * self.context


class Prepared(Protocol):
    """A contender in memory."""

    @property
    def caches(self) -> Sequence[Sequence[Array]]:
        """The arrays of each copy; none where they lie in memory that is not plain."""
        ...

    def run(self, at: int) -> None:
        """The step on copy ``at`` of the caches, from the first again after the last."""
        ...


class Peer(Protocol):
    """What makes a contender; made and used in a process of its own."""

    most_copies: int | None
    """Where making copies of the caches is slow; the rest is up to emptying the cache by hand."""

    def version(self) -> str:
        """Of the package that is measured; raises what its import raises."""
        ...

    def cache_bytes(self, step: Step) -> int:
        """Bytes of the keys and values of a step, of one copy."""
        ...

    def prepare(self, step: Step, threads: int, copies: int) -> Prepared:
        """The step in memory, with so many copies of its caches."""
        ...


def plain_pages(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array of zeros in pages of the ordinary size, aligned to one.

    numpy advises huge pages for its large arrays, other allocators do not, and memory in huge pages
    is read faster; so every cache, and so what the bandwidth is measured with, is allocated here.
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * kind.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind, count).reshape(shape)


def repeated(rows: Array, shape: tuple[int, ...]) -> Array:
    """A cache ``[..., S, W]`` in plain pages, filled with rows ``[R, W]`` over and over."""
    cache = plain_pages(shape, rows.dtype)
    flat = cache.reshape(-1, shape[-1])
    for start in range(0, len(flat), len(rows)):
        part = flat[start : start + len(rows)]
        part[:] = rows[: len(part)]
    return cache


def normal(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, seed: int = 0) -> Array:
    """Standard normal numbers."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return numbers.astype(dtype)
