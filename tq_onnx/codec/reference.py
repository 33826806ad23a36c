"""The oracle: encode, append, decode and attention in numpy float64.

Function bodies, CPU kernels and device kernels are compared with it. It is written for reading, not
for speed: attention decodes the whole cache and never uses the rotated space, so that the shortcut
of the backends is checked and not repeated. ``tq_onnx.codec.quantise`` codes the vectors.

With an offset ``[P, N, D]`` the row in slot p of head n encodes x - offset[min(p, P - 1), n], and
a reader adds that again. With frequencies ``[D]`` two rows of the offset turn with their slot:
x - offset[0, n] cos(p f) - offset[1, n] sin(p f), p less the padding on the left; rows behind these
two are subtracted besides in the first slots, ``offset[2 + p, n]`` in slot p.

With the codec ``raw`` a row is the vector itself, in the model's element type. Rotation, codebook
and norm correction are then ignored and may be None.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.bitpack import pack, unpack
from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.elements import from_bytes, to_bytes
from tq_onnx.codec.kind import NORM_KEPT, Fields, Float64
from tq_onnx.codec.quantise import coordinates, quantise
from tq_onnx.codec.rounding import (
    EXACT,
    Multiplied,
    Rounding,
    multiplied,
    rounded_queries,
    rounded_weights,
)
from tq_onnx.codec.spec import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, Codec, RowLayout, row_layout
from tq_onnx.codec.unrotated import UNIFORM
from tq_onnx.codec.window import NO_WINDOW, ExactTokens, Window, exact_tokens, write_entries

Bytes = npt.NDArray[np.uint8]
Rotation = npt.NDArray[np.float32] | None
Centroids = npt.NDArray[np.float32] | None
Offset = npt.NDArray[np.float32] | None


class _How(TypedDict):
    size: int
    element: str


_STORED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<f2"), 4: np.dtype("<f4")}
"""Types of a field's numbers by their bytes."""

_LOWEST: Final = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}
_LOWEST_FLOAT32: Final = -3.4028234663852886e38


def encode(
    vectors: npt.NDArray[np.generic],
    codec: Codec,
    rotation: Rotation,
    codebook: Codebook | None,
    norm_correction: int = NORM_KEPT,
    *,
    gains: npt.NDArray[np.float32] | None = None,
    feedback: npt.NDArray[np.float32] | None = None,
    element: str = "float32",
) -> Bytes:
    """Encode vectors.

    Args:
        vectors: floats ``[..., D]``.
        codec: the codec.
        rotation: float32 ``[D, D]``, or ``[D, 2 D]`` for ``prod``.
        codebook: centroids and boundaries.
        norm_correction: what the scale makes up for; one of ``kind.NORM_CORRECTIONS``.
        gains: the gains to try, float32 ``[G]``; None for an encoder that does not search.
        feedback: matrices of error feedback, float32 ``[N, D, D]``, for vectors ``[..., N, T, D]``;
            None for none.
        element: the model's element type, see ``codec.elements``; only ``raw`` looks at it.

    Returns:
        uint8 ``[..., W]``.
    """
    if codec.is_raw:
        return to_bytes(vectors, codec, element)
    layout = row_layout(codec, np.shape(vectors)[-1])
    codes, fields = quantise(
        vectors, codec, rotation, codebook, norm_correction, gains=gains, feedback=feedback
    )
    parts = [pack(codes, layout)]
    for field in layout.fields:
        stored = np.ascontiguousarray(fields[field.name], _STORED[field.size])
        parts.append(stored.view(np.uint8))
    return np.concatenate(parts, axis=-1)


def fields_of(rows: Bytes, layout: RowLayout) -> Fields:
    """Return the fields of rows ``[..., W]``: name to float64 ``[..., count]``."""
    found = {}
    for field in layout.fields:
        part = rows[..., field.offset : field.offset + field.count * field.size]
        stored = np.ascontiguousarray(part).view(_STORED[field.size])
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            found[field.name] = stored.astype(np.float64)
    return found


def scales_of(rows: Bytes, codec: Codec, head_size: int) -> Float64:
    """Return the one scale that each of rows ``[..., W]`` has: float64 ``[...]``."""
    return fields_of(rows, row_layout(codec, head_size))["scale"][..., 0]


