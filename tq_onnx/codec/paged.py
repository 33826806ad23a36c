"""The oracle of the paged operators: a plain loop over requests, over the contiguous oracle.

Tokens of R requests lie one behind the other. The token in slot p of request r is in row p % S of
page ``block_table[r, p // S]``; the bytes of a page ``[S, N, W]`` lie as ``[N, S, W]``. With exact
tokens, ``codec.pagewindow`` says where rows and entries lie in the S * W bytes of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.kind import Float64
from tq_onnx.codec.pagewindow import NO_PLACE, PageWindow
from tq_onnx.codec.reference import Bytes, Offset
from tq_onnx.codec.window import (
    ELEMENT_BYTES,
    ExactTokens,
    entry_of,
    rounded,
    tag_of,
    taken_tokens,
)

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Packing:
    """Where the tokens of requests are."""

    #: where the tokens of each request begin among the packed ones, and where the last ends, int32
    #: ``[R + 1]``
    cumulative: Integers
    past: Integers  #: tokens of each request in its pages, int32 ``[R]``
    table: Integers  #: pages of each request, int32 ``[R, C]``

    def __iter__(self) -> Iterator[tuple[slice, int, Integers]]:
        """Yield the packed tokens of each request, its past and its pages."""
        bounds = zip(self.cumulative[:-1].tolist(), self.cumulative[1:].tolist(), strict=True)
        for (start, end), past, table in zip(bounds, self.past.tolist(), self.table, strict=True):
            yield slice(start, end), past, table


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


def write(
    cache: Bytes,
    rows: Bytes,
    packing: Packing,
    *,
    window: PageWindow | None = None,
    vectors: npt.NDArray[np.generic] | None = None,
) -> Bytes:
    """Return pages ``[P, S, N, W]`` with the new rows ``[1, N, T, W]``, which may be narrower.

    Args:
        vectors: what the rows were made of, floats ``[1, N, T, D]``; for a window.
    """
    present: Bytes = cache.copy()
    stride = cache.shape[3] if window is None else window.row_stride
    width = rows.shape[-1]
    for tokens, past, table in packing:
        for step, token in enumerate(range(tokens.start, tokens.stop)):
            column, slot = divmod(past + step, cache.shape[1])
            row = slice(slot * stride, (slot + 1) * stride)
            at = _planes(present)[table[column], :, row]
            at[:, :width] = rows[0, :, token]
            at[:, width:] = 0
        if window is not None and vectors is not None:
            _write_entries(present, rounded(vectors[0, :, tokens]), past, table, window)
    return present


def _planes(cache: Bytes) -> Bytes:
    """Return pages ``[P, S, N, W]`` as the bytes of each head, ``[P, N, S * W]``; a view."""
    planes: Bytes = cache.reshape(cache.shape[0], cache.shape[2], -1)
    return planes


def _write_entries(
    present: Bytes,
    halves: npt.NDArray[np.float16],
    past: int,
    table: Integers,
    window: PageWindow,
) -> None:
    """Write the entries of the new tokens of a request, which are ``[N, T, D]``."""
    end = past + halves.shape[1]
    columns = range(past // window.slots, -(-end // window.slots) if end > past else 0)
    for column in columns:
        first = column * window.slots
        plane = _planes(present)[table[column]]
        last = min(end - first, window.slots) - 1
        if past <= first:
            plane[:, (last + 1) * window.row_stride :] = 0
        plane[:, window.remains(column, end)] = 0
        for token in range(max(first, past), min(first + window.slots, end)):
            place = window.place(token, end)
            if place == NO_PLACE or (token >= window.sinks and token < window.oldest(first + last)):
                continue
            begin = window.begin(place)
            for head, vector in enumerate(halves[:, token - past]):
                plane[head, begin : begin + window.entry_bytes] = entry_of(vector, token)


def pages_of_plane(plane: Bytes, slots: int) -> Bytes:
    """Return pages ``[C, S, N, W]`` of the cache of one sequence, ``[1, N, C * S, W]``."""
    _, heads, _, width = plane.shape
    by_page = plane.reshape(heads, -1, slots * width).transpose(1, 0, 2)
    pages: Bytes = np.ascontiguousarray(by_page).reshape(-1, slots, heads, width)
    return pages


def exact_tokens(
    caches: tuple[Bytes, Bytes],
    new: tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]],
    past: int,
    table: Integers,
    window: PageWindow,
) -> ExactTokens:
    """Return the vectors of one request that are at hand, and which of them each query takes.

    Args:
        caches: of keys and of values, uint8 ``[P, S, N, W]``, the new tokens included.
        new: keys and values of the call, floats ``[1, N, T, D]``.
        past: tokens of the request before the new ones.
    """
    _, heads, steps, head_size = new[0].shape
    end = past + steps
    vectors = np.zeros((2, 1, heads, end, head_size))
    vectors[:, :, :, past:] = [rounded(each) for each in new]
    is_there = np.zeros((heads, end), np.bool_)
    is_there[:, past:] = True
    for token in range(past):
        place = window.place(token, end)
        if place == NO_PLACE:
            continue
        begin = window.begin(place)
        for n in range(heads):
            page = table[token // window.slots]
            entries = [
                _planes(cache)[page, n, begin : begin + window.entry_bytes] for cache in caches
            ]
            if all(tag_of(entry, head_size) == token + 1 for entry in entries):
                halves = [entry[: ELEMENT_BYTES * head_size].copy() for entry in entries]
                vectors[:, 0, n, token] = [half.view("<f2") for half in halves]
                is_there[n, token] = True
    oldest = np.array([window.oldest(past + step) for step in range(steps)])
    by_head = np.stack([taken_tokens(row, oldest, window.sinks) for row in is_there])
    return ExactTokens(vectors[0], vectors[1], by_head[None])


def rows_of_request(cache: Bytes, table: Integers, count: int, *, row_stride: int = 0) -> Bytes:
    """Return the rows of the first ``count`` tokens of a request, ``[1, N, count, W]``.

    Args:
        cache: pages ``[P, S, N, W]``.
        row_stride: bytes from a row to the next, which it returns of each; 0 for W.
    """
    slots = cache.shape[1]
    stride = row_stride or cache.shape[3]
    planes = _planes(cache)[table[: -(-count // slots)], :, : slots * stride]
    by_head = planes.transpose(1, 0, 2).reshape(cache.shape[2], -1, stride)
    rows: Bytes = by_head[None, :, :count]
    return rows


def attention(
    query: npt.NDArray[np.generic],
    key_cache: Bytes,
    value_cache: Bytes,
    packing: Packing,
    *,
    window: PageWindow | None = None,
    new_keys: npt.NDArray[np.generic] | None = None,
    new_values: npt.NDArray[np.generic] | None = None,
    row_stride: int = 0,
    **how: Any,
) -> Float64:
    """Return attention of packed queries ``[1, H, T, D]`` over pages ``[P, S, N, W]``.

    Args:
        new_keys: keys of the call, floats ``[1, N, T, D]``; for a window.
        row_stride: bytes from a row to the next without a window; 0 for W.
    """
    output = np.zeros(query.shape)
    for tokens, past, table in packing:
        count = tokens.stop - tokens.start
        if not count:
            continue
        caches, stride = (key_cache, value_cache), row_stride
        if window is not None and new_keys is not None and new_values is not None:
            new = new_keys[:, :, tokens], new_values[:, :, tokens]
            how["exact"] = exact_tokens(caches, new, past, table, window)
            stride = window.row_stride
        keys, values = (
            rows_of_request(cache, table, past + count, row_stride=stride) for cache in caches
        )
        output[:, :, tokens] = reference.attention(
            query[:, :, tokens],
            keys,
            values,
            np.array([past]),
            causal=True,
            **how,
        )
    return output
