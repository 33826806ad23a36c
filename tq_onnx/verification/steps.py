"""The steps of a verification: one bar for all of them, and how long they will take.

Nobody knows before how fast a machine is. So the first things that a verification does anyway are
timed: opening both models, one call with a prompt, one with a single token, and one encoding by the
reference, in which most of the last step goes. The others are multiples of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tq_onnx.progress import OnProgress, Progress

OPENING: Final = "Opening both models"
TEXT: Final = "Reading the text with both models"
GREEDY: Final = "Continuing a prompt with both models"
CALIBRATION: Final = "Comparing the calibration with the original"
FEEDING: Final = "Feeding caches in every way"
FIDELITY: Final = "Comparing everything but the codecs with the original"
LAYERS: Final = "Comparing the layers with the reference"
DEVICE: Final = "Comparing a device with the CPU"

ORDER: Final = (OPENING, TEXT, GREEDY, CALIBRATION, FEEDING, FIDELITY, LAYERS, DEVICE)

_UNITS: Final = 1000
"""Of the bar, for each second."""


class Steps:
    """One progress for steps that are of unlike length.

    Args:
        on_progress: called as each step begins and goes on.
        parts: how often all steps are done: once for each part of a merged model.
    """

    def __init__(self, on_progress: OnProgress, *, parts: int = 1) -> None:
        """Begin with nothing done, and no idea how long it takes."""
        self._tell = on_progress
        self._parts = parts
        self._done = 0.0
        self._seconds: dict[str, float] = {}
        self._step = OPENING

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Take what steps are expected to take; those that are not named take nothing."""
        self._seconds = dict(seconds)
        self._say(0.0)

    def begin(self, step: str) -> None:
        """Go on to a step."""
        self._step = step
        self._say(0.0)

    def within(self, moment: Progress) -> None:
        """Go on inside of the step: what ``on_progress`` of its work is called with."""
        self._say(moment.done / moment.total if moment.total else 0.0)

    def end_part(self) -> None:
        """Count a part of a merged model as done."""
        self._done += sum(self._seconds.values())

    def _say(self, share: float) -> None:
        if not self._seconds:
            self._tell(Progress(self._step))
            return
        before = sum(
            seconds
            for step, seconds in self._seconds.items()
            if ORDER.index(step) < ORDER.index(self._step)
        )
        done = self._done + before + share * self._seconds.get(self._step, 0.0)
        whole = self._parts * sum(self._seconds.values())
        total = max(1, round(_UNITS * whole))
        self._tell(Progress(self._step, min(round(_UNITS * done), total), total, seconds=whole))