def decode(
    rows: Bytes,
    codec: Codec,
    rotation: Rotation,
    codebook: Codebook | None,
    *,
    head_size: int | None = None,
    element: str = "float32",
) -> Float64:
    """Decode rows ``[..., W]`` to vectors, float64 ``[..., D]``; see ``encode``.

    Args:
        rows: uint8 ``[..., W]``; bytes behind the codec's row are not read.
        codec: the codec.
        rotation: as for ``encode``.
        codebook: as for ``encode``.
        head_size: D; by default that of the rotation, or what W says where there is none.
        element: as for ``encode``.
    """
    centroids = None if codebook is None else codebook.centroids
    size = head_size or _head_size(rows, codec, rotation)
    return _decode(rows, codec, rotation, centroids, size=size, element=element)


def _head_size(rows: Bytes, codec: Codec, rotation: Rotation) -> int:
    if codec.is_rotated and rotation is not None:
        return len(rotation)
    return next(
        size
        for size in range(HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE + 1, HEAD_SIZE_MULTIPLE)
        if row_layout(codec, size).row_bytes == rows.shape[-1]
    )


def _decode(
    rows: Bytes, codec: Codec, rotation: Rotation, centroids: Centroids, *, size: int, element: str
) -> Float64:
    layout = row_layout(codec, size)
    if codec.is_raw:
        return from_bytes(rows[..., : layout.row_bytes], codec, element).astype(np.float64)
    decoded = coordinates(unpack(rows, layout), fields_of(rows, layout), codec, centroids)
    if not codec.is_rotated:
        return decoded
    assert rotation is not None  # only other kinds do without
    with np.errstate(invalid="ignore"):
        vectors: Float64 = decoded @ rotation.astype(np.float64).T
    return vectors


