"""The exact window: the newest tokens and the first ones as float16, beside a cache's rows.

A cache plane ``[slots, W]`` with a window begins with an overlay of ``overlay_rows`` rows; the row
of token t is row ``overlay_rows + t``. Every token has its row, window or not. The overlay holds
``sinks + recent`` entries, one after the other, each in as many whole rows as it needs:

    D float16 numbers    the vector as it was given to the encoder, before offset and rotation,
                         clamped to the finite range; zeros if an element is not finite
    uint32               the token's index + 1, 0 for none: the tag
    zeros                up to the last byte of the last row

With ``overlay_rows`` 0 there is no overlay: entries take the spare rows of a plane, those behind
the rows of its tokens. They end with the plane, those of the newest tokens first and the sinks
last. Tokens that need the rows of an entry get them: an entry whose first row belongs to a token
is none, and what is left of it is zeros. So the exact tokens are fewer where a plane is nearly
full, and there are none in a plane without spare rows. A plane that grows keeps no entries.

Token t has entry t if ``t < sinks``, else ``sinks + (t - sinks) mod recent``. Encoding T tokens
writes the entries of those below ``sinks`` and of the last ``min(T, recent)``. A sequence without
a past begins with tags of 0, whatever its buffer held.

A vector is at hand if it belongs to the call, or if the entries of its token have its tag, in the
caches of keys and of values. A query at position p takes token t exactly if

    t < sinks       and all tokens up to t are at hand, or
    p - t < recent  and all tokens from t on are at hand;

its row is read otherwise. An entry that is there goes before the vector of the call, which is
rounded as an entry would be: what attention sees of a token does not depend on the calls that
brought it.

Caches of the codec ``raw`` are exact as they are. They have the rows of the overlay where others
of the model do, and no entries: their window is ``Window(0, 0, overlay_rows)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.kind import MAX_HALF, Float64

Bytes = npt.NDArray[np.uint8]

ELEMENT_BYTES: Final = 2
TAG_BYTES: Final = 4
MAX_ENTRIES: Final = 4096
"""Most entries of a plane."""


@dataclass(frozen=True)
class Window:
    """The window of one layer's caches."""

    recent: int = 0  #: how many of the newest tokens have entries
    sinks: int = 0  #: how many of the first tokens have entries
    #: rows in front of those of the tokens, at least what the entries need; 0 for entries in the
    #: spare rows behind them
    overlay_rows: int = 0
    #: bytes of a row's fields where these lie apart from the codes (``tq_onnx.codec.planes``); 0
    #: for rows
    field_bytes: int = 0

    @property
    def entries(self) -> int:
        """Entries of a plane."""
        return self.sinks + self.recent

    def entry(self, token: int) -> int | None:
        """Return the entry of a token; None if it never has one."""
        if token < self.sinks:
            return token
        return self.sinks + (token - self.sinks) % self.recent if self.recent else None

    @property
    def takes_spare_rows(self) -> bool:
        """True if entries lie behind the rows of the tokens, as far as there are rows."""
        return self.entries > 0 and not self.overlay_rows


NO_WINDOW: Final = Window()


