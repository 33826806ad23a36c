"""What takes the steps of an answer in tests, and misbehaves where a test wants that."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tq_onnx.runtime.jobs import Step

SECONDS = 120
"""Until an answer has ended, on a busy machine."""


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
