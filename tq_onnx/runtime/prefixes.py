"""Which requests wait until another one has read the beginning that they share.

onnxruntime-genai's Engine keeps full pages by content, and a later request takes those of its
beginning instead of computing them. Requests that begin at once find nothing yet, so the first of
them goes ahead, and the others begin when its prompt is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tq_onnx.runtime.jobs import Job


def page_hashes(tokens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return a hash for each full page, of all tokens up to its end; none without pages."""
    if not block_size:
        return ()
    hashes, last = [], 0
    for end in range(block_size, len(tokens) + 1, block_size):
        last = hash((last, *tokens[end - block_size : end]))
        hashes.append(last)
    return tuple(hashes)


class Prefixes:
    """What is read, and what is being read.

    A request is held only where it saves at least half of what the other one has to read. So its
    waits are never more than twice what it would need to read the same tokens itself.

    Args:
        capacity: pages that the Engine has. It may have dropped a page that is still known here;
            requests then begin together and each reads its own.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with nothing read; see the class for arguments."""
        self._capacity = capacity
        self._known: dict[int, None] = {}
        self._reading: dict[Job, int] = {}

    def begin(self, job: Job) -> None:
        """Note that a request begins to be read."""
        if job.page_hashes:
            self._reading[job] = len(job.page_hashes) - self._count_known(job)

    def end(self, job: Job, *, is_read: bool) -> None:
        """Note that a prompt is read, or that its request has ended before."""
        if self._reading.pop(job, None) is None or not is_read:
            return
        for page in job.page_hashes:
            self._known.pop(page, None)  # the newest are last
            self._known[page] = None
        while len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]

    def holds(self, job: Job) -> bool:
        """Return True if a request is to wait for one that is being read."""
        for reader, cost in self._reading.items():
            shared = _shared(job.page_hashes, reader.page_hashes)
            gain = shared - self._count_known(job) if shared else 0
            if gain > 0 and 2 * gain >= cost:
                return True
        return False

    def _count_known(self, job: Job) -> int:
        pages = job.page_hashes
        return next((n for n, page in enumerate(pages) if page not in self._known), len(pages))


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of first pages that are the same."""
    pairs = zip(first, second, strict=False)
    apart = (number for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return next(apart, min(len(first), len(second)))
