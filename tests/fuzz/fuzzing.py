"""Fuzz one lane: ``python -m tests.fuzz LANE``.

The case of a number is the same at every time, so a finding has a number. A process of its own runs
the cases: one that ends it, hangs or takes too much memory is a finding, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final

from tests.fuzz.lanes import LANES, Lane, lane
from tests.remembering import remembering

MOST_SECONDS: Final = 120
"""Of a case, by the clock; what a case takes of the processor is judged elsewhere."""
MOST_BYTES: Final = 2 << 30
"""Of the process; allocations beyond it fail."""
_FORK: Final = multiprocessing.get_context("fork")


def fuzz(chosen: Lane, numbers: range, seconds: float, most: float = MOST_SECONDS) -> int:
    """Run the cases of numbers until time is up; print the broken promises, return how many.

    Args:
        chosen: the lane.
        numbers: of the cases.
        seconds: after which no case begins.
        most: seconds of a case.
    """
    chosen.warm()
    counts = _FORK.Array("q", [numbers.start, 0, 0])  # the case that runs, cases, broken promises
    process = _FORK.Process(target=_work, args=(chosen, numbers, seconds, most, counts))
    process.start()
    process.join()
    number, cases, problems = counts
    if process.exitcode:
        print(f"{number}: the process ended with {process.exitcode}", file=sys.stderr, flush=True)
        problems += 1
    print(f"{chosen.name}: {cases} cases from {numbers.start} on, {problems} broken promises")
    return problems


def _work(chosen: Lane, numbers: range, seconds: float, most: float, counts: Any) -> None:
    """Runs in the process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() >= end:
            return
        counts[0] = number
        faulthandler.dump_traceback_later(most, exit=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                problems = chosen.check(random.Random(number), Path(folder)).problems
            except Exception:  # MemoryError, too
                problems = [f"exception: {traceback.format_exc()[-3000:]}"]
        counts[1] += 1
        counts[2] += len(problems)
        for problem in problems:
            print(f"{number}: {problem}", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Fuzz a lane; the exit code is 1 if it found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("lane", choices=LANES)
    parser.add_argument(
        "--numbers", nargs=2, type=int, metavar=("FIRST", "LAST"), default=(0, 1 << 62)
    )
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    with remembering():
        return min(1, fuzz(lane(given.lane), range(*given.numbers), given.seconds))
