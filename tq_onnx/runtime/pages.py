"""Drive a paged model call by call: packed requests, pages by table, and no scheduler.

It is for comparisons and tests: requests of unlike lengths, and pages in any order. ``Decoder``
feeds sequences; a server has an engine that decides which requests go into a call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.plan import BLOCK_TABLE, CUMULATIVE_LENGTHS, PAST_LENGTHS, Plan
from tq_onnx.runtime.cache import pages_of

Logits = npt.NDArray[Any]
_NO_PAGE: Final = -1
"""In the places of a table that have no page."""


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
        self._lengths: dict[Hashable, int] = {}
        self._pages: dict[Hashable, list[int]] = {}
        shapes = {port.name: port.shape for port in session.get_inputs()}
        self._caches = {
            pair.present: rng.integers(0, 256, (blocks, *shapes[pair.past][1:]), np.uint8)
            for pair in plan.caches
        }

    def run(self, tokens: Mapping[Any, Sequence[int] | npt.NDArray[np.int64]]) -> Logits:
        """Feed new tokens of some requests, and return logits ``[R, V]`` of their last ones.

        Args:
            tokens: new tokens by the names of the requests, which begin by being named.

        Raises:
            UsageError: there are too few pages; nothing was run.
        """
        lengths = {name: self._lengths.get(name, 0) for name in tokens}
        after = {name: lengths[name] + len(new) for name, new in tokens.items()}
        pages = [self._pages_for(name, count) for name, count in after.items()]
        feeds = {
            self._plan.interface.tokens: np.concatenate(
                [np.asarray(new, np.int64) for new in tokens.values()]
            ),
            CUMULATIVE_LENGTHS: np.cumsum([0, *map(len, tokens.values())]).astype(np.int32),
            PAST_LENGTHS: np.array(list(lengths.values()), np.int32),
            BLOCK_TABLE: np.array([*zip_longest(*pages, fillvalue=_NO_PAGE)], np.int32).T.copy(),
            **{pair.past: self._caches[pair.present] for pair in self._plan.caches},
        }
        names = [self._plan.interface.logits, *self._caches]
        logits, *presents = self._session.run(names, feeds)
        self._caches = dict(zip(self._caches, presents, strict=True))
        self._lengths |= after
        last_logits: Logits = logits
        return last_logits

    def _pages_for(self, request: Hashable, tokens: int) -> list[int]:
        """Return the pages of a request, with further ones if it needs them."""
        pages = self._pages.setdefault(request, [])
        missing = pages_of(tokens, self._plan.block_size) - len(pages)
        if missing > len(self._free):
            raise UsageError(f"{missing} pages are needed, and {len(self._free)} are free")
        pages += [self._free.pop() for _ in range(missing)]
        return pages
