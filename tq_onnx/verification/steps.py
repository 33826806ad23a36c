"""The steps of a verification: one bar for all of them, and how long they will take.

The first steps of a verification are timed: opening both models, one call with a prompt, one with a
single token, and one encoding by the reference, which takes most of the last step. The time of the
other steps is estimated as multiples of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tq_onnx.measure.loss import LOSS_TOKENS
from tq_onnx.progress import OnProgress, Progress

OPENING: Final = "Opening both models"
TEXT: Final = "Reading the text with both models"
GREEDY: Final = "Continuing a prompt with both models"
CALIBRATION: Final = "Comparing the calibration with the original"
FEEDING: Final = "Feeding caches in every way"
QUALITY: Final = "Comparing both models on a text of the original"
FIDELITY: Final = "Comparing everything but the codecs with the original"
LAYERS: Final = "Comparing the layers with the reference"
DEVICE: Final = "Comparing a device with the CPU"

ORDER: Final = (OPENING, TEXT, GREEDY, CALIBRATION, FEEDING, QUALITY, FIDELITY, LAYERS, DEVICE)

_THEORY_TOKENS: Final = 640
"""Whose rows the reference makes besides, to say what theory promises."""

_JUDGING: Final = 3.0
"""Times that of encoding a row: judging it, and attention of its token."""

_FED_STEPS: Final = 8
"""Tokens that follow a prompt in each way to feed caches."""

_UNITS: Final = 1000
"""Of the bar, for each second."""


@dataclass(frozen=True)
class Seconds:
    """What was timed, with both models but for the last."""

    opening: float  #: opening them
    token: float  #: one token of a prompt
    step: float  #: one token alone
    encoding: float  #: what the reference takes to encode one token of all layers

    def of_steps(
        self,
        *,
        prompt: int,
        text: int | None,
        new_tokens: int,
        chunk: int,
        probed: int,
        backends: int,
        has_device: bool,
    ) -> dict[str, float]:
        """Return what the steps will take.

        Args:
            prompt: tokens of the prompt.
            text: tokens of all windows of the text; None if it is not read, nor are caches fed.
            chunk: tokens of a call where caches are fed in chunks.
            probed: tokens of each layer that are compared with the reference.
        """
        read = prompt * self.token
        rows = backends * prompt + (0 if text is None else probed + _THEORY_TOKENS)
        seconds = {
            OPENING: self.opening + read + self.step,
            CALIBRATION: (prompt if text is None else probed) * self.token / 2,
            QUALITY: self.opening / 2 + LOSS_TOKENS * (self.token + self.step / 8),
            FIDELITY: self.opening + 2 * read + 4 * self.step,
            LAYERS: backends * self.opening + _JUDGING * rows * self.encoding,
        }
        if text is not None:
            seconds[TEXT] = text * self.token
            seconds[GREEDY] = read + new_tokens * self.step
            fed = prompt // chunk + _FED_STEPS
            seconds[FEEDING] = self.opening / 2 + 3 * read + fed * self.step
        if has_device:
            seconds[DEVICE] = self.opening + read + new_tokens * self.step
        return seconds


class Steps:
    """One progress for steps that are of unlike length."""

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
        elapsed = self._done + before + share * self._seconds.get(self._step, 0.0)
        whole = self._parts * sum(self._seconds.values())
        total = max(1, round(_UNITS * whole))
        self._tell(Progress(self._step, min(round(_UNITS * elapsed), total), total, seconds=whole))