def offset_rows(
    offset: npt.NDArray[np.floating[Any]],
    past_length: npt.NDArray[np.int64],
    batch: int,
    new: int,
    *,
    frequencies: Offset = None,
    left_padding: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the offsets to subtract from new vectors ``[B, N, T, D]`` before they are encoded.

    Args:
        offset: float32 ``[P, N, D]``; with frequencies rows of cosines and of sines, and what first
            slots have besides, each its own.
        past_length: int64 ``[B]`` or ``[1]``.
        batch: B.
        new: T.
        frequencies: radians from a slot to the next, float32 ``[D]``; None, or one number, for
            an offset that does not turn.
        left_padding: int64 ``[B]`` or ``[1]``, slots in front of position 0, which has all of
            them; None for none. Only frequencies heed it.

    Returns:
        float64 ``[B, N, T, D]``.
    """
    slots = _lengths(past_length, batch)[:, None] + np.arange(new)
    rows = np.asarray(offset, np.float64)
    if frequencies is None or frequencies.size == 1:
        by_head: Float64 = rows[np.minimum(slots, len(rows) - 1)].transpose(0, 2, 1, 3)
        return by_head
    if left_padding is not None:
        slots = np.maximum(slots - _lengths(left_padding, batch)[:, None], 0)
    cosines, sines, *first = rows[:, :, None]
    phases = slots[:, None, :, None] * frequencies.astype(np.float64)
    turned: Float64 = cosines * np.cos(phases) + sines * np.sin(phases)
    for slot, own in enumerate(first):
        turned += own * (slots == slot)[:, None, :, None]
    return turned


def append(
    past: Bytes,
    rows: Bytes,
    past_length: npt.NDArray[np.int64],
    *,
    window: Window = NO_WINDOW,
    vectors: npt.NDArray[np.generic] | None = None,
) -> Bytes:
    """Put new rows behind those that a cache holds already.

    Args:
        past: uint8 ``[B, N, P, W]``.
        rows: uint8 ``[B, N, T, W]``.
        past_length: int64 ``[B]`` or ``[1]``; token t of sequence b gets the row overlay_rows +
            past_length[b] + t.
        window: of the cache.
        vectors: what the rows were made of, floats ``[B, N, T, D]``; for a window with entries.

    Returns:
        uint8 ``[B, N, S, W]`` with S = max(P, overlay_rows + max(past_length) + T): rows that are
        not written keep the bytes of ``past``, or are zero where ``past`` has none.

    Raises:
        ValueError: a length is negative.
    """
    batch, heads, new, width = rows.shape
    lengths = _lengths(past_length, batch)
    first = window.overlay_rows
    slots = max(past.shape[2], first + int(lengths.max(initial=0)) + new)
    present = np.zeros((batch, heads, slots, width), np.uint8)
    present[:, :, : past.shape[2]] = past
    for b, length in enumerate(lengths):
        present[b, :, first + length : first + length + new] = rows[b]
    if window.entries and vectors is not None:
        write_entries(present, vectors, lengths, window, has_grown=slots > past.shape[2])
    return present


def attention(
    query: npt.NDArray[np.generic],
    key_cache: Bytes,
    value_cache: Bytes,
    past_length: npt.NDArray[np.int64],
    *,
    key: Codec,
    value: Codec,
    key_rotation: Rotation,
    key_codebook: Centroids,
    value_rotation: Rotation,
    value_codebook: Centroids,
    scale: float,
    causal: bool,
    sliding_window: int = 0,
    softcap: float = 0.0,
    attention_bias: npt.NDArray[np.generic] | None = None,
    head_sink: npt.NDArray[np.generic] | None = None,
    key_offset: Offset = None,
    value_offset: Offset = None,
    key_frequencies: Offset = None,
    element: str = "float32",
    window: Window = NO_WINDOW,
    new_keys: npt.NDArray[np.generic] | None = None,
    new_values: npt.NDArray[np.generic] | None = None,
    exact: ExactTokens | None = None,
    left_padding: npt.NDArray[np.int64] | None = None,
    skip: int = 0,
    rounding: Rounding = EXACT,
) -> Float64:
    """Return grouped-query attention over the decoded caches.

    Query t of sequence b stands at position p = past_length[b] + t; the keys 0 .. past_length[b] +
    T - 1 exist. A key at position s is visible unless it does not exist, ``causal`` and s > p,
    ``sliding_window`` and p - s >= sliding_window, s < left_padding[b], or its bias is at most half
    of the lowest finite value of the bias type. The score is scale * q.k, then softcap * tanh(score
    / softcap), then the bias is added. A sink is one more score, neither scaled nor capped, of a
    key that every query sees and that has no value. A query that sees no other key gives zeros.

    Args:
        query: floats ``[B, H, T, D]``; query head h reads KV head h // (H / N).
        key_cache: uint8 ``[B, N, S, Wk]``.
        value_cache: uint8 ``[B, N, S, Wv]``.
        past_length: int64 ``[B]`` or ``[1]``.
        key: codec of the keys.
        value: codec of the values.
        key_rotation: float32 ``[D, D]``, or ``[D, 2 D]`` for ``prod``.
        key_codebook: centroids of the keys, float32 ``[L]``.
        value_rotation: likewise.
        value_codebook: centroids of the values, float32 ``[L]``.
        scale: factor on the scores.
        causal: whether the future is hidden.
        sliding_window: number of visible keys, the query's own included; 0 for all.
        softcap: 0 for none.
        attention_bias: floats broadcastable to ``[B, H, T, total]``, total = max(past_length) + T;
            a last dimension longer than total is cut.
        head_sink: floats ``[H]``, the sink of each query head; minus infinity is none.
        key_offset: float32 ``[P, N, D]``, added to the decoded keys by their slots.
        value_offset: likewise for values.
        key_frequencies: how the offset of keys turns, float32 ``[D]``, see ``offset_rows``.
        element: the model's element type, see ``codec.elements``; only ``raw`` looks at it.
        window: of the caches, see ``codec.window``: some queries take vectors that are at hand
            instead of rows.
        new_keys: keys of the call, floats ``[B, N, T, D]``; for a window with entries.
        new_values: likewise values.
        exact: what queries take in place of rows, where it does not follow from a window.
        left_padding: int64 ``[B]`` or ``[1]``, slots in front that no query sees; None for none.
        skip: how many of the first queries are left out.
        rounding: how kernels round queries and weights that they multiply with codes as integers;
            codebooks are then as they multiply them. Exact tokens meet the query as it is, and the
            sum of the weights is that of exact ones.

    Returns:
        float64 ``[B, H, T, D]``, zeros for queries that are left out.

    Raises:
        ValueError: a length is negative or the caches are too short for it.
    """
    batch, heads, new, head_size = query.shape
    lengths = _lengths(past_length, batch)
    total = int(lengths.max(initial=0)) + new
    live = slice(window.overlay_rows, window.overlay_rows + total)
    if live.stop > key_cache.shape[2]:
        raise ValueError(f"a cache of {key_cache.shape[2]} rows is too short for {live.stop}")
    how: _How = {"size": head_size, "element": element}
    key_book = multiplied(key, key_codebook, rounding.query_steps)
    value_book = multiplied(value, value_codebook, rounding.weight_steps)
    keys = _decode(key_cache[:, :, live], key, key_rotation, key_book.centroids, **how)
    values = _decode(value_cache[:, :, live], value, value_rotation, value_book.centroids, **how)
    if window.entries and new_keys is not None and new_values is not None:
        caches, of_call = (key_cache, value_cache), (new_keys, new_values)
        exact = exact_tokens(caches, of_call, lengths, window)
    none = np.zeros((batch, keys.shape[1], new, total), np.bool_)
    exact = exact or ExactTokens(keys, values, none)
    numbers, scales = _by_codes(value_cache[:, :, live], value, value_rotation, value_book, how)
    start = np.zeros(1, np.int64)
    if key_offset is not None:
        keys = keys + offset_rows(
            key_offset,
            start,
            batch,
            total,
            frequencies=key_frequencies,
            left_padding=left_padding,
        )
    if value_offset is not None:
        values = values + offset_rows(value_offset, start, 1, total)
    bias, hidden = bias_of(attention_bias, (batch, heads, new, total))
    hidden = hidden | _padded(left_padding, batch, total)
    queries = np.asarray(query, np.float64)
    group = heads // key_cache.shape[1]
    rounded = rounded_queries(queries, key, key_rotation, key_book.largest, rounding)
    sinks = np.full(heads, -np.inf) if head_sink is None else np.asarray(head_sink, np.float64)
    output = np.zeros((batch, heads, new, head_size))
    for b, h, later in np.ndindex(batch, heads, new - skip):
        t = skip + later
        position = lengths[b] + t
        seen = _seen(position, lengths[b] + new, hidden[b, h, t], causal, sliding_window)
        if not len(seen):
            continue
        n = h // group
        is_exact = exact.taken[b, n, t, seen][:, None]
        scores = scale * np.where(
            is_exact[:, 0],
            exact.keys[b, n, seen] @ queries[b, h, t],
            keys[b, n, seen] @ rounded[b, h, t],
        )
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores += bias[b, h, t, seen]
        top = max(scores.max(), sinks[h])
        weights = np.exp(scores - top)
        denominator = weights.sum() + np.exp(sinks[h] - top)
        shown = np.where(is_exact, exact.values[b, n, seen], values[b, n, seen])
        output[b, h, t] = weights @ shown / denominator
        if value_book.largest:
            stepped = rounded_weights(
                weights, scales[b, n, seen], seen, value_book.largest, rounding
            )
            moved = np.where(is_exact[:, 0], 0, stepped - weights)
            output[b, h, t] += moved @ numbers[b, n, seen] / denominator
    return output


def _padded(
    left_padding: npt.NDArray[np.int64] | None, batch: int, total: int
) -> npt.NDArray[np.bool_]:
    """Return which slots of each sequence are padding, ``[B, 1, 1, total]``."""
    first = np.zeros(1, np.int64) if left_padding is None else left_padding
    padded: npt.NDArray[np.bool_] = np.arange(total) < _lengths(first, batch)[:, None, None, None]
    return padded


def _seen(
    position: int, length: int, hidden: npt.NDArray[np.bool_], causal: bool, sliding_window: int
) -> npt.NDArray[np.int64]:
    """Return the positions that a query sees of a sequence of ``length`` keys."""
    at = np.arange(len(hidden))
    visible = (at < length) & ~hidden
    if causal:
        visible &= at <= position
    if sliding_window:
        visible &= position - at < sliding_window
    return np.flatnonzero(visible)


def _by_codes(
    rows: Bytes, codec: Codec, rotation: Rotation, book: Multiplied, how: _How
) -> tuple[Float64, Float64]:
    """Return what codes add to decoded rows, and the rows' scales; nothing for floats."""
    if not book.largest:
        return np.zeros(0), np.zeros(0)
    fields = fields_of(rows, row_layout(codec, how["size"]))
    whole, scale = _decode(rows, codec, rotation, book.centroids, **how), fields["scale"]
    if codec.kind == UNIFORM:
        whole = whole - fields["zero"] - scale * ((1 << codec.bits) - 1) / 2
    return whole, scale[..., 0]


def _lengths(past_length: npt.NDArray[np.int64], batch: int) -> npt.NDArray[np.int64]:
    lengths = np.broadcast_to(np.asarray(past_length, np.int64), (batch,))
    if (lengths < 0).any():
        raise ValueError(f"past_length {past_length.tolist()} is negative")
    return lengths


def bias_of(
    bias: npt.NDArray[np.generic] | None, shape: tuple[int, int, int, int]
) -> tuple[Float64, npt.NDArray[np.bool_]]:
    """Return the bias and whether it hides the key, both of ``shape``."""
    if bias is None:
        return np.zeros(shape), np.zeros(shape, np.bool_)
    lowest = _LOWEST.get(bias.dtype.name, _LOWEST_FLOAT32)
    cut = bias[..., : shape[-1]].astype(np.float64)
    return np.broadcast_to(cut, shape), np.broadcast_to(cut <= lowest / 2, shape)