def rows_per_entry(head_size: int, row_bytes: int) -> int:
    """Return the rows that an entry takes in a cache of so many bytes a row."""
    return -(-(ELEMENT_BYTES * head_size + TAG_BYTES) // row_bytes)


def window_of(recent: int, sinks: int, planes: Iterable[tuple[int, int]]) -> Window:
    """Return the window whose overlay has room for the entries of every cache.

    Args:
        planes: head size and bytes of a row of each cache; all get the same number of rows.
    """
    return Window(recent, sinks, rows_of_entries(recent + sinks, planes))


def rows_of_entries(entries: int, planes: Iterable[tuple[int, int]]) -> int:
    """Return the rows that so many entries take in the cache where they take the most.

    Args:
        planes: head size and bytes of a row of each cache.
    """
    return entries * max((rows_per_entry(size, width) for size, width in planes), default=0)


def rounded(vectors: npt.NDArray[np.generic]) -> npt.NDArray[np.float16]:
    """Return vectors ``[..., D]`` as entries hold them; their zeros lose their sign."""
    wide = np.asarray(vectors, np.float64)
    finite = np.isfinite(wide).all(-1, keepdims=True)
    kept = np.where(finite & (wide != 0), wide, 0.0)
    return kept.clip(-MAX_HALF, MAX_HALF).astype(np.float16)


def write_entries(
    present: Bytes,
    vectors: npt.NDArray[np.generic],
    lengths: npt.NDArray[np.int64],
    window: Window,
    *,
    has_grown: bool = False,
) -> None:
    """Write the entries of new tokens into caches.

    Args:
        present: uint8 ``[B, N, S, W]``, changed in place.
        vectors: the new vectors, floats ``[B, N, T, D]``.
        lengths: int64 ``[B]``, tokens before the new ones.
    """
    new, head_size = vectors.shape[2:]
    halves = rounded(vectors).astype("<f2")
    for b, n in np.ndindex(*present.shape[:2]):
        end = int(lengths[b]) + new
        entries = _entries(present[b, n], head_size, window, end)
        tags = slice(ELEMENT_BYTES * head_size, ELEMENT_BYTES * head_size + TAG_BYTES)
        if window.takes_spare_rows:
            _cut_rows(present[b, n], head_size, window, end)[:] = 0
        for stored in entries.values():
            if lengths[b] == 0:
                stored[tags] = 0
            if window.takes_spare_rows and has_grown:
                stored[:] = 0
        for t in range(new):
            token = int(lengths[b]) + t
            entry = window.entry(token)
            if entry not in entries or (token >= window.sinks and t < new - window.recent):
                continue
            entries[entry][:] = 0
            entries[entry][: tags.stop] = entry_of(halves[b, n, t], token)


def entry_of(half: npt.NDArray[np.float16], token: int) -> Bytes:
    """Return the bytes of an entry without padding, of a token's rounded vector ``[D]``."""
    tag = np.array([token + 1], "<u4")
    return np.concatenate([half.astype("<f2").view(np.uint8), tag.view(np.uint8)])


def tag_of(entry: Bytes, head_size: int) -> int:
    """Return the tag of an entry."""
    return int.from_bytes(entry[ELEMENT_BYTES * head_size :][:TAG_BYTES].tobytes(), "little")


def entry_bytes_wrong(caches: Bytes, vectors: npt.NDArray[np.generic], window: Window) -> int:
    """Count the bytes of entries that are not what a sequence leaves, whatever its calls were.

    Args:
        caches: uint8 ``[B, N, S, W]``.
        vectors: of all tokens of the sequences, floats ``[B, N, T, D]``.
    """
    if not window.entries:
        return 0
    expected = caches.copy()
    write_entries(expected, vectors, np.zeros(len(caches), np.int64), window)
    return int((expected != caches).sum())


def has_damaged_entries(caches: Bytes, head_size: int, window: Window, tokens: int) -> bool:
    """Return True if an entry has an infinite number or NaN, or the tag of another entry's token.

    Args:
        caches: uint8 ``[B, N, S, W]``.
    """
    if not window.entries:
        return False
    first = ELEMENT_BYTES * head_size
    for number, rows in _places(caches.shape[2:], head_size, window, tokens).items():
        entries = caches[:, :, rows].reshape(caches.shape[0] * caches.shape[1], -1)
        tags = np.ascontiguousarray(entries[:, first : first + TAG_BYTES]).view("<u4")[:, 0]
        vectors = np.ascontiguousarray(entries[tags > 0, :first]).view("<f2")
        owners = {window.entry(int(tag) - 1) for tag in tags if tag}
        if not owners <= {number} or not np.isfinite(vectors).all():
            return True
    return False


def retag(caches: Bytes, head_size: int, window: Window, tokens: int) -> None:
    """Say that entries hold the newest of so many tokens, and the first; in place.

    Args:
        caches: uint8 ``[B, N, S, W]``.
    """
    if not window.entries:
        return
    numbers = np.arange(window.sinks, dtype="<u4")
    if window.recent:
        newest = np.arange(tokens - window.recent, tokens)
        turn = np.argsort((newest - window.sinks) % window.recent)
        numbers = np.concatenate([numbers, newest[turn]]).astype("<u4")
    tags = (numbers + 1).astype("<u4").view(np.uint8).reshape(-1, TAG_BYTES)
    first = ELEMENT_BYTES * head_size
    for b, n in np.ndindex(*caches.shape[:2]):
        for number, entry in _entries(caches[b, n], head_size, window, tokens).items():
            entry[first : first + TAG_BYTES] = tags[number]


@dataclass(frozen=True)
class ExactTokens:
    """Vectors at hand, and which of them each query takes."""

    keys: Float64  #: float64 ``[B, N, total, D]``, zeros where none is at hand
    values: Float64  #: likewise
    #: bool ``[B, N, T, total]``, true where a query takes a token exactly
    taken: npt.NDArray[np.bool_]


def taken_tokens(
    is_there: npt.NDArray[np.bool_], oldest: npt.NDArray[np.int64], sinks: int
) -> npt.NDArray[np.bool_]:
    """Return which tokens queries take exactly, bool ``[T, tokens]``.

    Args:
        is_there: which tokens are at hand, bool ``[tokens]``.
        oldest: the first of the newest tokens that each query takes, int64 ``[T]``.
    """
    tokens = np.arange(len(is_there))
    all_before = np.logical_and.accumulate(is_there)
    all_after = np.logical_and.accumulate(is_there[::-1])[::-1]
    is_recent = (tokens >= oldest[:, None]) & all_after
    is_exact: npt.NDArray[np.bool_] = is_recent | ((tokens < sinks) & all_before)
    return is_exact


def exact_tokens(
    caches: tuple[Bytes, Bytes],
    new: tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]],
    lengths: npt.NDArray[np.int64],
    window: Window,
) -> ExactTokens:
    """Return the vectors at hand, and which of them each query takes.

    Args:
        caches: of keys and of values, uint8 ``[B, N, S, W]``, the new tokens included.
        new: keys and values of the call, floats ``[B, N, T, D]``.
        lengths: int64 ``[B]``, tokens before the new ones.
    """
    batch, heads, steps, head_size = new[0].shape
    total = int(lengths.max(initial=0)) + steps
    found = np.zeros((2, batch, heads, total, head_size))
    taken = np.zeros((batch, heads, steps, total), np.bool_)
    of_call = [rounded(one).astype(np.float64) for one in new]
    for b, n in np.ndindex(batch, heads):
        first, end = int(lengths[b]), int(lengths[b]) + steps
        planes = [_entries(cache[b, n], head_size, window, end) for cache in caches]
        is_there = np.zeros(total, np.bool_)
        for token in range(end):
            entry = window.entry(token)
            if all(entry in one and tag_of(one[entry], head_size) == token + 1 for one in planes):
                halves = [one[entry][: ELEMENT_BYTES * head_size].copy() for one in planes]
                found[:, b, n, token] = [one.view("<f2").astype(np.float64) for one in halves]
                is_there[token] = True
            elif token >= first:
                found[:, b, n, token] = [one[b, n, token - first] for one in of_call]
                is_there[token] = True
        newest = np.arange(first, end) - window.recent + 1
        oldest = newest if window.recent else np.full(steps, end)
        taken[b, n, :, :end] = taken_tokens(is_there[:end], oldest, window.sinks)
    return ExactTokens(found[0], found[1], taken)


