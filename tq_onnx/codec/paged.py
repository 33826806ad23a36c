"""The oracle of the paged operators: a plain loop over requests, over the contiguous oracle.

Tokens of R requests lie one behind the other. The token in slot p of request r is in row p % S of
page ``block_table[r, p // S]``; the bytes of a page ``[S, N, W]`` lie as ``[N, S, W]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.kind import Float64
from tq_onnx.codec.reference import Bytes, Offset

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Packing:
    """Where the tokens of requests are.

    Attributes:
        cumulative: where the tokens of each request begin among the packed ones, and where the
            last ends, int32 ``[R + 1]``.
        past: tokens of each request in its pages, int32 ``[R]``.
        table: pages of each request, int32 ``[R, C]``.
    """

    cumulative: Integers
    past: Integers
    table: Integers

    def __iter__(self) -> Iterator[tuple[slice, int, Integers]]:
        """Yield the packed tokens of each request, its past and its pages."""
        bounds = zip(self.cumulative[:-1].tolist(), self.cumulative[1:].tolist(), strict=True)
        for (start, end), past, table in zip(bounds, self.past.tolist(), self.table, strict=True):
            yield slice(start, end), past, table


def heads_first(cache: Bytes) -> Bytes:
    """Return pages ``[P, S, N, W]`` as their bytes lie, ``[P, N, S, W]``; a view."""
    pages, slots, heads, width = cache.shape
    by_head: Bytes = cache.reshape(pages, heads, slots, width)
    return by_head


def offset_rows(
    offset: npt.NDArray[np.float32], packing: Packing, *, frequencies: Offset = None
) -> Float64:
    """Return the offsets to subtract from packed vectors ``[1, N, T, D]``, see the contiguous."""
    parts = [
        reference.offset_rows(
            offset, np.array([past]), 1, tokens.stop - tokens.start, frequencies=frequencies
        )
        for tokens, past, _ in packing
    ]
    return np.concatenate(parts, axis=2)


def write(cache: Bytes, rows: Bytes, packing: Packing) -> Bytes:
    """Return pages ``[P, S, N, W]`` with the new rows ``[1, N, T, W]``, which may be narrower."""
    present: Bytes = cache.copy()
    pages = heads_first(present)
    width = rows.shape[-1]
    for tokens, past, table in packing:
        for step, token in enumerate(range(tokens.start, tokens.stop)):
            column, slot = divmod(past + step, cache.shape[1])
            pages[table[column], :, slot, :width] = rows[0, :, token]
            pages[table[column], :, slot, width:] = 0
    return present


def rows_of_request(cache: Bytes, table: Integers, count: int) -> Bytes:
    """Return the rows of the first ``count`` tokens of a request, ``[1, N, count, W]``."""
    slots = cache.shape[1]
    pages = heads_first(cache)[table[: -(-count // slots)]]
    by_head = pages.transpose(1, 0, 2, 3).reshape(cache.shape[2], -1, cache.shape[3])
    rows: Bytes = by_head[None, :, :count]
    return rows


def attention(
    query: npt.NDArray[np.generic],
    key_cache: Bytes,
    value_cache: Bytes,
    packing: Packing,
    **how: Any,
) -> Float64:
    """Return attention of packed queries ``[1, H, T, D]`` over pages ``[P, S, N, W]``.

    Args:
        query: floats.
        key_cache: pages of keys, the new ones included.
        value_cache: pages of values.
        packing: where the tokens are.
        **how: as for ``reference.attention``, which is causal here.
    """
    output = np.zeros(query.shape)
    for tokens, past, table in packing:
        count = tokens.stop - tokens.start
        if not count:
            continue
        output[:, :, tokens] = reference.attention(
            query[:, :, tokens],
            rows_of_request(key_cache, table, past + count),
            rows_of_request(value_cache, table, past + count),
            np.array([past]),
            causal=True,
            **how,
        )
    return output
