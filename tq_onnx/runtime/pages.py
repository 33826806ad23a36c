"""Drive a paged model call by call: packed requests, pages by table, and no scheduler.

It is for comparisons and tests. A server has an engine that decides which requests go into a call;
here the caller does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.plan import BLOCK_TABLE, CUMULATIVE_LENGTHS, PAST_LENGTHS, Plan

Logits = npt.NDArray[Any]
_NO_PAGE: Final = -1
"""In the places of a table that have no page."""


@dataclass
class Request:
    """The state of one request.

    Attributes:
        length: tokens in its pages.
        pages: numbers of its pages, in the order of its tokens.
    """

    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedDecoder:
    """The caches of a paged model, and the requests in them.

    Args:
        session: an onnxruntime session of the model.
        plan: of the model.
        blocks: pages of each cache.
        seed: pages are given out in a random order, and hold random bytes at first.
    """

    def __init__(self, session: Any, plan: Plan, *, blocks: int, seed: int = 0) -> None:
        """Make caches of random bytes; see the class for arguments."""
        rng = np.random.default_rng(seed)
        self._session = session
        self._plan = plan
        self._free = [int(number) for number in rng.permutation(blocks)]
        self._requests: dict[Hashable, Request] = {}
        self._pairs = plan.caches
        shapes = {port.name: port.shape for port in session.get_inputs()}
        self._caches = {
            pair.present: rng.integers(0, 256, (blocks, *shapes[pair.past][1:]), np.uint8)
            for pair in self._pairs
        }

    def run(self, tokens: Mapping[Any, Sequence[int] | npt.NDArray[np.int64]]) -> Logits:
        """Feed new tokens of some requests, and return logits ``[R, V]`` of their last ones.

        Args:
            tokens: new tokens by the names of the requests, which begin by being named.

        Raises:
            UsageError: there are too few pages; nothing was run.
        """
        requests = [self._requests.setdefault(name, Request()) for name in tokens]
        counts = [len(new) for new in tokens.values()]
        for request, count in zip(requests, counts, strict=True):
            self._make_room(request, request.length + count)
        table = np.full(
            (len(requests), max(len(request.pages) for request in requests)), _NO_PAGE, np.int32
        )
        for row, request in zip(table, requests, strict=True):
            row[: len(request.pages)] = request.pages
        feeds = {
            self._plan.interface.tokens: np.concatenate(
                [np.asarray(new, np.int64) for new in tokens.values()]
            ),
            CUMULATIVE_LENGTHS: np.cumsum([0, *counts]).astype(np.int32),
            PAST_LENGTHS: np.array([request.length for request in requests], np.int32),
            BLOCK_TABLE: table,
            **{pair.past: self._caches[pair.present] for pair in self._pairs},
        }
        names = [self._plan.interface.logits, *self._caches]
        logits, *presents = self._session.run(names, feeds)
        self._caches = dict(zip(self._caches, presents, strict=True))
        for request, count in zip(requests, counts, strict=True):
            request.length += count
        last_logits: Logits = logits
        return last_logits

    def _make_room(self, request: Request, tokens: int) -> None:
        missing = -(-tokens // self._plan.block_size) - len(request.pages)
        if missing > len(self._free):
            raise UsageError(f"{missing} pages are needed, and {len(self._free)} are free")
        for _ in range(missing):
            request.pages.append(self._free.pop())
