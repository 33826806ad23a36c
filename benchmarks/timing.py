"""How contenders are timed: in turns, cold, the median; see README.md of this folder."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from contender import Step
from processes import WorkerError, WorkerProcess

WAKE_SECONDS = 0.02
"""Untimed steps at the begin of a turn."""

BURST_SECONDS = 0.05
"""Timed steps of a turn."""

MOST_STEPS = 64
"""Timed steps of a turn, at most."""

FEWEST_ROUNDS = 5


@dataclass
class Timing:
    """What was found of one contender at one step.

    Attributes:
        cache_bytes: of one copy.
        ms: milliseconds of every timed step.
        bursts: the median of each turn.
        missing: why there are none.
    """

    cache_bytes: int = 0
    ms: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    missing: str = ""

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.ms)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        first, _, third = statistics.quantiles(self.ms, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: the median of the better loop, and the best that was seen."""

    median: float
    best: float


@dataclass(frozen=True)
class Probe:
    """Whose caches are read, by what, and what was found, in bytes per second."""

    host: str
    library: str
    rates: Mapping[str, list[float]]


@dataclass(frozen=True)
class Limits:
    """How long, how cold and how large.

    Attributes:
        seconds: per contender and step.
        cold_bytes: the copies of a contender's caches together, at least.
        memory: bytes of all that is in memory at one time, without sessions.
    """

    seconds: float
    cold_bytes: int
    memory: int


def measure(
    workers: Mapping[str, WorkerProcess],
    step: Step,
    threads: int,
    limits: Limits,
    *,
    probe: str | None,
) -> tuple[dict[str, Timing], Bandwidth | None]:
    """Times all contenders at one step.

    Args:
        workers: open workers by name.
        step: what they do.
        threads: how many each has.
        limits: how long, how cold, how large.
        probe: the compiled bandwidth probe; it reads the caches of the first contender that has
            some in plain pages, which is in memory all the time.

    Returns:
        What was found by name, and the bandwidth, if there is a probe.
    """
    timings = {name: Timing() for name in workers}
    copies = _copies(workers, step, limits, timings)
    rates: dict[str, list[float]] = {"plain": [], "prefetching": []}
    host = ""
    for group in _groups(copies, timings, limits.memory):
        names = [host, *group] if host else group
        ready = {}
        for name in names:
            try:
                answer = workers[name].ask(
                    do="prepare",
                    step=asdict(step),
                    threads=threads,
                    copies=copies[name],
                    cold_bytes=limits.cold_bytes,
                )
            except WorkerError as error:
                timings[name].missing = str(error)
                continue
            ready[name] = workers[name]
            if not host and probe is not None and answer["readable"]:
                host = name
        _rounds(ready, timings, limits, Probe(host, probe, rates) if host and probe else None)
        for name in names:
            _free(workers[name])
    if not rates["plain"]:
        return timings, None
    medians, bests = (
        [kind(bytes_per_second) for bytes_per_second in rates.values()]
        for kind in (statistics.median, max)
    )
    return timings, Bandwidth(max(medians), max(bests))


def _copies(
    workers: Mapping[str, WorkerProcess],
    step: Step,
    limits: Limits,
    timings: Mapping[str, Timing],
) -> dict[str, int]:
    """How many copies of its caches each contender gets."""
    sizes, most = {}, {}
    for name, worker in workers.items():
        try:
            answer = worker.ask(do="size", step=asdict(step))
        except WorkerError as error:
            timings[name].missing = str(error)
            continue
        timings[name].cache_bytes = sizes[name] = answer["cache_bytes"]
        most[name] = answer["most_copies"] or math.inf

    def choose(fewest: int) -> dict[str, int]:
        copies = {n: max(fewest, -(-limits.cold_bytes // size)) for n, size in sizes.items()}
        return {name: int(min(count, most[name])) for name, count in copies.items()}

    # A cache that is larger than what it is to be pushed out of pushes itself out.
    copies = choose(2)
    if sum(copies[name] * size for name, size in sizes.items()) > limits.memory:
        copies = choose(1)
    return copies


def _groups(
    copies: Mapping[str, int], timings: Mapping[str, Timing], memory: int
) -> Iterable[list[str]]:
    """Contenders that are in memory together."""
    group: list[str] = []
    used = 0
    for name, count in copies.items():
        needed = count * timings[name].cache_bytes
        if needed > memory:
            timings[name].missing = f"needs {needed / 1e9:.1f} GB, more than --max-memory"
            continue
        if used + needed > memory:
            yield group
            group, used = [], 0
        group.append(name)
        used += needed
    if group:
        yield group


def _rounds(
    ready: dict[str, WorkerProcess],
    timings: Mapping[str, Timing],
    limits: Limits,
    probe: Probe | None,
) -> None:
    """Turns, in an order that is another one in each round."""
    end = time.perf_counter() + limits.seconds * len(ready)
    order = random.Random(0)
    host = probe.host if probe is not None else ""
    turn = {"seconds": min(BURST_SECONDS, limits.seconds / FEWEST_ROUNDS), "most": MOST_STEPS}
    rounds = 0
    while ready and (rounds < FEWEST_ROUNDS or time.perf_counter() < end):
        names = [*ready, *([""] if probe is not None else [])]
        order.shuffle(names)
        for name in names:
            try:
                if name:
                    worker = ready[name]
                    ms = worker.ask(do="burst", wake=WAKE_SECONDS, **turn)["ms"]
                    timings[name].ms += ms
                    timings[name].bursts.append(statistics.median(ms))
                elif probe is not None and host in ready:
                    worker = ready[host]
                    answer = worker.ask(do="read", library=probe.library, **turn)
                    for loop, values in probe.rates.items():
                        values.extend(answer[loop])
            except WorkerError as error:
                failed = name or host
                timings[failed].missing = str(error)
                timings[failed].ms.clear()
                del ready[failed]
                continue
            worker.wait_until_quiet()
        rounds += 1


def _free(worker: WorkerProcess) -> None:
    with contextlib.suppress(WorkerError):  # it has ended, which its row says
        worker.ask(do="free")