def _entries(plane: Bytes, head_size: int, window: Window, tokens: int) -> dict[int | None, Bytes]:
    """Return the entries of a plane ``[S, W]`` by number: views ``[bytes]``."""
    places = _places(plane.shape, head_size, window, tokens)
    return {entry: plane[rows].reshape(-1) for entry, rows in places.items()}


def _places(
    shape: tuple[int, ...], head_size: int, window: Window, tokens: int
) -> dict[int | None, slice]:
    """Return the rows of the entries of a plane of a shape ``[S, W]`` by number."""
    rows = rows_per_entry(head_size, shape[1])
    begin = turn = 0
    if window.takes_spare_rows:  # a slot of the ring is in front of all sinks
        begin, turn = shape[0] - window.entries * rows, window.recent
    firsts = {
        entry: begin + (entry + turn) % window.entries * rows for entry in range(window.entries)
    }
    return {
        entry: slice(first, first + rows)
        for entry, first in firsts.items()
        if not window.takes_spare_rows or first >= tokens
    }


def _cut_rows(plane: Bytes, head_size: int, window: Window, tokens: int) -> Bytes:
    """Return the rows behind those of the tokens that are left of an entry, a view."""
    rows = rows_per_entry(head_size, plane.shape[1])
    begin = len(plane) - window.entries * rows
    rest = (begin - tokens) % rows if tokens > begin else 0
    return plane[tokens : tokens + rest]
