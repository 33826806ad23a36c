"""What takes the steps of an answer in tests, and misbehaves where a test wants that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tq_onnx import Engine
from tq_onnx.runtime.jobs import Step

SECONDS = 120
"""Until an answer has ended, on a busy machine."""


def begin_together(engine: Engine, count: int) -> None:
    """Has an Engine take the next ``count`` prompts and cancellations between two passes.

    Otherwise an answer may have ended before a busy machine asks for what shall be beside it.
    """
    orders = engine._thread._orders

    def wait() -> None:
        latest = time.monotonic() + SECONDS
        while orders.qsize() < count:
            assert time.monotonic() < latest, "nothing came that shall begin together"
            time.sleep(0.001)

    orders.put(wait)


class Consumer:
    """Keeps the steps of one answer.

    Args:
        act: called with every step after it is kept, in the thread of the Engine.
    """

    def __init__(self, act: Callable[[Step], object] = lambda _: None) -> None:
        self.steps: list[Step] = []
        self.ended = threading.Event()
        self._act = act

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        if step.is_last:
            self.ended.set()
        self._act(step)

    @property
    def tokens(self) -> list[int]:
        return [step.token for step in self.steps if step.token is not None]

    def last(self) -> Step:
        """Waits for the end, of which there is one."""
        assert self.ended.wait(SECONDS), "nobody said how it ended"
        assert [step.is_last for step in self.steps] == [False] * (len(self.steps) - 1) + [True]
        return self.steps[-1]
