"""Exact tokens in pages: entries at the end of each page, as many as have room there.

The bytes of a head in a page are ``slots * width``. The row of the page's token o begins at byte
``o * row_stride``, so at least ``slots * (width - row_stride)`` bytes belong to no row, and before
the page is full there are more. Entries are those of ``codec.window``, without padding, and lie
one in front of the other from the end of the page on: place k ends ``k`` entries before it.

The first ``sinks`` tokens of a request have the first places of its first page. Behind them are
``capacity(o)`` places for the newest tokens of a page once token o has its row: as many as fit, at
most ``recent``. They get fewer while the page fills, and each place that goes is that of the oldest
token. A full page keeps ``capacity(slots - 1)`` of its newest tokens.

A query at position p, which is token o of its page, takes token t exactly if t < ``sinks``, or t is
not before ``oldest(p)``:

    p - capacity(o) + 1              where that lies in the page of p, else the larger one of
    p - recent + 1 and the first token of the page before that this page still has when it is full,

as far as tokens are at hand, see ``codec.window``. So what a query sees does not depend on the
calls that brought the tokens, nor on who wrote the pages before, which requests may share.

The first token of a page zeroes what lies behind the new rows of the page, whatever it held. Every
call zeroes what the new rows leave of places that they reach (``remains``): their tokens may be
taken back, and half an entry with its tag would count again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.window import ELEMENT_BYTES, TAG_BYTES

NO_PLACE: Final = -1


def entry_bytes(head_size: int) -> int:
    """Return the bytes of an entry in a page."""
    return ELEMENT_BYTES * head_size + TAG_BYTES


def page_width(row_stride: int, entries: int, slots: int, head_size: int) -> int:
    """Return the bytes of a page for each token, of which a full one has so many entries.

    Args:
        row_stride: bytes from a row to the next.
        slots: tokens of a page.
    """
    return row_stride + -(-entries * entry_bytes(head_size) // slots)


@dataclass(frozen=True)
class PageWindow:
    """Where the exact tokens of a layer's pages lie."""

    recent: int  #: how many of the newest tokens are exact at most
    sinks: int  #: how many of the first tokens are exact
    head_size: int  #: D
    slots: int  #: tokens of a page, S
    row_stride: int  #: bytes from a row to the next
    width: int  #: bytes of a page for each token and head, W

    def __post_init__(self) -> None:
        """Check that the first page has room for its entries when it is full.

        Raises:
            ValueError: it has not.
        """
        if self.row_stride > self.width or self._room(self.slots - 1) < self.sinks:
            raise ValueError(
                f"a page of {self.slots} tokens of {self.width} bytes has no room for "
                f"{self.sinks} entries behind rows of {self.row_stride}"
            )
        if self.sinks > self.slots:
            raise ValueError(f"{self.sinks} first tokens are more than a page of {self.slots}")

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry."""
        return entry_bytes(self.head_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a head in a page."""
        return self.slots * self.width

    def _room(self, slot: int) -> int:
        free = self.page_bytes - (slot + 1) * self.row_stride
        return free // self.entry_bytes

    def capacity(self, slot: int, *, is_first: bool) -> int:
        """Return how many of the newest tokens have places once so many rows are written."""
        return max(0, min(self.recent, self._room(slot) - (self.sinks if is_first else 0)))

    @cached_property
    def capacities(self) -> npt.NDArray[np.int64]:
        """Of all slots of the first page of a request, then of any other: int64 ``[2, S]``."""
        return np.array(
            [
                [self.capacity(slot, is_first=is_first) for slot in range(self.slots)]
                for is_first in (True, False)
            ],
            np.int64,
        )

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Places of all tokens, as ``capacities`` has them: int64 ``[2, S]``, -1 for none."""
        return np.array(
            [_places(self.capacities[0], self.sinks), _places(self.capacities[1], 0)], np.int64
        )

    def oldest(self, position: int) -> int:
        """Return the first token that a query at a position takes exactly, sinks left out."""
        column, slot = divmod(position, self.slots)
        count = int(self.capacities[min(column, 1), slot])
        if count <= slot or column == 0:
            return position - count + 1
        before = int(self.capacities[min(column - 1, 1), -1])
        return max(column * self.slots - before, position - self.recent + 1)

    def begin(self, place: int) -> int:
        """Return the first byte of a place in the bytes of a head in a page."""
        return self.page_bytes - (place + 1) * self.entry_bytes

    def remains(self, column: int, tokens: int) -> slice:
        """Return the bytes behind the rows of a page, of a request of so many tokens, that were
        places; at most as many as an entry has."""
        last = min(self.slots, tokens - column * self.slots) - 1
        sinks = 0 if column else self.sinks
        live = sinks + int(self.capacities[min(column, 1), last])
        begin = max((last + 1) * self.row_stride, self.begin(sinks + self.recent - 1))
        return slice(begin, self.begin(live - 1))

    def place(self, token: int, tokens: int) -> int:
        """Return the place of a token in its page when a request has so many; -1 for none."""
        column, slot = divmod(token, self.slots)
        row = min(column, 1)
        place = int(self.places[row, slot])
        last = min(self.slots, tokens - column * self.slots) - 1
        sinks = 0 if column else self.sinks
        if token < self.sinks or place < sinks + int(self.capacities[row, last]):
            return place
        return NO_PLACE


def has_damaged_entries(planes: npt.NDArray[np.uint8], window: PageWindow, tokens: int) -> bool:
    """Return True if an entry that counts has an infinite number or NaN.

    Args:
        planes: the pages of each sequence and head, uint8 ``[B, N, C * S, W]``.
    """
    by_head = planes.reshape(planes.shape[0] * planes.shape[1], -1, window.page_bytes)
    size = ELEMENT_BYTES * window.head_size
    for token in range(tokens):
        place = window.place(token, tokens)
        if place == NO_PLACE:
            continue
        begin = window.begin(place)
        entries = by_head[:, token // window.slots, begin : begin + window.entry_bytes]
        counts = np.ascontiguousarray(entries[:, size:]).view("<u4")[:, 0] == token + 1
        if not np.isfinite(np.ascontiguousarray(entries[counts, :size]).view("<f2")).all():
            return True
    return False


def _places(counts: npt.NDArray[np.int64], sinks: int) -> list[int]:
    """Return the place of each token of a page, which only the oldest one of its time loses.

    Made from the end of the page backwards: the token that is gone once another comes had the
    place of that one, or one of those that went with it.
    """
    slots = len(counts)
    places = [slot if slot < sinks else NO_PLACE for slot in range(slots)]

    def first_of(slot: int) -> int:
        return max(sinks, slot - int(counts[slot]) + 1)

    for token in range(first_of(slots - 1), slots):
        places[token] = sinks + token - first_of(slots - 1)
    for slot in range(slots - 1, sinks, -1):
        free = [places[slot]] if counts[slot] else []
        free += range(sinks + int(counts[slot]), sinks + int(counts[slot - 1]))
        older = range(first_of(slot - 1), min(first_of(slot), slot))
        for token, place in zip(older, free, strict=False):
            places[token] = place
    return places
