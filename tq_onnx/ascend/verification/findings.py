"""The findings of one part of the verification: checks, times, the device. Data for JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.environment import Environment
from tq_onnx.errors import TqOnnxError
from tq_onnx.verification.checks import Check

Figures = Mapping[str, float | str | Mapping[str, int] | None]

PARTS: Final = (
    *("device", "CANN's attention", "encode", "attention", "decoder", "bundled", "models"),
)
"""All parts in their order; the first one finds out what the device is."""


@dataclass(frozen=True)
class Request:
    """The amount of work of the parts.

    Attributes:
        models: models to check besides the bundled one: converted for CANN, or originals.
        brief: True for small sizes.
    """

    models: tuple[Path, ...] = ()
    brief: bool = False

    def to_json(self) -> str:
        """Write the request for another process."""
        files = [str(model.resolve()) for model in self.models]
        return json.dumps({"models": files, "brief": self.brief})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request that ``to_json`` wrote."""
        document = json.loads(text)
        return cls(tuple(map(Path, document["models"])), document["brief"])


@dataclass(frozen=True)
class DeviceCheck(Check):
    """A property of a device.

    Attributes:
        figures: the measured numbers, by name.
        expected: the property in words.
        problem: why the check did not come to an end, or was not done; None if it ended.
    """

    figures: Figures = field(default_factory=dict)
    expected: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class Timing:
    """Times of one piece of work, done several times.

    Attributes:
        name: the work, with its sizes.
        runs: number of timed runs.
        median_ms: the median, in milliseconds.
        fastest_ms: the shortest time, in milliseconds.
    """

    name: str
    runs: int
    median_ms: float
    fastest_ms: float

    @classmethod
    def of(cls, name: str, seconds: Sequence[float]) -> Timing:
        """Make the figures of times in seconds."""
        return cls(
            name,
            len(seconds),
            round(1000 * statistics.median(seconds), 6),
            round(1000 * min(seconds), 6),
        )


@dataclass(frozen=True)
class Effort:
    """The amount of work.

    Attributes:
        runs: timed runs of an operator.
        more_calls: calls of an operator in a run besides the first.
        context: tokens in the caches when decode of a model is timed.
        keys: tokens in the caches when attention is timed, and an eighth of the most.
        steps: timed steps of decode.
        new_tokens: greedy tokens that are compared.
        most: elements of the largest query that attention is checked with.
        moved: bytes of the largest tensor that is only moved.
    """

    runs: int = 50
    more_calls: int = 8
    context: int = 512
    keys: int = 4096
    steps: int = 32
    new_tokens: int = 64
    most: int = 1 << 30
    moved: int = 1 << 25


#: For a simulated device: it is slow, and its times mean nothing.
BRIEF = Effort(
    runs=3, more_calls=1, context=16, keys=16, steps=2, new_tokens=16, most=1 << 15, moved=1 << 15
)


@dataclass
class Findings:
    """The findings of a part so far.

    Attributes:
        effort: the amount of work.
        checks: the checks, in order.
        timings: the times, in order.
        simulated: True on a simulated device; None if that was not found out.
        environment: device and versions; None if they were not found out.
    """

    effort: Effort = field(default_factory=Effort)
    checks: list[DeviceCheck] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    simulated: bool | None = None
    environment: Environment | None = None

    def check(self, name: str, measure: Callable[[], tuple[bool, Figures]], expected: str) -> None:
        """Run a check; an error of any kind is a check that failed."""
        try:
            holds, figures = measure()
        except Exception as error:
            self.checks.append(DeviceCheck(name, False, expected=expected, problem=clause(error)))
        else:
            self.checks.append(DeviceCheck(name, holds, figures, expected))

    def time(self, name: str, measure: Callable[[], Sequence[float]]) -> None:
        """Time some work; an error of any kind is a check that failed."""
        try:
            self.timings.append(Timing.of(name, measure()))
        except Exception as error:
            self.checks.append(DeviceCheck(f"timing of {name}", False, problem=clause(error)))


def clause(error: Exception) -> str:
    """Return the text of an error for a report."""
    kind = "" if isinstance(error, TqOnnxError) else f"{type(error).__name__}: "
    return anonymise(f"{kind}{error}")
